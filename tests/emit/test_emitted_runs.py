"""Emitted files under torchrun do what `autopipe run` does with the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from autopipe import Plan
from tests.support.shell import NET, TORCHRUN, Said, Shell, end, free_port, ranks, start

TOLD = (
    NET
    + """

class Telling(torch.optim.SGD):
    def step(self):
        gradients = [p.grad.reshape(-1).tolist() for p in self.param_groups[0]["params"]]
        with open(f"gradients.{os.environ['RANK']}", "a") as file:
            print(gradients, file=file)
        super().step()


def optimizer(parameters):
    return Telling(parameters, lr=0.1) if "RANK" in os.environ else torch.optim.SGD(parameters)
"""
)


def torchrun(*argv: str, folder: Path) -> Said:
    launcher = (*TORCHRUN, "--nproc-per-node", "2", f"--master-port={free_port()}")
    return end(start(*launcher, *argv, folder=folder))


@pytest.mark.parametrize(
    ("how", "launch"),
    [
        pytest.param(("--pp", "2"), torchrun, marks=pytest.mark.long),
        pytest.param(  # with the same environment
            ("--dp", "2", "--zero", "3"), partial(ranks, 2), marks=pytest.mark.long
        ),
        (  # ranks hold copies of what the files declare as masters
            ("--dp", "2", "--zero", "3", "--precision", "bf16"),
            partial(ranks, 2),
        ),
        pytest.param(
            ("--dp", "2", "--zero", "1", "--precision", "bf16"),
            partial(ranks, 2),
            marks=pytest.mark.long,
        ),
    ],
    ids=["torchrun", "zero 3", "zero 3, bf16", "zero 1, bf16"],
)
def test_torchrun_does_what_run_does(
    how: Sequence[str],
    launch: Callable[..., Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same gradients to the bit, and the same last line."""
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.write("net.py", "import os\n" + TOLD)
    shell.plan(2, *how, "--batch", "8", "--micro-batches", "2")
    assert shell("emit", "plan.json", "-o", "out").out == "out\n"
    assert Plan.load(tmp_path / "out" / "plan.json").source == "../net.py"

    def gradients() -> list[str]:
        files = [tmp_path / f"gradients.{rank}" for rank in range(2)]
        found = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return found

    run = ranks(2, "-m", "autopipe", "run", "plan.json", "--steps", "3", folder=tmp_path)
    assert run.code == 0, run.err
    expected = gradients()
    again = launch("out/train.py", "--steps", "3", folder=tmp_path)
    assert again.code == 0, again.err
    assert gradients() == expected
    assert again.out.splitlines()[-1] == run.out.splitlines()[-1]


@pytest.mark.long  # `test_emit` reads train.py
def test_a_folder_with_weights_is_trained_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: train.py began with random numbers, without a word, where `autopipe run` fine-tunes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    net = transformers.GPT2LMHeadModel(config)
    for parameter in net.parameters():
        parameter.data.mul_(4)  # which no initialiser makes
    net.save_pretrained(tmp_path / "gpt2")
    shell = Shell(tmp_path, monkeypatch, capsys)
    (tmp_path / "files").mkdir()
    assert shell("plan", "hf:gpt2", "--cluster", "cpu:1", "--batch", "4").code == 0
    assert shell("emit", "plan.json", "-o", "files/out").code == 0
    run = ranks(1, "-m", "autopipe", "run", "plan.json", "--steps", "2", folder=tmp_path)
    again = ranks(1, "files/out/train.py", "--steps", "2", folder=tmp_path)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1] == run.out.splitlines()[-1]


TOKENS = """\
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))

def inputs(rows):
    tokens = torch.arange(8 * rows).view(rows, 8) % 8
    return {"input": tokens, "labels": tokens.flip(1)}

def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
"""


def test_files_of_a_plan_of_several_lengths_are_of_the_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: nothing said so until the first shorter batch was refused, in the middle of training."""
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.write("net.py", TOKENS)
    shell.plan(1, "--batch", "4", "--lengths", "4,6,8")
    assert "take rows of 8 tokens alone, and refuse the plan's 4, 6" in (
        shell("emit", "plan.json", "-o", "out").err
    )


def test_a_mistake_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `autopipe run` tells it, and with its exit code."""
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.plan(1, "--pp", "1", "--batch", "8", "--micro-batches", "2")
    assert shell("emit", "plan.json", "-o", "out").code == 0
    missing = shell("emit", "plan.json", "-o", "other", "--model", "x.py")
    assert missing.error.startswith("there is no model file 'x.py'")
    nowhere = shell("emit", "plan.json", "-o", "gone/out", "--model", "x.py")  # before long work
    assert nowhere.error.startswith("gone/out cannot be written: there is no folder ")
    programs_ = tmp_path / "out" / "programs.txt"
    programs_.write_text(programs_.read_text().replace(" 0STEP", ""))
    said = ranks(1, "out/train.py", "--steps", "1", folder=tmp_path)
    wrong, hint = said.error.split("\n\n")
    assert wrong == f"{programs_}: rank 0 lacks 0STEP"
    assert hint == "hint: mend the file, or emit it again, with --force"
