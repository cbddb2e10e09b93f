"""Exported for torchrun, run on two nodes 5 ms apart: it trains, and outlives a killed worker."""

import re
from pathlib import Path

import pytest

from autopipe.export.targets import export
from autopipe.export.words import Words
from autopipe.planfile.contents import Plan
from tests.support import namespaces
from tests.support.shell import end, save_nodes

REASON = namespaces.why_not()

pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

LATENCY = 0.005


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`net.py`, a plan for two nodes of two processes, pp=2 x tp=2, and its script."""
    found = save_nodes(tmp_path, nodes=2, processes=2, pp=2, tp=2)
    words = Words(hosts=namespaces.ADDRESSES, interface=namespaces.INTERFACE, run=("--steps", "3"))
    plan = Plan.load(found / "plan.json")
    (found / "train.sh").write_text(export(plan, "torchrun", "plan.json", words))
    return found


def test_it_trains(folder: Path) -> None:
    with namespaces.two_nodes(LATENCY) as run:
        begun = [run(node, "bash", "train.sh", str(node), folder=folder) for node in (0, 1)]
        said = [end(process) for process in begun]
    assert [each.code for each in said] == [0, 0], said[0].err + said[1].err
    assert re.search(r"loss \d+\.\d+ -> \d+\.\d+", said[0].out)


KILLED = """

def batches(batch_size):
    import os, pathlib, signal
    for step in range(3):
        mark = pathlib.Path("killed")
        if step == 1 and os.environ["RANK"] == "3" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1 and os.environ["RANK"] == "0" and mark.exists():
            pathlib.Path("again").touch()
        yield inputs(batch_size)
"""


def test_a_killed_worker_starts_again_on_both_nodes(folder: Path) -> None:
    """From the kill to the second step of the next attempt it takes less than 20 s."""
    net = folder / "net.py"
    net.write_text(net.read_text() + KILLED)
    with namespaces.two_nodes(LATENCY) as run:
        begun = [run(node, "bash", "train.sh", str(node), folder=folder) for node in (0, 1)]
        said = [end(process) for process in begun]
    assert [each.code for each in said] == [0, 0], said[0].err + said[1].err
    took = (folder / "again").stat().st_mtime - (folder / "killed").stat().st_mtime
    assert 0 < took < 20
