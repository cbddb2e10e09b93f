"""The recipes of examples/, run as their READMEs say, on what this machine has.

On CPUs and with small sizes; for Slurm a real cluster of four nodes on this host.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.cluster.cluster import Group, NodeGroup
from autopipe.export.targets import export
from autopipe.export.words import Words
from autopipe.planfile.contents import Plan
from autopipe.util import codec
from tests.support import slurm
from tests.support.inprocess import machine
from tests.support.manifests import wrong
from tests.support.scripts import check_script
from tests.support.shell import NET, ROOT
from tests.support.spread import spread

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/*.sh"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_is_a_script_that_says_what_it_needs(path: Path, tmp_path: Path) -> None:
    check_script(path.read_text())
    alone = subprocess.run(["bash", path], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 2 and alone.stderr.startswith("error: expected ")
    assert not [*tmp_path.iterdir()]


def run(*command: str, folder: Path, **environ: str) -> str:
    """What a script of a recipe prints, with `autopipe` on its path."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    own = programs / "autopipe"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} -m autopipe "$@"\n')
    own.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- examples/kubernetes


@pytest.mark.long
def test_manifests(tmp_path: Path) -> None:
    spread("2x4xA100-80GB", [4, 4]).save(tmp_path / "plan.json")
    script = str(EXAMPLES / "kubernetes/manifests.sh")
    run("bash", script, "plan.json", "registry.local/autopipe:0.1", folder=tmp_path)
    for name in ("trainjob", "pytorchjob", "jobset"):
        assert wrong((tmp_path / f"{name}.yaml").read_text()) == []
    assert "ReadWriteMany" in (tmp_path / "volume.yaml").read_text()


# --- examples/slurm

CLUSTERED = pytest.mark.skipif(slurm.why_not() is not None, reason=str(slurm.why_not()))


@pytest.mark.long
@CLUSTERED
def test_every_plan_trains_on_slurm(tmp_path: Path) -> None:
    """Four splits of one model give the same first loss; an array, and a run after it."""
    (tmp_path / "net.py").write_text(NET)
    here = machine(4)
    group = Group(2, here.nodes[0].groups[0].device)
    codec.save(replace(here, nodes=(NodeGroup(2, (group,)),)), tmp_path / "cluster.json")
    recipe = EXAMPLES / "slurm"
    words = ("net.py", "cluster.json", "--time", "10")
    run("bash", str(recipe / "plans.sh"), *words, folder=tmp_path, STEPS="2")
    with slurm.cluster(tmp_path / "here") as cluster:
        names = ("data", "sharded", "offload", "axes")
        for name in names:
            check_script((tmp_path / f"{name}.sbatch").read_text())
            cluster.until(cluster.submit(f"{name}.sbatch", tmp_path), "COMPLETED")
        first = {
            name: found[1]
            for name in names
            for log in tmp_path.glob(f"logs/{name}-*/rank-0.log")
            if (found := re.search(r"loss (\d\.\d+) ->", log.read_text()))
        }
        assert set(first) == {*names} and len({*first.values()}) == 1, first
        conf = cluster.environ["SLURM_CONF"]
        sweep = str(recipe / "sweep.sh")
        printed = run("bash", sweep, "data.json", folder=tmp_path, STEPS="2", SLURM_CONF=conf)
        _, last = printed.split()[-2:]
        cluster.until(last, "COMPLETED", seconds=240)
    assert len([*tmp_path.glob("logs/sweep-*/rank-0.log")]) == 3


# --- examples/wan

SMALL = {"WIDTH": "64", "LAYERS": "4", "HEADS": "4", "CONTEXT": "64", "ROWS": "8"}


def wan(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, Any]:
    """The recipe's model file, as Python loads it."""
    import runpy

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return runpy.run_path(str(EXAMPLES / "wan/model.py"))


def test_the_decoder_has_one_and_a_half_billion_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = wan(monkeypatch)["model"]()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1.51e9, rel=0.01)


SHARES = {"a": 0.6, "b": 0.3, "c": 0.1}


@pytest.fixture
def texts(tmp_path: Path) -> str:
    """A folder for each letter, and the recipe's word for their shares."""
    for letter in SHARES:
        (tmp_path / letter).mkdir()
        (tmp_path / letter / "text.txt").write_text(letter * 1000)
    return ",".join(f"{tmp_path / letter}:{share}" for letter, share in SHARES.items())


def test_text_is_mixed_by_shares_of_tokens(monkeypatch: pytest.MonkeyPatch, texts: str) -> None:
    """After any number of rows no source is a row ahead of its share or behind it."""
    rows = wan(monkeypatch, **SMALL, SOURCES=texts)["mixed"]()
    given = Counter[str]()
    for number, row in enumerate(islice(rows, 200), start=1):
        assert len(row) == 65
        given[chr(row[0])] += 1
        assert all(abs(given[letter] - share * number) < 1 for letter, share in SHARES.items())


def test_replicas_share_out_the_same_rows(monkeypatch: pytest.MonkeyPatch, texts: str) -> None:
    batches = wan(monkeypatch, **SMALL, SOURCES=texts)["batches"]
    whole = [next(batches(8))["tokens"]]
    parts = torch.cat([next(batches(8, shard, 4))["tokens"] for shard in range(4)])
    assert torch.equal(whole[0], parts)


@pytest.mark.long
def test_four_sites_on_one_host(tmp_path: Path) -> None:
    """The recipe's own script with small sizes; then its plan runs on four processes."""
    shutil.copy(EXAMPLES / "wan/model.py", tmp_path)
    script = str(EXAMPLES / "wan/sites.sh")
    sizes = {**SMALL, "CLUSTER": "cpu:4", "STAGES": "4", "STEPS": "2"}
    run("bash", script, "localhost", folder=tmp_path, **sizes)
    check_script((tmp_path / "train.sh").read_text())
    trained = ("run", "plan.json", "--local", "4", "--steps", "2")
    assert "loss " in run("bin/autopipe", *trained, folder=tmp_path, **SMALL)
    plan = Plan.load(tmp_path / "plan.json")
    assert len(plan.stages) == 4


def test_a_script_for_four_sites() -> None:
    """As the recipe's plan is shaped: 4 x 1 x 2 devices, a stage on each."""
    plan = spread("4x1x2xA100-80GB@30ms,1Gbit/s", [2, 2, 2, 2])
    hosts = ("a.org", "b.org", "c.org", "d.org")
    text = export(plan, "torchrun", "plan.json", Words(hosts=hosts, interface="eth0"))
    check_script(text)
    assert 'export NCCL_IB_DISABLE="1"' in text and "rmem_max=15000000" in text
