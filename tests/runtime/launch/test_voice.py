"""Which rank prints an error: exactly one, whichever ranks have met it."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe import ModelError
from autopipe.errors import LaunchError
from autopipe.runtime.launch import voice, watchdog
from autopipe.runtime.launch.watchdog import Verdict
from autopipe.runtime.launch.world import World
from tests.support.shell import (
    NET,
    Said,
    Shell,
    free_port,
    ranks,
    save_plans,
    srun_environment,
    torchrun_environment,
)


def world(rank: int, port: int = 1) -> World:
    return World(rank, 4, rank, 4, 0, "127.0.0.1", port)


ERRORS = ((ModelError("no rows"), 2), (ZeroDivisionError("by zero"), 1))


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> list[Verdict | None]:
    """What the watchdog says of whatever error; at first there is none. Nobody waits long."""
    found: list[Verdict | None] = [None]
    monkeypatch.setattr(watchdog, "verdict", lambda error: found[0])
    monkeypatch.setattr(voice, "TURN", 0.05)
    monkeypatch.setattr(voice, "LATEST", 0.1)
    return found


def told(where: World | None, error: Exception) -> int | None:
    """The code that a rank ends with without a word; None: it is to tell the error."""
    try:
        with voice.one_voice(where):
            raise error
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception as raised:
        assert raised is error
        return None


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_alone(error: Exception, code: int, verdict: list[Verdict | None]) -> None:
    assert told(None, error) is None
    assert voice.code(error) == code


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_before_there_is_a_watchdog(
    error: Exception, code: int, verdict: list[Verdict | None]
) -> None:
    """Rank 0 tells it at once. It does not listen then, and the others are silent."""
    assert [told(world(rank, free_port()), error) for rank in range(3)] == [None, code, code]


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_rank_0_has_found_nothing_wrong(
    error: Exception, code: int, verdict: list[Verdict | None]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        assert told(world(3, rank_0.getsockname()[1]), error) is None


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_a_verdict(error: Exception, code: int, verdict: list[Verdict | None]) -> None:
    verdict[0] = Verdict(2, "rank 2 (stage 1) failed at step 7")
    assert [told(world(rank), error) for rank in range(4)] == [code, code, None, code]


@pytest.mark.parametrize("name", ["RANK", "SLURM_PROCID"])
def test_the_rank_that_speaks_says_which_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(other, raising=False)
    assert voice.who() == ""
    monkeypatch.setenv(name, "0")
    assert voice.who() == ""
    monkeypatch.setenv(name, "3")
    assert voice.who() == "rank 3: "


# --- through the command line


def wrong_number(found: int) -> str:
    return f"the plan is for 4 processes, found {found} (this is rank 0, on node 0)"


@pytest.mark.parametrize(
    "launcher", [torchrun_environment, pytest.param(srun_environment, marks=pytest.mark.long)]
)
def test_two_of_a_launcher_for_a_plan_of_four(
    launcher: Callable[[int, int, int], dict[str, str]],
    autopipe: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 tells; rank 1 ends with the same code and without a word, as rank 0 is gone."""
    autopipe.plan(4, "--pp", "2", "--dp", "2")
    port = free_port()
    for rank in (0, 1):
        for name, value in launcher(rank, 2, port).items():
            monkeypatch.setenv(name, value)
        said = autopipe("run", "plan.json")
        if rank == 0:
            assert said.error.startswith(wrong_number(2))
        else:
            assert said == Said(2, "", "")


def test_what_a_rank_finds_alone_it_tells(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 listens: it has found nothing wrong. The model file may be missing on one node."""
    autopipe.plan(4, "--pp", "2", "--dp", "2")
    Path("net.py").unlink()
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        for name, value in torchrun_environment(3, 4, rank_0.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        error = autopipe("run", "plan.json").error
    assert error.startswith("rank 3: plan.source: there is no model file 'net.py'")


# --- in real processes


RUN = ("-m", "autopipe", "run")


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plans(tmp_path_factory.mktemp("run"))


def test_what_every_rank_finds_is_told_once(planned: Path) -> None:
    """The model is another one than the plan's; the lower of those that find it out within half a
    second says so."""
    (planned / "other.py").write_text(NET.replace("y.relu()", "y.tanh()"))
    said = ranks(2, *RUN, "pp2.json", "--model", "other.py", folder=planned)
    assert (said.code, said.out) == (2, "")
    assert "Traceback" not in said.err
    (error,) = re.findall(r"^error: .*", said.err, re.MULTILINE)
    assert re.match(r"error: (rank \d: )?plan.fingerprint: the plan was made for another", error)
    assert said.err.count("\nhint: plan again with `autopipe plan`\n") == 1


FAILING = """
def batches(batch_size):
    yield inputs(batch_size)
    if RANK == '1': raise OSError('disk gone')
    yield inputs(batch_size)


class Failing(torch.optim.SGD):
    def step(self):
        if RANK == '1': raise ERROR


import os
RANK, ERROR = os.environ['RANK'], ZeroDivisionError('no rate')
"""


@pytest.mark.long  # the next one has another moment of it
def test_what_one_rank_finds_is_told_by_it(planned: Path) -> None:
    """It once ended without a word: only rank 0 spoke, and that one had found nothing."""
    (planned / "failing.py").write_text(NET + FAILING)
    said = ranks(2, *RUN, "pp2.json", "--model", "failing.py", folder=planned)
    assert (said.code, said.out) == (2, "")
    (error,) = re.findall(r"^error: .*", said.err, re.MULTILINE)
    assert error.startswith(f"error: rank 1: {planned / 'failing.py'}:")
    assert error.endswith("failing.py: batches() raised OSError: disk gone")


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        pytest.param(
            *("ZeroDivisionError('no rate')", 2, r"worse.py:\d+ .*: optimizer.step\(\) ended in "),
            marks=pytest.mark.long,
        ),
        ("torch.OutOfMemoryError('no memory')", 1, r"error: rank 1 .*failed .*step 0: "),
    ],
)
def test_what_an_optimizer_raises_on_one_rank(
    planned: Path, error: str, code: int, told: str
) -> None:
    """A mistake in the user's code, by its line; or what nobody foresaw, by its step. That rank's
    code is the run's."""
    more = "\ndef optimizer(parameters): return Failing(parameters, lr=0.1)\n"
    (planned / "worse.py").write_text(f"{NET}{FAILING}ERROR = {error}\n{more}")
    said = ranks(2, *RUN, "pp2.json", "--model", "worse.py", folder=planned)
    assert (said.code, said.out) == (code, "")
    (found,) = re.findall(r"^error: .*", said.err, re.MULTILINE)
    assert found.startswith("error: rank 1")
    assert re.search(told, found)
    assert found.endswith(error.removeprefix("torch.").replace("('", ": ").replace("')", ""))


def test_a_node_that_cannot_find_rank_0(verdict: list[Verdict | None]) -> None:
    """Nobody else can say so: one of its ranks does, at once."""
    error = LaunchError("the host name 'gone.invalid' has no address")
    ranks = [World(rank, 4, local, 2, 1, "gone.invalid", 1) for local, rank in enumerate((2, 3))]
    assert [told(rank, error) for rank in ranks] == [None, 2]
