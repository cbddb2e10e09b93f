"""`autopipe export`: the files and the stdout of each target, and options that a target refuses."""

import os
from pathlib import Path

import pytest

from autopipe.interop.targets import RUNTIMES
from tests.support.shell import Shell
from tests.support.spread import on_cpus


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    shell = Shell(tmp_path, monkeypatch, capsys)
    on_cpus(2, 1).save("plan.json")
    return shell


def test_to_stdout_or_a_file_that_runs(autopipe: Shell) -> None:
    shown = autopipe("export", "plan.json", "--to", "torchrun")
    written = autopipe("export", "plan.json", "--to", "torchrun", "-o", "train.sh")
    assert (shown.code, written.code, written.out) == (0, 0, "")
    assert written.err == "train.sh: for torchrun\n"
    assert Path("train.sh").read_text() == shown.out
    assert os.access("train.sh", os.X_OK)


def test_options_of_run_stand_behind_two_dashes(autopipe: Shell) -> None:
    said = autopipe("export", "plan.json", "--to", "slurm", "--", "--steps", "9", "--save", "m.s")
    assert "    exec python -m autopipe run plan.json --steps 9 --save m.s\n" in said.out


def test_checkpoints(autopipe: Shell) -> None:
    words = ("--checkpoints", "kept", "--save-every", "10", "--keep", "2", "--time", "1:00:00")
    said = autopipe("export", "plan.json", "--to", "slurm", *words)
    assert " --checkpoints kept --resume --save-every 10 --keep 2\n" in said.out
    assert "#SBATCH --time=0-01:00:00\n" in said.out


@pytest.mark.parametrize("target", RUNTIMES)
def test_what_a_runtime_cannot_say_is_told(target: str, autopipe: Shell) -> None:
    said = autopipe("export", "plan.json", "--to", target)
    assert said.code == 0 and said.out
    assert f"{target} cannot say: " in said.err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--to", "mars"], "--to: expected one of torchrun, slurm, kubeflow, "),
        (["--to", "slurm", "--", "--local", "2"], "--local starts processes itself"),
        (["--to", "slurm", "--", "--steps", "0"], "--steps: "),
        (
            ["--to", "slurm", "--", "--frob"],
            "there is no option '--frob'\n\nhint: `autopipe run --help` lists all options",
        ),
        (["--to", "slurm", "--name", "a b"], "--name: expected small letters, digits and -"),
        (["--to", "kubeflow"], "a pod needs an image, and none was named"),
        (["--to", "megatron", "--image", "x"], "--image is for launchers, and megatron is none"),
        (["--to", "slurm", "--rows", "3"], "--rows is for onnx, and slurm is none"),
        (["--to", "megatron", "--rows", "3"], "--rows is for onnx, and megatron is none"),
        (["--to", "onnx", "--image", "x"], "--image is for launchers, and onnx is none"),
        (["--to", "torchrun", "--array", "1-2"], "--array has no meaning for torchrun; it is a"),
        (["--to", "slurm", "-o", "none/x.sh"], "none/x.sh cannot be written: there is no folder"),
    ],
)
def test_what_is_refused(argv: list[str], sentence: str, autopipe: Shell) -> None:
    assert autopipe("export", "plan.json", *argv).error.startswith(sentence)
