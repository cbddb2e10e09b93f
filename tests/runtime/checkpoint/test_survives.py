"""A run that is killed, or asked to stop, and goes on: its losses are those of an undisturbed one.

`killed_net` kills a rank of itself at a moment that it is told, also while a checkpoint is being
written: there is one after every step.
"""

import json
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from autopipe.runtime.telemetry.progress import figure
from tests.support.shell import TORCHRUN, Said, end, ranks, save_killed_net, start

STEPS = 16
RUN = (
    *("-m", "autopipe", "run", "plan.json", "--steps", str(STEPS), "--epochs", "3"),
    *("--log-every", "1", "--checkpoints", "kept", "--save-every", "1", "--resume"),
    *("--metrics", "metrics.jsonl"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file and a plan for two stages."""
    return save_killed_net(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def undisturbed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(home, folder, dirs_exist_ok=True)
    found = losses(ranks(2, *RUN, folder=folder))
    assert list(found) == list(range(1, STEPS + 1))
    return found


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    shutil.copytree(home, tmp_path, dirs_exist_ok=True)
    return tmp_path


def losses(said: Said) -> dict[int, str]:
    """The loss of each step, as it was said."""
    found = re.findall(rf"^step (\d+)/{STEPS}  loss (\S+)", said.err, flags=re.MULTILINE)
    return {int(step): loss for step, loss in found}


def metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of the file that one rank has written."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(50))
def test_killed_at_a_random_moment(
    seed: int, folder: Path, undisturbed: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moment = random.Random(seed)
    monkeypatch.setenv(
        "KILL", f"{moment.randrange(2)} {moment.randrange(1, STEPS)} {moment.random() / 20:.3f}"
    )
    killed = ranks(2, *RUN, folder=folder)
    monkeypatch.delenv("KILL")
    again = ranks(2, *RUN, folder=folder)
    assert again.code == 0, again.err
    before, after = losses(killed), losses(again)
    assert {**before, **after} == undisturbed
    for said in (before, after):
        assert all(undisturbed[step] == loss for step, loss in said.items())
    # The checkpoint of the last step, and perhaps of the one before, was not yet on the disk.
    assert len(before) - 2 <= min(after, default=STEPS + 1) - 1 <= len(before) + 1
    assert [path for path in (folder / "kept").iterdir() if path.suffix == ".partial"] == []


@pytest.mark.long
def test_a_signal_to_one_rank_stops_all(
    folder: Path, undisturbed: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks go on as if nothing had been; one that is left makes itself a plan."""
    monkeypatch.setenv("ASK", "1 5 0")
    asked = ranks(2, *RUN, folder=folder)
    monkeypatch.delenv("ASK")
    assert asked.code == 0, asked.err
    assert asked.err.splitlines()[-1] == (
        "another rank's signal: saved and stopped after step 5; "
        "the same command with --resume goes on"
    )
    shutil.copytree(folder / "kept", folder / "stopped")
    again = ranks(2, *RUN, folder=folder)
    assert losses(asked) | losses(again) == undisturbed
    assert min(losses(again)) == 6
    shutil.rmtree(folder / "kept")
    shutil.copytree(folder / "stopped", folder / "kept")
    one = ranks(1, *RUN, "--replan", folder=folder)
    assert one.code == 0, one.err
    assert "planned anew for 1 device in the place of 2: tp 1 x pp 1 x dp 1" in one.err
    assert "goes on from kept/step-00000005, after step 5" in one.err
    assert list(losses(one)) == list(range(6, STEPS + 1))


def interrupted(*command: str, folder: Path) -> Said:
    """A run without an end that a Ctrl-C, as at a terminal, ends in its third step."""
    endless = ("--epochs", "1000", "--steps", "5000", "--local", "2")
    run = start(sys.executable, *command, *endless, folder=folder)
    assert run.stderr is not None
    for line in run.stderr:
        if line.startswith("step 3/"):
            break
    run.send_signal(signal.SIGINT)
    said = end(run)
    assert said.code == 130, said.err
    return said


def test_ctrl_c_stops_all(folder: Path) -> None:
    """It says what stopped it, keeps the last step, and ends with 130."""
    said = interrupted(*RUN, folder=folder)
    found = re.search(r"^SIGINT \(Ctrl-C\): saved and stopped after step (\d+);", said.err, re.M)
    assert found is not None, said.err
    kept = sorted(path.name for path in (folder / "kept").iterdir())
    assert kept[-1] == f"step-{int(found[1]):08}" and "Traceback" not in said.err


@pytest.mark.long
def test_ctrl_c_without_checkpoints_says_what_is_lost(folder: Path) -> None:
    """Bug: it ended without a word."""
    said = interrupted("-m", "autopipe", "run", "plan.json", "--log-every", "1", folder=folder)
    *_, told, _, hint = said.err.splitlines()
    assert told == "Ctrl-C: ended at once, and what was trained is not kept"
    assert hint.startswith("hint: with --checkpoints FOLDER a Ctrl-C saves first")


@pytest.mark.long
def test_torchrun_restarts(folder: Path, undisturbed: dict[int, str]) -> None:
    """Its workers of the second attempt are given the store of the first one."""
    command = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *RUN)
    said = end(start(*command, folder=folder, environ={"KILL": "1 5 0.01", "OMP_NUM_THREADS": "1"}))
    assert said.code == 0, said.err
    assert "error: rank 1 (stage 1) died" in said.err
    assert losses(said) == undisturbed
    assert {line["step"]: figure(line["loss"]) for line in metrics(folder)} == undisturbed
    assert [line["step"] for line in metrics(folder)] == [*range(1, STEPS + 1)]
    assert all(0 < line["bubble"] < 1 < line["peak_bytes"] for line in metrics(folder))
