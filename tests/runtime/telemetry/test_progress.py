"""Which steps a run prints, and which figures of each."""

import os
import pty
import re
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopipe.batch.description import describe
from autopipe.runtime.telemetry.metrics import Metrics, of_step, rows_of
from autopipe.runtime.telemetry.progress import LINES, progress_shown, throughput
from tests.support.plans import example_plan


def metrics(step: int, **more: float) -> Metrics:
    """Of a step of a second."""
    return Metrics(step, 0.5, 1.0, 7.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "lines"),
    [
        (1, ["1/1"]),
        (25, ["1/25", "3/25", "5/25", "7/25", "9/25", "11/25", "13/25", "15/25", "17/25", "19/25",
              "21/25", "23/25", "25/25"]),
        (1000, ["1/1000", "101/1000", "201/1000", "301/1000", "401/1000", "501/1000", "601/1000",
                "701/1000", "801/1000", "901/1000", "1000/1000"]),
    ],
)  # fmt: skip
def test_which_steps_have_a_line(steps: int, lines: list[str]) -> None:
    said: list[str] = []
    with progress_shown(steps, True, said.append) as show:
        for step in range(1, steps + 1):
            show(metrics(step))
    assert [line.split()[1] for line in said] == lines
    assert len(lines) <= 1.5 * LINES


def test_every_tenth_step_where_the_end_is_not_known() -> None:
    said: list[str] = []
    with progress_shown(None, True, said.append) as show:
        for step in range(1, 26):
            show(metrics(step))
    assert said == [f"step {step}  loss 0.5000  7.0 rows/s" for step in (1, 11, 21)]


def test_only_rank_0_talks() -> None:
    said: list[str] = []
    with progress_shown(3, False, said.append) as show:
        show(metrics(1))
    assert said == []


@pytest.mark.parametrize(("steps", "of"), [(3, "3/3"), (None, "3")])
def test_one_line_on_a_terminal(
    steps: int | None, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    master, slave = pty.openpty()
    said: list[str] = []
    with os.fdopen(slave, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with progress_shown(steps, True, said.append) as show:
            for step in range(1, 4):
                show(metrics(step, tokens_per_second=1234.0, mfu=0.375))
    drawn = b""
    with suppress(OSError):  # the other end is closed: all has been read
        while part := os.read(master, 4096):
            drawn += part
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn.decode())
    *_, last = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert re.fullmatch(rf"step {of} ━.* loss 0\.5000  1,234 tokens/s  MFU 38 %\s*", last)
    assert text.count("\n") == 1  # the one that ends it
    assert said == []


def test_time_left_counts_from_where_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 s each; it once was divided by all steps, those of earlier runs too."""
    moments = iter(range(0, 100, 10))
    monkeypatch.setattr(
        "autopipe.runtime.telemetry.progress.perf_counter", lambda: float(next(moments))
    )
    said: list[str] = []
    with progress_shown(100, True, said.append, 1) as show:
        for step in (91, 92, 93):
            show(metrics(step))
    assert [line.partition("rows/s")[2] for line in said] == ["", "  1:20 left", "  1:10 left"]


@pytest.mark.parametrize(
    ("batch", "sharded", "tokens", "rate"),
    [
        ({"ids": torch.zeros(8, 128, dtype=torch.int64)}, False, 32 * 128, "2,048 tokens/s"),
        ({"ids": torch.zeros(8, 128, dtype=torch.int64)}, True, 32 * 128, "8,192 tokens/s"),
        ({"scale": torch.zeros(()), "image": torch.zeros(8, 3, 5)}, False, 0, "16.0 rows/s"),
        ((torch.zeros(8, 3), torch.zeros(8, 9, dtype=torch.int64)), True, 0, "64.0 rows/s"),
    ],
)
def test_rate(batch: Any, sharded: bool, tokens: int, rate: str) -> None:
    """Of a step of half a second at dp = 4, in tokens where a plan of 32 rows counts some."""
    plan = example_plan()
    assert plan.work is not None
    plan = replace(
        plan,
        mesh=replace(plan.mesh, dp=4),
        batch=replace(plan.batch, rows=32),
        inputs=tuple(describe(batch, None, 8, 0)),
        work=replace(plan.work, tokens=tokens),
    )
    found = of_step(plan, 1, 0.0, 0.5, rows_of(batch, plan, sharded=sharded))
    assert throughput(found) == rate
