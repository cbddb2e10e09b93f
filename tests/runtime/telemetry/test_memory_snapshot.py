"""Snapshots of a GPU's memory: which step, which ranks, which files; torch's own part is a fake."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import AutopipeError
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.parts import Place
from autopipe.runtime.telemetry.destinations import MemorySnapshot, snapshot_of
from autopipe.runtime.telemetry.memory_snapshot import GpuBytes, most_bytes, recorded
from autopipe.runtime.train import train
from tests.support.inprocess import machine
from tests.support.plans import example_plan
from tests.support.shell import Shell

GPU = Place(3, 1, 0, 1, 0, 3, "A100-80GB")
CPU = replace(GPU, device="cpu")


class Allocator:
    """In the place of `torch.cuda.memory`: what it was told, and what it saw meanwhile."""

    def __init__(self) -> None:
        self.recording = False
        self.seen: list[str] = []

    def record(self, enabled: str | None = "all", **options: object) -> None:
        assert enabled is None or options == {"stacks": "python", "clear_history": True}
        self.recording = enabled is not None

    def dump(self, path: str) -> None:
        assert self.recording and Path(path).name.startswith(".snapshot-rank")
        trace = [{"action": "alloc", "of": seen} for seen in self.seen]
        Path(path).write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))

    def make(self, what: str) -> None:
        """A tensor."""
        if self.recording:
            self.seen.append(what)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", found.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", found.dump)
    return found


def held(path: Path) -> list[str]:
    return [entry["of"] for entry in pickle.loads(path.read_bytes())["device_traces"][0]]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.*"))


def test_a_step_of_a_rank(memory: Allocator, tmp_path: Path) -> None:
    """Only what was made in that step, under the rank's name; the folder need not be there."""
    asked = MemorySnapshot(2, tmp_path / "run")
    for step in (1, 2, 3):
        with recorded(asked, step, GPU):
            memory.make(f"of step {step}")
    assert files(tmp_path) == ["snapshot-rank00003.pickle"]
    assert held(asked.file(3)) == ["of step 2"]
    assert not memory.recording


@pytest.mark.parametrize("place", [CPU, GPU], ids=["on a CPU", "not asked for"])
def test_nothing_is_recorded(place: Place, memory: Allocator, tmp_path: Path) -> None:
    with recorded(MemorySnapshot(1, tmp_path) if place is CPU else None, 1, place):
        assert not memory.recording
    assert files(tmp_path) == []


def test_a_step_that_runs_out_of_memory_is_written(memory: Allocator, tmp_path: Path) -> None:
    asked = MemorySnapshot(1, tmp_path)
    with pytest.raises(torch.OutOfMemoryError), recorded(asked, 1, GPU):
        memory.make("logits")
        raise torch.OutOfMemoryError("80 GiB were full")
    assert held(asked.file(3)) == ["logits"]
    assert not memory.recording


def test_a_file_that_cannot_be_written(
    memory: Allocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence; what there was stays, and nothing is recorded any longer."""
    asked = MemorySnapshot(1, tmp_path)
    asked.file(3).write_text("of an earlier run")

    def full(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    with pytest.raises(AutopipeError, match="00003.pickle cannot be written: No space left"):
        with recorded(asked, 1, GPU):
            pass
    assert asked.file(3).read_text() == "of an earlier run"
    assert files(tmp_path) == ["snapshot-rank00003.pickle"]
    assert not memory.recording


class Net(nn.Module):
    """Tells the allocator of each forward."""

    memory: Allocator

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def test_a_run_writes_the_step_that_was_asked_for(memory: Allocator, tmp_path: Path) -> None:
    """Its optimizer's part with it; what becomes of it is told at the end."""

    class Stepping(torch.optim.SGD):
        made = 0

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            Stepping.made += 1
            memory.make(f"update {Stepping.made}")

    file = ModelFile(
        "net.py", Net, lambda rows: (torch.ones(rows, 4),), None, None,
        lambda parameters: Stepping(parameters, lr=0.1), None, None,
    )  # fmt: skip
    plan = autopipe.plan(Net, file.inputs, cluster=machine(1), batch_size=4, micro_batches=1)
    pipe = autopipe.parallelize(Net, plan)
    pipe.place = replace(pipe.place, device="A100-80GB")
    said: list[str] = []
    asked = MemorySnapshot(2, tmp_path)
    train(pipe, file, 3, said.append, snapshot=asked)
    assert held(asked.file(0)) == ["update 2"]
    assert said[-1] == (
        f"{tmp_path}/snapshot-rank00000.pickle, and a file of each other rank: a GPU's memory in "
        "step 2; https://pytorch.org/memory_viz shows it"
    )
    assert asked.announcement(range(3, 6)) == (
        "--memory-snapshot 2: this run has not made that step, the last was 5"
    )


ON_GPUS = example_plan()
ON_CPUS = replace(
    ON_GPUS,
    mesh=replace(
        ON_GPUS.mesh, places=tuple(replace(place, device="cpu") for place in ON_GPUS.mesh.places)
    ),
)


def test_what_is_asked_for(tmp_path: Path) -> None:
    assert snapshot_of(5, tmp_path, ON_GPUS, None) == MemorySnapshot(5, tmp_path)
    assert snapshot_of(5, tmp_path, ON_GPUS, 5) == MemorySnapshot(5, tmp_path)
    for plan, folder, steps, sentence in (
        (ON_CPUS, tmp_path, None, "is of the memory of GPUs, and the plan is for 2 ranks on CPUs"),
        (ON_GPUS, None, None, "is a file of each rank, and there is no folder for them"),
        (ON_GPUS, tmp_path, 4, "is of a step that the run does not make, with --steps 4"),
    ):
        with pytest.raises(AutopipeError) as refused:
            snapshot_of(5, folder, plan, steps)
        assert refused.value.message == f"--memory-snapshot 5 {sentence}"
        assert refused.value.hint


def test_a_plan_for_cpus_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.plan(2, "--pp", "2", "--batch", "4")
    before = shell.files()
    argv = ("plan.json", "--local", "2", "--memory-snapshot", "3", "--record", "run1")
    assert shell("run", *argv).error == (
        "--memory-snapshot 3 is of the memory of GPUs, and the plan is for 2 ranks on CPUs\n\n"
        "hint: `autopipe explain PLAN` has the bytes of each stage"
    )
    assert shell.files() == before


def test_the_most_that_a_gpu_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is no allocator to ask."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 9)
    assert most_bytes(torch.device("cuda", 0), None) == GpuBytes(7, 9)
    assert most_bytes(torch.device("cpu"), None) is None
