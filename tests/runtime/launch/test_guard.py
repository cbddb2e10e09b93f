"""What sidecars do, shown on ranks without torch: who is blamed, who says so, and that all end."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.guards import running

RANK = Path(__file__).parents[2] / "support/guarded.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a sidecar needs Linux")

WAITS = "time.sleep(60)"
GOES = "pass"
IS_KILLED = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
FAILS = "raise OSError('disk gone')"


@dataclass
class Ended:
    """What became of some ranks: their codes, and what they and their sidecars have said."""

    codes: list[int]
    err: str

    @property
    def errors(self) -> list[str]:
        """The lines that name a cause; a traceback's last line is a rank's own affair."""
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


def start(folder: Path, codes: list[str], per_node: int = 8, host: str = "127.0.0.1",
          namespaces: tuple[str, ...] = ("",), turned: bool = False) -> Ended:  # fmt: skip
    """Run a rank for each code, and see that nothing is left of them.

    Args:
        turned: whether a node's ranks are in the opposite order of the launcher's.
    """
    token = uuid.uuid4().hex
    folder = folder / token
    folder.mkdir()
    ranks, environ = [], {**os.environ, "TOKEN": token}
    for rank, code in enumerate(codes):
        node, local = divmod(rank, per_node)
        local = min(per_node, len(codes)) - 1 - local if turned else local
        space = namespaces[node % len(namespaces)]
        command = ["ip", "netns", "exec", space] if space else []
        command += [sys.executable, "-S", str(RANK), str(folder)]
        command += [*map(str, (rank, len(codes), node, local)), host, code]
        # A file each: tracebacks are written in pieces, which would mix.
        with (folder / f"{rank}.err").open("w") as err:
            ranks.append(subprocess.Popen(command, env=environ, stderr=err, start_new_session=True))
    try:
        ended = [process.wait(timeout=40) for process in ranks]
        deadline = time.monotonic() + 20
        while left := running(token):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
    return Ended(ended, "".join((folder / f"{rank}.err").read_text() for rank in range(len(codes))))


AT = "at step 7, forward of micro-batch 5"

SILENT = "Timed out waiting 300000ms for recv operation to complete"
LOSES_BOTH = f"time.sleep(3); dog._sidecar.kill(); {IS_KILLED}"

WAITING = {
    "nobody knows the cause": ([WAITS, WAITS, f"raise RuntimeError('{SILENT}')"], 2),
    "a sidecar, too": ([WAITS, WAITS, LOSES_BOTH], 8),
    "rank 0's sidecar, too": ([LOSES_BOTH, WAITS, WAITS], 8),
    "stopped": ([WAITS, "import signal; os.kill(os.getpid(), signal.SIGSTOP)"], 8),
    "gone too early": ([GOES, WAITS], 8),
}
"""Ranks of runs that end after seconds of silence, and how many of them are on a node."""


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """What became of a run of `WAITING`; they wait side by side."""
    folder = tmp_path_factory.mktemp("waiting")
    with ThreadPoolExecutor(len(WAITING)) as pool:
        runs = {name: pool.submit(start, folder, *case) for name, case in WAITING.items()}
        yield lambda name: runs[name].result()


def test_all_is_well(tmp_path: Path) -> None:
    """Rank 0 is the last to leave; nobody says a word."""
    slow = "time.sleep(0.5); open(f'{folder}/../done', 'w').close()"
    assert start(tmp_path, [GOES, GOES, slow]) == Ended([0, 0, 0], "")
    assert (tmp_path / "done").exists()


@pytest.mark.long  # the next one has it on two nodes
def test_nobody_but_the_dead_is_blamed(tmp_path: Path) -> None:
    ended = start(tmp_path, [WAITS, WAITS, IS_KILLED, WAITS])
    assert ended.errors == [f"error: rank 2 (stage 2) died {AT}: killed (its process is gone)"]
    assert ended.codes == [-15, -15, -9, -15]


def test_each_node_is_told_once(tmp_path: Path) -> None:
    ended = start(tmp_path, [WAITS, WAITS, WAITS, IS_KILLED], per_node=2)
    expected = f"error: rank 3 (stage 3) died {AT}: killed (its process is gone)"
    assert ended.errors == [expected] * 2
    assert ended.codes == [-15, -15, -15, -9]


def test_rank_0_may_be_the_dead_one(tmp_path: Path) -> None:
    ended = start(tmp_path, [IS_KILLED, WAITS, WAITS])
    assert ended.errors == [f"error: rank 0 (stage 0) died {AT}: killed (its process is gone)"]
    assert ended.codes == [-9, -15, -15]


def test_how_a_process_has_ended(tmp_path: Path) -> None:
    """Its parent, this test, waits for rank 0 first: what becomes of the others can still be read.

    An exit past every handler is no goodbye, whatever its code.
    """
    ended = start(tmp_path, [WAITS, "os._exit(3)"])
    assert ended.errors == [f"error: rank 1 (stage 1) died {AT}: exited with code 3 "
                            "(its process is gone)"]  # fmt: skip
    assert ended.codes == [-15, 3]
    ended = start(tmp_path, [WAITS, "import signal; os.kill(os.getpid(), signal.SIGSEGV)"])
    assert "killed by SIGSEGV (its process is gone)" in ended.err
    assert ended.codes == [-15, -11]


def test_who_raises_says_so_by_itself(tmp_path: Path) -> None:
    """The node of the rank has its traceback; the other node is told."""
    ended = start(tmp_path, [WAITS, FAILS, WAITS, WAITS], per_node=2)
    assert ended.errors == [f"error: rank 1 (stage 1) failed {AT}: OSError: disk gone"]
    where = f"rank 1 (stage 1) failed {AT}"
    assert ended.err.count("\nOSError: disk gone\n") == 1
    assert f"\nOSError: disk gone\n{where}\n" in ended.err
    assert ended.codes == [-15, 1, -15, -15]


@pytest.mark.long  # `test_hub` has it in one process
def test_the_consequence_of_a_death_is_not_its_cause(tmp_path: Path) -> None:
    """A neighbour notices within milliseconds; the rank that has died does so a second later.

    The neighbour is told whose fault it was, in time for its own traceback.
    """
    echo = "raise RuntimeError('[pair.cc:547] Connection closed by peer [127.0.0.1]:3')"
    ended = start(tmp_path, [WAITS, echo, f"time.sleep(1); {IS_KILLED}"])
    sentence = f"rank 2 (stage 2) died {AT}: killed (its process is gone)"
    assert ended.errors == [f"error: {sentence}"]
    assert f"Connection closed by peer [127.0.0.1]:3\n{sentence}\n" in ended.err
    assert ended.codes == [-15, 1, -9]


def test_a_consequence_without_a_cause(after: Callable[[str], Ended]) -> None:
    """Nobody knows better, so it is said where the run has ended."""
    ended = after("nobody knows the cause")
    assert ended.errors == [f"error: rank 2 (stage 2) failed {AT}: RuntimeError: {SILENT}"]
    assert ended.codes == [-15, -15, 1]


@pytest.mark.long  # `test_hub` has it in one process
def test_what_all_find_rank_0_says(tmp_path: Path) -> None:
    ended = start(tmp_path, [FAILS] * 4)
    assert ended.errors == [] and ended.codes == [1] * 4
    verdict = f"rank 0 (stage 0) failed {AT}: OSError: disk gone"
    assert ended.err.count(f"\nOSError: disk gone\n{verdict}\n") == 3  # a note on all but rank 0


def test_a_sidecar_that_is_killed_with_its_rank(after: Callable[[str], Ended]) -> None:
    """What is left is the connection, which closes without a goodbye."""
    ended = after("a sidecar, too")
    assert ended.errors == [
        f"error: rank 2 (stage 2) was lost, last seen {AT}: it is gone, and its watchdog with it"
    ]
    assert ended.codes == [-15, -15, -9]
    ended = after("rank 0's sidecar, too")
    (error,) = ended.errors
    assert error.startswith("error: rank 0") and error.endswith(": its watchdog is gone")
    assert ended.codes == [-9, -15, -15]


def test_a_plan_whose_rank_0_is_not_the_first_of_its_node(tmp_path: Path) -> None:
    """Bug: the node's second guard was to speak, which was the lost one: nobody did."""
    ended = start(tmp_path, [LOSES_BOTH, WAITS], turned=True)
    (error,) = ended.errors
    assert error.startswith("error: rank 0") and error.endswith(": its watchdog is gone")


def test_a_rank_that_does_not_listen(tmp_path: Path) -> None:
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
    assert start(tmp_path, [WAITS, deaf, IS_KILLED]).codes == [-15, -9, -9]


def test_a_launcher_that_ends_the_run(tmp_path: Path) -> None:
    """SIGTERM to the group of every rank is nobody's death: all end without a word."""
    told = "import signal; time.sleep(0.2); os.killpg(0, signal.SIGTERM); time.sleep(60)"
    assert start(tmp_path, [told] * 3) == Ended([-15] * 3, "")


def test_a_signal_to_save_is_for_ranks_alone(tmp_path: Path) -> None:
    """Slurm sends USR1 to all processes of a rank's group. The sidecar watches on, while the rank
    ends its step and saves, which may take minutes."""
    saves = "import signal; signal.signal(signal.SIGUSR1, lambda *_: None); "
    saves += "os.killpg(0, signal.SIGUSR1); time.sleep(3)"
    assert start(tmp_path, ["time.sleep(3)", saves, "time.sleep(3)"]) == Ended([0] * 3, "")


def test_a_rank_that_is_stopped(after: Callable[[str], Ended]) -> None:
    ended = after("stopped")
    assert ended.errors == [f"error: rank 1 (stage 1) froze {AT}: stopped for 5 s (SIGSTOP)"]
    assert ended.codes == [-15, -9]


def test_a_rank_that_leaves_too_early(after: Callable[[str], Ended]) -> None:
    """Its script has fewer batches, or says sys.exit: nobody is dead, and nobody gets on.

    Rank 0, the last to leave, would wait for rank 1, and rank 1 for rank 0.
    """
    ended = after("gone too early")
    assert ended.errors == [
        "error: rank 0 (stage 0) left the run after step 7: it has ended, "
        f"but rank 1 (stage 1) is {AT}"
    ]
    assert ended.codes == [-15, -15]


def test_no_rank_0_to_be_found(tmp_path: Path) -> None:
    """The port of rank 0's sidecar is behind a firewall: the run goes on without a watchdog."""
    address = {"host": "127.0.0.1", "port": 1, "token": "", "hub_node": 0, "hub_local_rank": 0}
    (tmp_path / "autopipe.watchdog").write_text(json.dumps(address))
    (tmp_path / "0.pid").touch()  # as if rank 0 had come
    rank_1_of_2 = ("1", "2", "0", "1", "127.0.0.1")
    found = subprocess.run(
        [sys.executable, "-S", str(RANK), str(tmp_path), *rank_1_of_2, GOES],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert found.returncode == 0
    assert found.stderr.startswith(
        "warning: rank 1 runs without a watchdog: rank 0's does not answer at 127.0.0.1 port 1: "
    )


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace that a cable joins to this one: 10.77.31.1 here, 10.77.31.2 there."""
    name, here, there = "autopipe", "autopipe0", "autopipe1"
    commands = (
        f"netns add {name}",
        f"link add {here} type veth peer name {there} netns {name}",
        f"addr add 10.77.31.1/24 dev {here}",
        f"link set {here} up",
        f"-n {name} addr add 10.77.31.2/24 dev {there}",
        f"-n {name} link set {there} up",
    )
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"ip {command}: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", here], capture_output=True)


@pytest.mark.long
def test_a_cable_that_is_pulled(tmp_path: Path, namespace: str) -> None:
    """No connection is closed and no packet comes: each side ends by itself, and says why."""
    pull = f"os.system('ip -n {namespace} link set autopipe1 down'); {WAITS}"
    ended = start(tmp_path, [f"time.sleep(3); {pull}", WAITS, WAITS, WAITS], per_node=2,
                  host="10.77.31.1", namespaces=("", namespace))  # fmt: skip
    heard_last = r"error: rank (.) \(stage \1\) was lost, last seen at step 7, .*: rank \1's node "
    heard_last += r"cannot be reached \(nothing heard for 10 s\)"
    here, there = (re.fullmatch(heard_last, error) for error in ended.errors)
    # The other node's two sidecars give their signs of life half a second apart at most.
    assert here and there and here[1] in ("2", "3") and there[1] == "0"
    assert ended.codes == [-15] * 4
