"""What a run leaves on the disk: where the user said, and all of it but for what has no room."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.shell import BATCHES, NET, Shell

LOST = """

def scheduler(optimizer):  # between the door and the end of the run the folder goes
    import shutil
    shutil.rmtree("gone")
    return torch.optim.lr_scheduler.ConstantLR(optimizer)
"""


@pytest.mark.parametrize(
    ("option", "file"), [("--trace", "gone/t.json"), ("--checkpoints", "gone/kept")]
)
def test_what_cannot_be_written_costs_nothing_else(option: str, file: str, autopipe: Shell) -> None:
    """The error comes last: by then the model is saved, and the losses are told."""
    autopipe.plan(1, "--batch", "4")
    (autopipe.folder / "gone").mkdir()
    autopipe.write("net.py", NET + BATCHES + LOST)
    if option == "--checkpoints":  # a file where the folder was to be
        text = LOST.replace('rmtree("gone")', 'rmtree("gone"); open("gone", "w").close()')
        autopipe.write("net.py", NET + BATCHES + text)
    said = autopipe("run", "plan.json", option, file, "--save", "net.safetensors")
    assert said.code == 2 and "Traceback" not in said.err
    assert "cannot be written" in said.err or "was not written" in said.err
    assert said.out.splitlines()[-1].startswith("loss ")
    assert {"up.weight", "down.bias"} <= load_file(autopipe.folder / "net.safetensors").keys()


ASKED = """

def scheduler(optimizer):  # as a cluster does it before the job's time is up
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)
    return torch.optim.lr_scheduler.ConstantLR(optimizer)
"""


@pytest.mark.parametrize("end", ["stopped", "without its last checkpoint"])
def test_the_trace_of_a_run_that_ended_otherwise_is_in_its_record(
    end: str, autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: one that is written elsewhere was not copied there."""
    autopipe.plan(1, "--batch", "4")
    if end == "stopped":
        monkeypatch.setattr("autopipe.runtime.launch.asked._received", [])
        autopipe.write("net.py", NET + BATCHES + ASKED)
    else:
        (autopipe.folder / "gone").mkdir()
        text = LOST.replace('rmtree("gone")', 'rmtree("gone"); open("gone", "w").close()')
        autopipe.write("net.py", NET + BATCHES + text)
    elsewhere = ("--record", "rec", "--trace", "t.json", "--checkpoints", "gone/kept")
    said = autopipe("run", "plan.json", *elsewhere)
    assert said.code == (0 if end == "stopped" else 2), said.err
    assert ("saved and stopped after step 1" in said.err) == (end == "stopped")
    trace = (autopipe.folder / "rec" / "trace.json").read_text()
    assert trace == (autopipe.folder / "t.json").read_text() != ""


CHANGES = """\
import os
from pathlib import Path
data = Path(__file__).parent / "data"
data.mkdir(exist_ok=True)
os.chdir(data)
"""


@pytest.mark.long
def test_a_model_file_that_changes_the_folder(autopipe: Shell) -> None:
    """As of its data: what the command names is still meant from where it was called."""
    autopipe.write("net.py", CHANGES + NET + BATCHES)
    here = autopipe.folder

    def ran(*argv: str) -> None:
        autopipe.at_home()
        said = autopipe(*argv)
        assert said.code == 0, said.err

    ran("plan", "net.py", "--cluster", "local:1", "--batch", "4", "-o", "plan.json")
    ran("check", "net.py")
    ran(
        *("run", "plan.json", "--model", "net.py", "--save", "net.safetensors"),
        *("--trace", "t.json", "--metrics", "m.jsonl", "--checkpoints", "kept", "--record", "rec"),
    )
    weights = load_file(here / "net.safetensors")
    ran("run", "plan.json", "--weights", "net.safetensors", "--save", "more.safetensors")
    ran("emit", "plan.json", "-o", "out")
    ran("report", "rec")
    assert not any((here / "data").iterdir())
    assert {path.name for path in here.iterdir()} >= {"t.json", "m.jsonl", "kept", "out", "rec"}
    for file, copy in (("t.json", "trace.json"), ("m.jsonl", "metrics.jsonl")):
        assert (here / file).read_text() == (here / "rec" / copy).read_text() != ""
    more = load_file(here / "more.safetensors")
    assert more.keys() == weights.keys()
    assert not torch.equal(more["up.weight"], weights["up.weight"])


@pytest.mark.parametrize("seed", [str(2**64), str(-(2**63) - 1)])
def test_a_seed_that_torch_has_not(seed: str, autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    said = autopipe("run", "plan.json", "--seed", seed)
    assert said.code == 2 and said.error.startswith(f"--seed {seed} has more than 64 bits")


def test_emitted_files_refuse_a_folder_before_they_train(autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    said = autopipe("emit", "plan.json", "-o", "my files")
    assert "run it: torchrun --nproc-per-node 1 'my files/train.py'\n" in said.err
    assert "cli.check_file(trace)" in Path(autopipe.folder / "my files/train.py").read_text()
