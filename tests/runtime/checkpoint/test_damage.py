"""What is damaged is found, and the last good checkpoint is used; nothing in one is trusted."""

import json
import os
import random
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from autopipe import CheckpointError, Pipe
from tests.support.checkpointed import Run
from tests.support.long import sampled
from tests.support.pipes import piped, planned


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path / "checkpoints")
    made.train()
    return made


TENSORS, MANIFEST, FIRST = "rank-0.safetensors", "rank-0.json", "step-00000001"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a tensor": (lambda newest: flip(newest / TENSORS, -7), "has another checksum"),
    "a bit of a manifest": (lambda newest: flip(newest / MANIFEST, 300), f"{MANIFEST}"),
    "tensors cut short": (lambda newest: cut(newest / TENSORS, 400), "has 400 bytes, expected"),
    "a manifest cut short": (lambda newest: cut(newest / MANIFEST, 300), "is no manifest of a"),
    "an empty manifest": (lambda newest: cut(newest / MANIFEST, 0), "is no manifest of a"),
    "no tensors": (lambda newest: (newest / TENSORS).unlink(), "No such file or directory"),
    # Bug: the run ended, and the one before was not used.
    "no manifest of the first rank": (
        lambda newest: (newest / MANIFEST).unlink(),
        f"has lost {MANIFEST}, or never had it",
    ),
    # Bug: it trained from step 1 on, and could save none of its steps.
    "another step": (
        lambda newest: (shutil.rmtree(newest), shutil.copytree(newest.parent / FIRST, newest)),
        "is of step 3 by its name, and of step 1 by rank-0.json in it",
    ),
    "a pipe, which never ends": (lambda newest: replaced_by_a_pipe(newest / TENSORS), "is no file"),
    "a manifest of 100000 brackets": (
        lambda newest: (newest / MANIFEST).write_text("[" * 100_000),
        "is no manifest of a checkpoint",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(kind: str, run: Run) -> None:
    damage, words = DAMAGE[kind]
    damage(run.folder / "step-00000003")
    loaded = run.load()
    assert loaded is not None and loaded.step == 2
    assert run.is_at(2)
    (said,) = run.said
    assert words in said and said.endswith("; step-00000002 is used instead")
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "step-00000001", "step-00000002", "step-00000003.damaged",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", sampled(range(400), of=20))
def test_any_byte_of_any_file(seed: int, run: Run) -> None:
    """Whatever byte is another one: what is loaded is what was saved, then or the step before."""
    drawn_by = random.Random(seed)
    path = drawn_by.choice([run.folder / "step-00000003" / name for name in (TENSORS, MANIFEST)])
    flip(path, drawn_by.randrange(path.stat().st_size))
    loaded = run.load()
    assert loaded is not None and loaded.step in (2, 3)
    assert run.is_at(loaded.step)


def test_no_good_one_is_left(run: Run) -> None:
    """Nothing begins anew by itself: the error names the newest one's damage."""
    for step in (1, 2, 3):
        cut(run.folder / f"step-0000000{step}" / TENSORS, 100)
    with pytest.raises(CheckpointError) as refused:
        run.load()
    assert "none of 3 checkpoints is whole; the newest: " in refused.value.message
    assert f"step-00000003/{TENSORS} has 100 bytes" in refused.value.message


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    assert Run(tmp_path / "none").load() is None


# What a run that was killed has left behind


def left_behind(run: Run) -> Path:
    """The newest checkpoint as it was a moment before it was renamed."""
    partial = run.folder / "step-00000003.0123abcd.partial"
    return (run.folder / "step-00000003").rename(partial)


def test_all_ranks_had_written_when_the_run_was_killed(run: Run) -> None:
    left_behind(run)
    loaded = run.load()
    assert loaded is not None and loaded.step == 3
    assert run.is_at(3)


@pytest.mark.parametrize("missing", [TENSORS, MANIFEST])
def test_some_rank_had_not_written(missing: str, run: Run) -> None:
    partial = left_behind(run)
    (partial / missing).unlink()
    loaded = run.load()
    assert loaded is not None and loaded.step == 2
    assert not partial.exists()


def test_old_ones_go(run: Run) -> None:
    saving = run.checkpoints(keep=2)
    run.pipe.steps = 4
    run.save(saving)
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_step_that_comes_by_again(run: Run) -> None:
    cut(run.folder / "step-00000003" / TENSORS, 100)
    saving = run.checkpoints()
    run.save(saving)
    assert run.load() is not None and run.is_at(3)


def test_a_folder_of_another_run(run: Run) -> None:
    """A run that begins anew would have its own checkpoints removed as the oldest ones."""
    run.pipe.steps = 1
    saving = run.checkpoints()
    run.said.clear()
    run.save(saving)
    (said,) = run.said
    assert "step-00000003 is of a later step, so of another run: take another folder" in said
    with pytest.raises(CheckpointError, match="is of a later step"):
        saving.close()


def test_two_runs_that_save_to_one_folder_at_the_same_time(run: Run) -> None:
    """Bug: they replaced each other's checkpoints without a word."""
    one, other = run.checkpoints(), run.checkpoints()
    run.said.clear()
    for step in (4, 5):
        run.pipe.steps = step
        run.save(one)
        run.save(other)
    (said,) = run.said
    assert said.startswith(f"{run.folder / 'step-00000005'} is of another run, which saves there")


# The disk


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may have more than 600 bytes; no fixture, as pytest's own log may be longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(tmp_path: Path) -> None:
    run = Run(tmp_path / "checkpoints")
    saving = run.checkpoints()
    with full_disk():
        run.save(saving)
    (said,) = run.said
    assert said.startswith("the checkpoint of step 0 was not written: rank 0: ")
    assert said.endswith("File too large; there is none so far")
    assert list(run.folder.iterdir()) == []
    with pytest.raises(CheckpointError, match="File too large"):
        saving.close()


# Manifests that are made to harm; their checksums are right


def hostile(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["chunks"]["chunks"][0].update(changes)


def many_ranks(body: dict[str, Any]) -> None:
    body["chunks"]["ranks"] = 10**18


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "reads before the file": hostile(offset=-(10**6)),
    "reads after the file": hostile(offset=10**15),
    "memory without end": hostile(own=[10**12], rows=10**12, sums=[0]),
    "no rows a block": hostile(rows=0),
    "negative shapes": hostile(own=[-5, 3]),
    "no dims": hostile(own=[]),
    "a dtype that is code": hostile(dtype="__import__('os').system('true')"),
    "a number for a name": hostile(name=7),
    "pieces outside": hostile(pieces=[{"whole": [0, 0], "own": [90, 0], "shape": [5, 5]}]),
    "pieces of other dims": hostile(pieces=[{"whole": [0], "own": [0], "shape": [5]}]),
    "pieces that grow": hostile(pieces=[{"whole": [0, 0], "own": [0, 0], "shape": [5, 10**15]}]),
    "more ranks than atoms": many_ranks,
    "no training": lambda body: body.pop("training"),
    "training of another kind": lambda body: body.update(training=[1, 2]),
    "another format": lambda body: body["chunks"].update(format=99),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest(kind: str, run: Run) -> None:
    path = run.folder / "step-00000003" / MANIFEST
    body = json.loads(path.read_text())
    HOSTILE[kind](body)
    body.pop("sum")
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"sum": f"{zlib.crc32(canonical.encode()):08x}", **body}))
    loaded = run.load()
    assert loaded is not None and loaded.step == 2
    assert run.is_at(2)


@pytest.mark.parametrize("of", ["values", "optimizer"])
@pytest.mark.parametrize("value", [None, 7, [], {}, {"groups": 3}, {"seed": "x", "shard": 1}])
def test_a_hostile_state(of: str, value: Any, run: Run) -> None:
    path = run.folder / "step-00000003" / MANIFEST
    body = json.loads(path.read_text())
    body["training"][of] = value
    body.pop("sum")
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"sum": f"{zlib.crc32(canonical.encode()):08x}", **body}))
    with pytest.raises(CheckpointError):
        run.pipe.load(run.folder / "step-00000003", run.optimizer)


def test_a_name_that_leads_elsewhere(run: Run, tmp_path: Path) -> None:
    """Nothing outside of the folder is removed: a link is no checkpoint, also where one is put."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / MANIFEST).touch()
    links = ("step-00000000", "step-00000004", "step-00000005", "step-00000001.0123abcd.partial")
    for name in links:
        (run.folder / name).symlink_to(elsewhere)
    run.load()
    run.pipe.steps = 4
    run.save(run.checkpoints(keep=1))
    assert (elsewhere / MANIFEST).exists()
    assert not (run.folder / "step-00000004").is_symlink()


def test_another_model(run: Run) -> None:
    other: Pipe = piped("calls", planned("calls", 1, 1, 2))
    with pytest.raises(CheckpointError, match="is of another model: it has 'bias'"):
        other.load(run.folder)


def test_another_optimizer(run: Run) -> None:
    """It is refused before anything is loaded: a script may catch the error and begin anew."""
    other = torch.optim.SGD(run.pipe.parameters(), lr=0.1)
    own = {name: parameter.data.add_(1).clone() for name, parameter in run.pipe.named_parameters()}
    for parameter in run.pipe.parameters():
        other.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    with pytest.raises(CheckpointError, match="has the state of AdamW, and the optimizer is SGD"):
        run.pipe.load(run.folder, other)
    for name, parameter in run.pipe.named_parameters():
        assert torch.equal(parameter, own[name]), name
        assert "momentum_buffer" in other.state[parameter]


def test_no_schedule(run: Run, tmp_path: Path) -> None:
    """Bug: it was refused once weights and the optimizer's state were the checkpoint's."""
    run.pipe.save(tmp_path / "kept", run.optimizer)
    own = {name: parameter.data.add_(1).clone() for name, parameter in run.pipe.named_parameters()}
    with pytest.raises(CheckpointError, match="has no state of a schedule\nhint: resume with"):
        run.pipe.load(tmp_path / "kept", run.optimizer, StepLR(run.optimizer, 3))
    for name, parameter in run.pipe.named_parameters():
        assert torch.equal(parameter, own[name]), name


def test_a_schedule_that_is_left_out_is_said(run: Run, tmp_path: Path) -> None:
    """Bug: the rates of the schedule that the script makes anew began again, without a word."""
    run.pipe.save(tmp_path / "kept", run.optimizer, StepLR(run.optimizer, 3))
    with pytest.warns(UserWarning, match="has the state of StepLR, which is not loaded: pipe.load"):
        run.pipe.load(tmp_path / "kept", run.optimizer)
    run.pipe.load(tmp_path / "kept")  # the weights alone


def test_another_schedule(run: Run, tmp_path: Path) -> None:
    """Its state would go into the other one, whose rates would be of neither."""
    steps = StepLR(run.optimizer, 3)
    run.pipe.save(tmp_path / "kept", run.optimizer, steps)
    falls = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    with pytest.raises(CheckpointError, match="of StepLR, and the schedule is Exp") as refused:
        run.pipe.load(tmp_path / "kept", run.optimizer, falls)
    assert refused.value.hint is not None and "--weights" in refused.value.hint
