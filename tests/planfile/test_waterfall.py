"""Where a step goes, worked by hand: the parts add up to it, and the first of them is MFU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Group, Link, NodeGroup
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Mesh, Place
from autopipe.planfile.waterfall import COMPUTED, WAITED, mfu, tokens_per_second, waterfall
from autopipe.planfile.work import Spent, Work
from tests.support.plans import chain, in_turns

PARTS = Spent(1.5e-3, 0.5e-3, 0.25e-3, recompute=0.4e-3, exchange=0.2e-3, gathering=0.15e-3)
"""3 ms: a forward of 1 and a backward of 2, as `chain` has it."""


def told(plan: Plan, work: Work, *times: float) -> Plan:
    """The plan, predicted, with `PARTS` so many times in each of its stages."""
    stages = [
        replace(
            stage,
            predicted=replace(
                stage.predicted,
                forward_seconds=n * 1e-3,
                backward_seconds=n * 2e-3,
                spent=Spent(**{name: n * part for name, part in vars(PARTS).items()}),
            ),
        )
        for stage, n in zip(plan.stages, times, strict=True)
    ]
    return predict.with_prediction(replace(plan, stages=tuple(stages), work=work))


def milliseconds(plan: Plan) -> dict[str, float]:
    """The parts that are not nothing; links of `chain` take nanoseconds."""
    found = {name: 1e3 * seconds for name, seconds in waterfall(plan).items()}
    return {name: round(own, 4) for name, own in found.items() if own > 1e-4}


def test_one_device_computes_all_the_time() -> None:
    """Four micro-batches of 3 ms. 6 GFLOP at 2 TFLOP/s are 3 ms of 6 for which it multiplies."""
    plan = told(chain(1, 4), Work(6e9, (2e12,), "bf16", False, tokens=240), 1)
    assert milliseconds(plan) == {
        "matmuls_at_peak": 3.0,
        "matmuls_below_peak": 3.0,
        "other_ops": 2.0,
        "launches": 1.0,
        "recompute": 1.6,
        "exchange": 0.8,
        "gathering": 0.6,
    }
    assert mfu(plan) == pytest.approx(3 / 12)
    assert tokens_per_second(plan) == pytest.approx(240 / 12e-3)


def test_stages_that_wait_for_each_other() -> None:
    """Stage 1 takes three times as long as stage 0: F 1 and 3, B 2 and 6 ms, two micro-batches.

    They compute for 6 and 18 of 21 ms, for 12 on average. Of two stages of 2 and 4 ms each a step
    takes (2 + 1) * 6 = 18.

            0     1     2     4          10          12       13         19          21
    rank 0  |  F0 |  F1 |                |     B0    |                   |     B1    |
    rank 1        |    F0     |    B0    |     F1             |    B1    |
    """
    plan = told(chain(2, 2), Work(6e9, (1e12, 1e12), "bf16", False), 1, 3)
    found = milliseconds(plan)
    assert found["matmuls_at_peak"] == 3.0
    assert found["matmuls_below_peak"] == 12 / 2 - 3
    assert (found["filling"], found["imbalance"]) == (18 - 12, 21 - 18)
    assert "transfers" not in found and "sums" not in found


def test_transfers_on_the_way_there_and_back() -> None:
    """1 ms each way. Without it a micro-batch is through two stages in 6 ms, of which each computes
    for 3."""
    plan = chain(2, 1)
    slow = replace(plan, cluster=replace(plan.cluster, within=Link(1e-3, 1e12)))
    found = milliseconds(told(slow, Work(1.0, (1e12, 1e12), "bf16", False), 1, 1))
    assert (found["filling"], found["transfers"]) == (3.0, 2.0)


def test_sums_of_gradients() -> None:
    """All that one stage sums is exposed."""
    one = chain(1, 2)
    places = tuple(Place(rank, 0, rank, 0, 0, rank, "cuda:0") for rank in range(2))
    group = Group(2, one.cluster.row[0])
    two = replace(
        one,
        cluster=replace(one.cluster, nodes=(NodeGroup(1, (group,)),)),
        mesh=Mesh(1, 2, 1, places),
        batch=replace(one.batch, rows=4),
    )
    plan = told(two, Work(1.0, (2e12,), "bf16", False), 1)
    (summing,) = predict.costs(plan).reduce
    assert waterfall(plan)["sums"] == pytest.approx(summing)
    assert plan.prediction.step_seconds == pytest.approx(6e-3 + summing)


def test_unlike_devices_count_by_their_peaks() -> None:
    """Three times the rate and half as long at it: the step's share at peak is MFU all the same."""
    plan = told(chain(2, 2), Work(6e9, (3e12, 1e12), "bf16", False), 1, 2)
    found, step = waterfall(plan), plan.prediction.step_seconds
    assert mfu(plan) == pytest.approx(6e9 / 4e12 / step)
    assert found["matmuls_at_peak"] / step == pytest.approx(mfu(plan))
    assert found["other_ops"] == pytest.approx(2 * 0.5e-3 * (3 / 4 * 1 + 1 / 4 * 2))


def test_ranks_that_take_turns_compute_in_theirs_alone() -> None:
    """The middle stage takes twice as long, on two ranks: all four compute for 8 * 3 = 4 * 6 ms,
    and all else is waiting for the first and the last micro-batch."""
    plan = told(in_turns(8), Work(6e9, (1e12,) * 4, "bf16", False), 1, 2, 2, 1)
    parts = waterfall(plan)
    assert sum(parts[name] for name in COMPUTED) == pytest.approx(24e-3)
    assert sum(parts.values()) == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert parts["filling"] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved", "zb-v"])
def test_the_parts_add_up_to_the_step(schedule: str) -> None:
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    plan = chain(4, 8, schedule=schedule, chunks=chunks)
    slow = replace(plan, cluster=replace(plan.cluster, within=Link(1e-4, 1e9)))
    work = Work(6e9, (1e12,) * 4, "bf16", False)
    found = told(slow, work, *(1 + 0.1 * (n % 3) for n in range(4 * chunks)))
    parts = waterfall(found)
    assert tuple(parts) == (*COMPUTED, *WAITED)
    assert sum(parts.values()) == pytest.approx(found.prediction.step_seconds, rel=1e-12)
    assert min(parts.values()) >= 0


def test_a_loss_over_the_batch_is_computed_by_the_last_rank() -> None:
    """Of 4 ms the mean of two ranks computes 2 and waits 2. Bug: it waited for all of them."""
    work = Work(6e9, (1e12,) * 2, "bf16", False)
    without, plan = chain(2, 4), replace(chain(2, 4), loss_seconds=4e-3)
    before, parts = (waterfall(told(each, work, 1, 1)) for each in (without, plan))
    assert parts["other_ops"] - before["other_ops"] == pytest.approx(2e-3)
    assert parts["filling"] - before["filling"] == pytest.approx(2e-3)
    bubble = told(plan, work, 1, 1).prediction.bubble
    assert sum(parts[name] for name in WAITED) / sum(parts.values()) == pytest.approx(bubble)


def test_a_measured_rate_is_no_bound() -> None:
    """10 GFLOP at 1 GFLOP/s were more than the step; 6 ms are all that it multiplies for."""
    found = waterfall(told(chain(1, 4), Work(1e10, (1e9,), "fp32", True), 1))
    assert found["matmuls_at_peak"] == pytest.approx(6e-3)
    assert found["matmuls_below_peak"] == 0


def test_what_a_plan_does_not_say() -> None:
    """By hand, or of another version: what is computed for is one part."""
    plan = told(chain(1, 4), Work(6e9, (2e12,), "bf16", False), 1)
    assert tokens_per_second(plan) is None, "its rows are no sequences"
    (stage,) = plan.stages
    slower = replace(stage, predicted=replace(stage.predicted, backward_seconds=3e-3))
    for unknown in (replace(plan, work=None), replace(plan, stages=(slower,))):
        found = waterfall(unknown)
        assert tuple(found) == ("computing", *WAITED)
        assert sum(found.values()) == pytest.approx(predict.timeline(unknown).seconds)
    assert mfu(replace(plan, work=None)) is None
