"""A node is lost, and comes back: under an elastic torchrun a run goes on with what is there.

Two agents of torchrun on this host, each with one rank, stand for two nodes; `--replan` plans for
one rank when the other node is gone.
"""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shell import TORCHRUN, free_port, save_killed_net, start

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

STEPS = 14

OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For torchrun: without it, agents that meet a third time may wait for each other's ranks in vain
(torch 2.13)."""

GATES = """


def _passed(number):
    from pathlib import Path
    import time
    from autopipe.runtime.launch import asked

    if number == 4:  # both ranks wait here until one of them is gone
        while not Path("lost").exists():
            time.sleep(0.02)
    if number == 8 and not Path("back").exists():  # until torchrun stops it for another node's sake
        while asked.by() is None:
            time.sleep(0.02)
        Path("back").touch()


def batches(batch_size, _batches=batches):
    for batch in _batches(batch_size):
        _passed(len(drawn))
        yield batch
"""


class Node:
    """An agent of torchrun; `said` is what it and its rank have said so far.

    One of them is where all meet, and cannot be lost.
    """

    def __init__(self, folder: Path, port: int, *, meets: bool) -> None:
        quick = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
        quick += f",is_host={int(meets)}"
        self.agent = start(
            *TORCHRUN, *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run"),
            *("--rdzv-conf", quick, "-m", "autopipe", "run", "plan.json", "--epochs", "3"),
            *("--steps", str(STEPS), "--log-every", "1", "--checkpoints", "kept"),
            *("--save-every", "1", "--resume", "--replan"),
            folder=folder, environ={"OMP_NUM_THREADS": "1", **OWN_STORES},
        )  # fmt: skip
        self.said = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.agent:  # closes what it has been read from, too
            assert self.agent.stderr is not None
            for line in self.agent.stderr:
                self.said += line

    def is_lost(self) -> None:
        """As a host goes: the agent, its rank and what that has started, at once."""
        children = Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text()
        self.agent.kill()
        for child in children.split():
            os.killpg(int(child), signal.SIGKILL)
        self._reader.join(10)

    def end(self) -> int:
        self._reader.join(180)
        code = self.agent.poll()
        assert code is not None, self.said
        return code


def test_a_node_is_lost_and_comes_back(tmp_path: Path) -> None:
    """Each time the run goes on from what it had saved, until all steps are made."""
    folder, port = save_killed_net(tmp_path), free_port()
    (folder / "net.py").write_text((folder / "net.py").read_text() + GATES)
    stays, goes = Node(folder, port, meets=True), Node(folder, port, meets=False)
    nodes = [stays, goes]
    try:
        until(lambda: (folder / "kept/step-00000002").exists(), nodes)
        goes.is_lost()
        (folder / "lost").touch()
        until(lambda: "step 7/" in stays.said, [stays])
        assert "planned anew for 1 device in the place of 2: tp 1 x pp 1 x dp 1" in stays.said
        nodes.append(Node(folder, port, meets=False))
        assert [stays.end(), nodes[2].end()] == [0, 0], stays.said + nodes[2].said
    finally:
        for node in nodes:
            if node.agent.poll() is None:
                node.is_lost()
    said = stays.said + nodes[2].said
    resumed = [int(step) for step in re.findall(r"goes on from kept/step-0*(\d+)", said)]
    assert resumed in ([3, 8], [2, 8]), said
    told = re.findall(rf"^step (\d+)/{STEPS}", goes.said + said, re.MULTILINE)
    assert {*map(int, told)} == {*range(1, STEPS + 1)}, said


def until(condition: Callable[[], bool], nodes: list[Node], seconds: float = 120) -> None:
    """Wait for something that comes while these nodes run."""
    deadline = time.monotonic() + seconds
    while not condition():
        lost = [node.said for node in nodes if node.agent.poll() is not None]
        assert not lost and time.monotonic() < deadline, [node.said for node in nodes]
        time.sleep(0.05)
