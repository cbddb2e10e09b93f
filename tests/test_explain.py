"""What a person is shown: whole pages as they are printed, none wider than 100 columns."""

from collections.abc import Callable
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from autopipe.explain import WIDTH, compare, console, count, explain, seconds
from autopipe.plan import Batch, Boundary, Memory, Mesh, Place, Plan, StagePrediction
from tests.plans import example_plan


def page(content: RenderableType, width: int = WIDTH) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(content)
    return out.getvalue()


PAGE = """\
1f1b on 2xA100-80GB: 2 pipeline stages (pp) x 1 replica (dp) x 1 tensor part (tp)
one step: 8 rows, 4 micro-batches of b = 2 rows on each replica
predicted: 15.5 ms a step, of which a stage idles 20% (the bubble)

predicted: one micro-batch's forward and backward; a device's memory in KiB

stage   forward   backward   peak   weights   gradients   optimizer   activations   transfers
─────────────────────────────────────────────────────────────────────────────────────────────
0        1.0 ms     2.0 ms   18.5       4.0         4.0         8.0           2.0         0.5
1        1.0 ms     2.0 ms   18.5       4.0         4.0         8.0           2.0         0.5
peak is the sum of what stands right of it: weights (with buffers), their gradients, the
optimizer's state, activations kept from forward to backward, buffers of transfers

stage 0: 9 nodes, 2 parameter tensors
  from embed/embedding/0
  to   block.0/add/0
  sends block.0/add/0 float32[b, 12, 32] to stage 1, its gradient comes back
  recomputed in backward: block.0
stage 1: 10 nodes, 2 parameter tensors
  from block.1/layer_norm/0
  to   head/linear/0

one step: F forward, B backward, numbered by micro-batch
stage 0: F0 F1       B0--- F2 B1--- F3 B2---    B3---
stage 1:    F0 B0--- F1 B1--- F2 B2--- F3 B3---

why: stage 1 is the slowest
planner exact: no plan can take less than 15.0 ms a step
next best: pp=1 dp=2 tp=1 micro_batches=1 1f1b: the gradients take longer than the bubble
"""


def test_a_plan() -> None:
    assert page(explain(example_plan())) == PAGE


def test_no_next_best() -> None:
    plan = example_plan()
    assert "next best" not in page(
        explain(replace(plan, planner=replace(plan.planner, next_best=None)))
    )


def test_long_names_leave_the_table_as_it_is() -> None:
    plan, long = example_plan(), "model." + "encoder.layers.11." * 10 + "linear/0"
    stages = tuple(replace(stage, first=long) for stage in plan.stages)
    text = page(explain(replace(plan, stages=stages)))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.replace("\n", "").count(long) == 2
    table = PAGE[PAGE.index("stage   forward") : PAGE.index("peak is")]
    assert table in text


def deep(pp: int, micro_batches: int, change: Callable[[int], float] = lambda stage: 1e-3) -> Plan:
    """`pp` stages whose forward takes `change(stage)` seconds, and 70 GiB each."""
    plan = example_plan()
    memory = Memory(20 * 2**30, 20 * 2**30, 10 * 2**30, 0, 19 * 2**30, 2**30)
    stages = tuple(
        replace(
            plan.stages[0],
            predicted=StagePrediction(change(stage), 2 * change(stage), memory),
            sends=(),
        )
        for stage in range(pp)
    )
    return replace(
        plan,
        mesh=Mesh(pp, 1, 1, tuple(Place(rank, rank, 0, 0, 0, rank, "cpu") for rank in range(pp))),
        batch=Batch(micro_batches, micro_batches),
        boundaries=(Boundary(2, 0),) * (pp - 1),
        stages=stages,
    )


def test_a_page_is_never_wider() -> None:
    for pp, micro_batches in ((1, 1), (1, 64), (2, 64), (4, 4), (8, 64), (12, 512)):
        text = page(explain(deep(pp, micro_batches)))
        assert max(map(len, text.splitlines())) <= WIDTH, (pp, micro_batches)
        assert text.count("\nstage 0: F0") == (pp < 12)  # too deep to be drawn
        assert f"\n{pp - 1:<5}    1.0 ms     2.0 ms   70.0" in text
        assert "a device's memory in GiB" in text


def test_as_many_micro_batches_as_fit_are_drawn() -> None:
    text = page(explain(deep(4, 64)))
    assert "one step: F forward, B backward, numbered by micro-batch, 7 of 64 micro-batches" in text
    drawn = [line for line in text.splitlines() if line.startswith("stage 3: ")][-1]
    assert (
        drawn == "stage 3:          F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6---"
    )


def test_stages_of_very_unlike_length_are_still_drawn() -> None:
    text = page(explain(deep(2, 4, lambda stage: 1e-6 if stage else 1e-2)))
    assert "stage 1: " in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_stage_that_takes_no_time_is_not_drawn() -> None:
    text = page(explain(deep(2, 4, lambda stage: 0.0)))
    assert "one step: F" not in text and "why: " in text


def test_planned_beside_measured() -> None:
    planned = StagePrediction(0.012, 0.0251, Memory(2**20, 2**20, 2**21, 0, 3 * 2**20, 2**19))
    measured = StagePrediction(0.0113, 0.03, Memory(2**20, 2**20, 2**21, 0, 3 * 2**20, 2**18))
    assert page(compare([planned, planned], [measured, planned], 0.25, 1.2)) == (
        "planned / measured: one micro-batch's forward and backward; a device's memory in MiB,\n"
        "of whose peak activations and transfers are parts\n"
        "\n"
        "stage             forward            backward        peak   activations   transfers\n"
        "───────────────────────────────────────────────────────────────────────────────────\n"
        "0       12.0 ms / 11.3 ms   25.1 ms / 30.0 ms   7.5 / 7.2     3.0 / 3.0   0.5 / 0.2\n"
        "1       12.0 ms / 12.0 ms   25.1 ms / 25.1 ms   7.5 / 7.5     3.0 / 3.0   0.5 / 0.5\n"
        "a step, before the optimizer's: 250.0 ms / 1.20 s\n"
    )


def test_seconds() -> None:
    times = [0.0, 4.2e-7, 263e-6, 1e-3, 0.0155, 0.999, 1.0, 75.5]
    assert [seconds(time) for time in times] == [
        "0 us", "0 us", "263 us", "1.0 ms", "15.5 ms", "999.0 ms", "1.00 s", "75.50 s",
    ]  # fmt: skip


def test_count() -> None:
    assert count(1, "row") == "1 row"
    assert count(0, "row") == "0 rows"
    assert count(2, "micro-batch", "micro-batches") == "2 micro-batches"


@pytest.mark.parametrize(("columns", "width"), [("80", 100), ("180", 180)])
def test_a_page_is_a_hundred_columns_at_least(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == 100  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert console().width == width
