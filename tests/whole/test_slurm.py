"""Exported for Slurm and submitted to a real one: four nodes, their daemons on this host.

A job that is to save and resume has steps of a quarter of a second, and more of them than its limit
leaves time for.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopipe.export.targets import export
from autopipe.export.words import Words
from autopipe.planfile.contents import Plan
from tests.support import slurm
from tests.support.shell import save_nodes
from tests.support.slurm import Slurm

REASON = slurm.why_not()

pytestmark = [pytest.mark.long, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm") / "here", timeout=10) as found:
        yield found


def made(folder: Path, words: Words, *, nodes: int = 2, processes: int = 2, **mesh: int) -> Path:
    """A folder with `net.py`, a plan for so many processes on each node, and `train.sbatch`."""
    save_nodes(folder, nodes, processes, **(mesh or {"pp": 2, "tp": 2, "dp": 1}))
    plan = Plan.load(folder / "plan.json")
    (folder / "train.sbatch").write_text(export(plan, "slurm", "plan.json", words))
    return folder


def said(folder: Path, job: str) -> str:
    """What the ranks of a job have said."""
    logs = sorted(folder.glob(f"logs/autopipe-{job}/*.log")) + sorted(folder.glob("*.out"))
    return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)


LAST = re.compile(r"loss (\d+\.\d+) -> (\d+\.\d+)")


MESHES = {
    "tp in a node, pp over nodes": (2, 2, {"pp": 2, "tp": 2, "dp": 1}),
    "dp in a node, pp over nodes": (2, 2, {"pp": 2, "tp": 1, "dp": 2}),
    "tp in a node, dp over nodes": (2, 2, {"pp": 1, "tp": 2, "dp": 2}),
    "all three axes, 2 nodes x 4": (2, 4, {"pp": 2, "tp": 2, "dp": 2}),
    "all three axes, 4 nodes x 2": (4, 2, {"pp": 2, "tp": 2, "dp": 2}),
}


@pytest.mark.parametrize("name", MESHES)
def test_both_styles_train_alike(name: str, cluster: Slurm, tmp_path: Path) -> None:
    """A task a rank, or a torchrun on each node: the same losses."""
    nodes, processes, mesh = MESHES[name]
    losses = []
    for style in ("srun", "torchrun"):
        words = Words(style=style, run=("--steps", "3"), time_limit=600)
        (tmp_path / style).mkdir()
        folder = made(tmp_path / style, words, nodes=nodes, processes=processes, **mesh)
        job = cluster.submit("train.sbatch", folder)
        cluster.until(job, "COMPLETED", "FAILED", seconds=240)
        found = LAST.search(said(folder, job))
        assert found is not None, said(folder, job)
        losses.append(found[0])
    assert losses[0] == losses[1]


def test_an_array_and_a_job_after_it(cluster: Slurm, tmp_path: Path) -> None:
    """A run for each seed, and one more when all have ended well."""
    folder = made(tmp_path, Words(array="0-1", run=("--steps", "2"), time_limit=600))
    array = cluster.submit("train.sbatch", folder)
    after = folder / "after.sbatch"
    after.write_text("#!/bin/bash\n#SBATCH --output=after.out\nls logs | wc -l\n")
    last = cluster.submit("after.sbatch", folder, f"--dependency=afterok:{array}")
    assert cluster.job(last)["Reason"] == "Dependency"
    cluster.until(last, "COMPLETED", seconds=240)
    outs = [*folder.glob("logs/*/rank-0.log")]
    losses = {found[0] for out in outs if (found := LAST.search(out.read_text()))}
    assert len(outs) == len(losses) == 2, said(folder, array)


def test_a_name_that_does_not_resolve_is_an_error(cluster: Slurm, tmp_path: Path) -> None:
    """Within seconds, on the node that met it; no rank goes on by itself."""
    folder = made(tmp_path, Words(run=("--steps", "2"), time_limit=600))
    text = (folder / "train.sbatch").read_text()
    (folder / "train.sbatch").write_text(text.replace("export MASTER_ADDR\n", NOWHERE))
    begun = time.monotonic()
    job = cluster.submit("train.sbatch", folder)
    cluster.until(job, "FAILED")
    assert time.monotonic() - begun < 60
    assert "the host name 'gone.invalid' has no address" in said(folder, job)


NOWHERE = "export MASTER_ADDR=gone.invalid\n"


# --- saved and resumed


def checkpoints() -> bool:
    """Whether `autopipe run` keeps checkpoints."""
    run = [sys.executable, "-m", "autopipe", "run", "--help"]
    return "--checkpoints" in subprocess.run(run, capture_output=True, text=True).stdout


saved = pytest.mark.skipif(not checkpoints(), reason="autopipe run keeps no checkpoints yet")

STEPS = 500

SLOW = """

def batches(batch_size):
    while True:
        yield inputs(batch_size)

def scheduler(optimizer):
    import time
    # Not in `batches`: a run that resumes goes through those that it has had.
    slowly = lambda step: time.sleep(0.25) or 1.0
    return torch.optim.lr_scheduler.LambdaLR(optimizer, slowly)
"""

KEEPS = Words(
    checkpoints="kept", save_every=50, keep=2, time_limit=240, run=("--steps", f"{STEPS}")
)
"""Slurm sends USR1 121 s before the end, or up to a minute earlier: 60 to 120 s after the start."""


def slow(folder: Path, style: str) -> Path:
    found = made(folder, Words(**{**vars(KEEPS), "style": style}))
    net = found / "net.py"
    net.write_text(net.read_text() + SLOW)
    return found


def steps(folder: Path, job: str) -> list[int]:
    """The steps of which rank 0 has told, in order."""
    return [int(found) for found in re.findall(r"step (\d+)/", said(folder, job))]


@saved
@pytest.mark.parametrize("style", ["srun", "torchrun"])
def test_it_saves_before_the_limit_and_goes_on(style: str, cluster: Slurm, tmp_path: Path) -> None:
    folder = slow(tmp_path, style)
    job = cluster.submit("train.sbatch", folder)
    cluster.until(job, "RUNNING")
    cluster.until(job, "PENDING", seconds=200)
    assert [*folder.glob("kept/*")], said(folder, job)
    assert int(cluster.finish(job)["Restarts"]) >= 1
    told = steps(folder, job)
    assert told == sorted(told) and told[-1] == STEPS, told  # it never began again


@saved
@pytest.mark.parametrize("style", ["srun", "torchrun"])
def test_it_goes_on_after_the_death_of_a_node(style: str, cluster: Slurm, tmp_path: Path) -> None:
    folder = slow(tmp_path, style)
    job = cluster.submit("train.sbatch", folder)
    nodes = cluster.until(job, "RUNNING")["NodeList"]
    deadline = time.monotonic() + 100
    while not [*folder.glob("kept/*")]:
        assert time.monotonic() < deadline, said(folder, job)
        time.sleep(0.5)
    last = cluster.run("scontrol", "show", "hostnames", nodes).split()[-1]
    cluster.kill(last)
    cluster.until(job, "PENDING", seconds=120)
    found = cluster.finish(job)
    there = cluster.run("scontrol", "show", "hostnames", found["NodeList"]).split()
    assert int(found["Restarts"]) >= 1 and last not in there
    told = steps(folder, job)
    assert told[-1] == STEPS and told.count(1) <= 1, told  # it never began again
