"""What the rows of benchmarks/honesty mean; no test here judges a prediction."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopipe.cluster.cluster import Device
from benchmarks.honesty import allocator
from benchmarks.honesty.case import CASES, summary, table
from benchmarks.honesty.models import MODELS
from benchmarks.honesty.quiet import cores, disturbed, drift, waited

DEVICE = Device("cpu", 1, {"fp32": 1e11}, 1e10, 0.0, "by hand")


def test_every_case_has_a_model_and_a_name_of_its_own() -> None:
    assert {case.model for case in CASES} == MODELS.keys()
    assert len({case.name for case in CASES}) == len(CASES)
    assert max(case.processes for case in CASES) == 2


def test_the_peak_is_the_most_that_is_alive_in_the_second_part(tmp_path: Path) -> None:
    """Kept 4000 bytes; within the step 8000 more for a while. What came before does not count."""
    kept: list[torch.Tensor] = []

    def first() -> Callable[[], object]:
        torch.ones(100_000)  # gone again
        kept.append(torch.ones(1000))
        return lambda: torch.ones(2000).sum()

    found = allocator.peak(first, tmp_path)
    assert 12_000 <= found < 13_000


def test_a_storage_counts_once() -> None:
    whole = torch.ones(100)
    assert allocator.held([whole, whole[:10], torch.ones(5)]) == 420


def test_waiting_is_the_second_figure_of_the_kernel() -> None:
    assert waited("5000000000 2500000000 17") == 2.5


def test_drift_is_the_larger_change() -> None:
    slower = replace(DEVICE, flops={"fp32": 0.8e11}, bandwidth=0.5e10)
    assert drift(DEVICE, slower) == pytest.approx(1.0)  # memory takes twice as long
    assert drift(DEVICE, DEVICE) == 0.0


def test_either_sign_is_enough() -> None:
    assert disturbed(0.01, -0.05) < 1 < disturbed(0.06, 0.0) < disturbed(0.0, 0.2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux has it")
def test_as_many_cores_as_processes() -> None:
    had = os.sched_getaffinity(0)
    with cores(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == had


def test_errors_are_summed_up_by_size() -> None:
    rows = [{"seconds_error": e, "bytes_error": e / 10} for e in (-0.3, 0.1, 0.2)]
    found = summary(rows)
    assert (found["median_seconds_error"], found["worst_bytes_error"]) == (0.2, 0.03)


def test_the_table_compares_where_the_measurement_is_fullest() -> None:
    row = {
        "model": "gpt",
        "mesh": {"pp": 2, "dp": 1, "tp": 1},
        "micro_batches": 4,
        "schedule": "1f1b",
        "zero": 1,
        "recompute": True,
        "predicted_seconds": 0.9,
        "measured_seconds": 1.0,
        "predicted_bytes": [3 * 2**20, 1 * 2**20],
        "measured_bytes": [1 * 2**20, 2 * 2**20],
        "waited": 0.01,
        "drift": -0.02,
        "tries": 1,
    }
    assert table([row]).splitlines()[-1] == (
        "| gpt | 2 x 1 x 1 | 4 | 1f1b, ZeRO 1, blocks again | 900 / 1000 ms | -10.0% "
        "| 1.0 / 2.0 MiB | -50.0% | 0.01, -0.02, 1 |"
    )
