"""A disk that is full: what is whole stays whole, a sentence tells of it, and the run goes on."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe import CheckpointError
from autopipe.runtime.checkpoint import folder as folders
from tests.support import small_disk
from tests.support.checkpointed import Run
from tests.support.shell import Said, ranks, save_killed_net
from tests.support.small_disk import KIB, PAGE, fill

REASON = small_disk.why_not()

pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

FULL = "No space left on device"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk.small_disk(tmp_path / "disk", 8 * KIB * KIB) as found:
        yield found


def test_whatever_room_there_is_left(disk: Path) -> None:
    """Page by page until a checkpoint has room: there is none of it, or all of it."""
    run = Run(disk / "kept")
    run.train(2)
    first, second = [run.folder / folders.step_name(step) for step in (1, 2)]
    shutil.rmtree(second)
    saving, tries = run.checkpoints(), 0
    while not second.exists():
        fill(disk, leaving=tries * PAGE)
        run.said.clear()
        run.save(saving)
        tries += 1
        if second.exists():
            break
        (said,) = run.said
        assert said.startswith(f"the checkpoint of step 2 was not written: rank 0: {disk}/"), said
        assert said.endswith(f"{FULL}; step-00000001 is the newest"), said
        assert [*run.folder.iterdir()] == [first]
        with pytest.raises(CheckpointError, match=FULL):
            saving.close()
    assert tries > 4  # a plan, a manifest and tensors, each a page at least, and none of them
    run.said.clear()
    saving.close()
    loaded = run.load()
    assert loaded is not None and loaded.step == 2 and run.is_at(2) and run.said == []


def test_the_last_good_one_is_read_from_a_full_disk(disk: Path) -> None:
    """Whatever a killed run has left half-written there is removed, and so makes room."""
    run = Run(disk / "kept")
    run.train(2)
    half = run.folder / "step-00000003.0123abcd.partial"
    half.mkdir()
    (half / "rank-0.safetensors").write_bytes(b"\0" * PAGE)
    fill(disk)
    loaded = run.load()
    assert loaded is not None and loaded.step == 2 and run.is_at(2)
    assert not half.exists()


# As a user has it: two ranks, whose checkpoints of 3.2 MB fit twice

STEPS = 5


def trained(folder: Path, *more: str) -> Said:
    return ranks(
        2, *("-m", "autopipe", "run", "plan.json", "--steps", str(STEPS), "--log-every", "1"),
        *("--checkpoints", "disk/kept", "--save-every", "1"), *more, folder=folder,
    )  # fmt: skip


def losses(said: Said) -> dict[int, str]:
    found = re.findall(rf"^step (\d+)/{STEPS}  loss (\S+)", said.err, flags=re.MULTILINE)
    return {int(step): loss for step, loss in found}


@pytest.mark.long
def test_a_run_says_so_and_goes_on(disk: Path) -> None:
    """With more room it goes on from what was kept, with the losses that it had."""
    folder = save_killed_net(disk.parent)
    full = trained(folder)
    sentences = re.findall(r"^the checkpoint of step (\d).*$", full.err, flags=re.MULTILINE)
    assert sentences == ["3", "4", "5"], full.err
    assert len(losses(full)) == STEPS
    said = re.search(r"^the checkpoint of step 3 .*$", full.err, flags=re.MULTILINE)
    assert said is not None and said[0].endswith(f"{FULL}; step-00000002 is the newest")
    assert f"error: the checkpoint of step {STEPS} was not written: rank " in full.err
    assert full.code == 2 and "Traceback" not in full.err
    assert sorted(path.name for path in (disk / "kept").iterdir()) == [
        "step-00000001", "step-00000002",
    ]  # fmt: skip

    subprocess.run(["mount", "-o", f"remount,size={32 * KIB * KIB}", disk], check=True)
    again = trained(folder, "--resume")
    assert again.code == 0, again.err
    assert "goes on from disk/kept/step-00000002, after step 2" in again.err
    assert losses(again) == {step: losses(full)[step] for step in (3, 4, 5)}


@pytest.mark.long
def test_a_model_that_has_no_room(disk: Path) -> None:
    """`--save` and `checkpoint convert`: an error, and nothing that looks like a model."""
    folder = save_killed_net(disk.parent)
    kept = trained(folder, "--steps", "1", "--save", "disk/model.safetensors")
    assert kept.code == 0 and (disk / "model.safetensors").exists(), kept.err
    (disk / "model.safetensors").unlink()
    fill(disk, leaving=256 * KIB)
    convert = ("convert", "disk/kept", "-o", "disk/model.safetensors")
    for said in (
        ranks(1, "-m", "autopipe", "checkpoint", *convert, folder=folder),
        ranks(
            2, *("-m", "autopipe", "run", "plan.json", "--steps", "1"),
            *("--save", "disk/model.safetensors"), folder=folder,
        ),  # fmt: skip
    ):  # fmt: skip
        assert said.code == 2 and "Traceback" not in said.err, said.err
        assert f"disk/model.safetensors cannot be written: {FULL}" in said.err
    assert sorted(path.name for path in disk.iterdir()) == ["ballast", "kept"]
