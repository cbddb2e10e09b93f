"""examples/finetune: a folder of transformers in, one out with the logits that were trained."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from autopipe.planfile.contents import Plan
from autopipe.util import codec
from tests.support.inprocess import machine
from tests.support.shell import ROOT, Shell, ranks, start

FINETUNE = ROOT / "examples/finetune"
WORDS = torch.arange(40).reshape(2, 20)


@pytest.fixture
def shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """A folder with the example, a text, and a Llama of two layers in `base`."""
    for path in FINETUNE.glob("*.py"):
        shutil.copy(path, tmp_path)
    shutil.copy(ROOT / "README.md", tmp_path / "text.txt")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    for name, value in {"BASE": "base", "TEXT": "text.txt", "LENGTH": "16", "ROWS": "4"}.items():
        monkeypatch.setenv(name, value)
    return Shell(tmp_path, monkeypatch, capsys)


def trained(shell: Shell, source: str, *how: str, processes: int = 2) -> None:
    """Three steps: checkpoints in `kept`, and the model in whole.safetensors."""
    codec.save(machine(processes), shell.folder / "cluster.json")
    said = shell("plan", source, "--cluster", "cluster.json", "--batch", "4", *how)
    assert said.code == 0, said.err
    assert len(Plan.load("plan.json").mesh.places) == processes
    run = ("run", "plan.json", "--steps", "3", "--save", "whole.safetensors")
    run += ("--checkpoints", "kept", "--save-every", "2")
    alone = processes == 1
    said = shell(*run) if alone else ranks(2, "-m", "autopipe", *run, folder=shell.folder)
    assert said.code == 0, said.err


def example(monkeypatch: pytest.MonkeyPatch, name: str = "lora") -> dict[str, Any]:
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "lora", raising=False)
    return runpy.run_path(f"{name}.py", run_name=name)


def logits(model: nn.Module | str) -> Tensor:
    """Of a model, or of a folder as `transformers` loads it."""
    if isinstance(model, str):
        model = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        found: Tensor = model.eval()(WORDS).logits
    return found


@pytest.mark.long
@pytest.mark.parametrize("stages", [1, 2])
def test_lora_is_merged_into_a_folder(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    trained(shell, "lora.py", "--pp", str(stages), "--micro-batches", "2", processes=stages)
    said = shell("checkpoint", "convert", "kept", "-o", "trained.safetensors")
    assert said.code == 0, said.err
    example(monkeypatch, "merge")["main"]("trained.safetensors", "merged")

    lora = example(monkeypatch)["model"]()
    load_model(lora, "whole.safetensors")
    torch.testing.assert_close(logits("merged"), logits(lora), rtol=0, atol=1e-6)
    assert (logits("merged") - logits("base")).abs().max() > 1e-4
    base, after = load_file("base/model.safetensors"), load_file("trained.safetensors")
    frozen = {name.replace(".base.", "."): after[name] for name in after if ".base." in name}
    assert len(frozen) == 14 and all(torch.equal(frozen[name], base[name]) for name in frozen)


def test_what_is_drawn_is_the_same_for_any_number_of_replicas(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = example(monkeypatch)["batches"]
    whole = next(batches(4))["input_ids"]
    parts = [next(batches(4, shard, 2))["input_ids"] for shard in range(2)]
    assert whole.shape == (4, 16) and torch.equal(whole, torch.cat(parts))


def test_a_folder_that_is_not_there(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE", "gone")
    assert "BASE=gone is no folder with a config.json" in shell("plan", "lora.py").error


def test_a_tokenizer_of_the_folder_is_used(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "autopipe": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    fast.save_pretrained("base")
    text = Path("text.txt").read_text()
    assert example(monkeypatch)["tokens"]().tolist() == fast(text)["input_ids"]


@pytest.mark.long
@pytest.mark.parametrize("source", ["lora.py", "hf:base?length=16"])
def test_all_weights(shell: Shell, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """A folder whose logits are, in every bit, those of the model that the run saved."""
    monkeypatch.setenv("LORA_RANK", "0")
    trained(shell, source, "--pp", "2")
    said = shell("checkpoint", "convert", "kept", "-o", "trained", "--config", "base")
    assert said.code == 0, said.err
    model = transformers.AutoModelForCausalLM.from_pretrained("base")
    load_model(model, "whole.safetensors")
    assert torch.equal(logits("trained"), logits(model))
    assert not torch.equal(logits("trained"), logits("base"))


COMPARE = """
import lora, torch
from safetensors.torch import load_model
from transformers import AutoModelForCausalLM

words = torch.arange(40).reshape(2, 20)
trained, merged = lora.model(), AutoModelForCausalLM.from_pretrained("merged")
load_model(trained, "whole.safetensors")
print((trained(words).logits - merged(words).logits).abs().max().item())
"""


@pytest.mark.long
@pytest.mark.parametrize("how", [("--dp", "2"), ("--tp", "2"), ("--dp", "2", "--zero", "3")])
def test_other_plans_and_a_process_of_its_own(shell: Shell, how: tuple[str, ...]) -> None:
    """As README.md has it: merge.py and the loading are programs that know nothing of autopipe."""
    trained(shell, "lora.py", *how)
    said = shell("checkpoint", "convert", "kept", "-o", "trained.safetensors")
    assert said.code == 0, said.err
    for argv in (("merge.py", "trained.safetensors", "merged"), ("-c", COMPARE)):
        process = start(sys.executable, *argv, folder=shell.folder)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert float(out) < 1e-6
