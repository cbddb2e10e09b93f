"""The benchmarks run, and their rows say what their columns promise; no test here judges speed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pipeline import link
from benchmarks.pipeline.case import SINGLE, Case, ours_of, row, theirs_of

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> list[dict[str, Any]]:
    """The rows of `python -m benchmarks.pipeline`; it checks every side's gradients by itself."""
    command = [sys.executable, "-m", "benchmarks.pipeline", *arguments]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def case(**changes: Any) -> Case:
    """Two ranks, two micro-batches."""
    known = {
        **{"ranks": 2, "micro_batches": 2, "ms": 1.0, "compute": "sleep", "rate": 1e9},
        **{"schedules": ("1f1b", "eager-1f1b"), "window": 2, "depths": (1,), "rounds": 3},
        **{"delay_ms": 0.0, "mbit": 0.0, "cores": 1, "fifo": False, "memory": False, "relay": None},
    }
    return Case(**{**known, **changes})


def test_a_row_compares_round_by_round() -> None:
    """Two micro-batches on two ranks take 3 slots at best, one process takes 4.

    one process   4 s  in each round    ->  ideal  3/2 * 4/2 = 3 s
    ours          4, 5, 6 s             ->  efficiency of the median round  3/5
    theirs        8, 5, 9 s             ->  theirs / ours  2, 1, 1.5: the median is 1.5
    """
    times = {
        SINGLE: [4.0, 4.0, 4.0],
        ours_of("1f1b"): [4.0, 5.0, 6.0],
        theirs_of("1f1b"): [8.0, 5.0, 9.0],
    }
    found = row(case(), "1f1b", times, load=0.5)
    assert found["against"] == "Schedule1F1B"
    assert found["ours"] == [4.5, 5.0, 5.5]  # lower quartile, median, upper quartile
    assert found["ratio"] == [1.25, 1.5, 1.75]
    assert found["ideal"] == [3.0, 3.0, 3.0]
    assert found["ours_efficiency"] == 0.6
    assert found["depths"] == ()  # 1f1b has none, whatever eager-1f1b has


@pytest.mark.long
def test_both_sides_run_in_one_process_group() -> None:
    schedules = ["1f1b", "eager-1f1b", "interleaved"]
    rows = run("-p", "2", "-m", "4", "--ms", "1", "--rounds", "2", "--schedules", *schedules)
    assert [found["schedule"] for found in rows] == schedules
    for found in rows:
        assert found["ranks"] == 2 and found["micro_batches"] == 4 and found["rounds"] == 2
        assert min(found["ours"] + found["theirs"] + found["ideal"]) > 0
    assert len(rows[1]["depths"]) == 1  # chosen for the one boundary


@pytest.mark.long
def test_bytes_are_counted_at_the_allocator() -> None:
    """A rank's layers save 8 tensors of a micro-batch: each linear its input, each gelu its own."""
    ours, theirs = run("-p", "2", "-m", "4", "--ms", "1", "--compute", "matmul", "--memory")
    width = round((1e-3 * 40e9 / 24) ** (1 / 3) / 16) * 16
    assert ours["saved_bytes"] == theirs["saved_bytes"] == 8 * 4 * width**2
    # 1F1B: rank 0 has 2 micro-batches in flight, rank 1 has 1; of the first, the batch's rows are
    # not counted, 1 of the 8.
    assert ours["live_in_saved"][0] > 2 * 7 / 8 and ours["live_in_saved"][1] > 7 / 8
    # torch keeps a receive buffer per micro-batch and, before 2.15, each output until its backward.
    more = [them > us for them, us in zip(theirs["live_bytes"], ours["live_bytes"], strict=True)]
    assert more == [torch.__version__ < "2.15", True]


@pytest.mark.long
@pytest.mark.skipif(not link.available(), reason="takes root and /dev/net/tun")
def test_a_delayed_link_delays() -> None:
    """Forward crosses once and backward once: no step is shorter than twice the delay."""
    (found,) = run("-p", "2", "-m", "2", "--ms", "1", "--rounds", "1", "--delay-ms", "10")
    assert found["ours"][1] >= 2 * 0.010 and found["theirs"][1] >= 2 * 0.010
