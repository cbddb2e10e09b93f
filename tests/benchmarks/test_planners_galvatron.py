"""Galvatron's files and formulas, on a model small enough to work out by hand."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import Again, Config, Decision, Problem
from benchmarks.planners import common_ground, galvatron, galvatron_problem, galvatron_score
from benchmarks.planners.galvatron_score import Plan, Way

MIB = 2**20


PROFILE: dict[str, dict[str, Any]] = {
    "computation_profiling_bf16_tiny_all.json": {
        # per row; a layer takes 2 ms a row and 1 ms besides, the vocabulary 4 ms a row
        **{f"layertype_0_bsz{rows}_seq1024": 2 + 1 / rows for rows in (1, 2, 4)},
        **{f"layertype_other_bsz{rows}_seq1024": 4.0 for rows in (1, 2, 4)},
        "layernum[2]_bsz1_seq1024": 99.0,
    },
    "memory_profiling_bf16_tiny_all.json": {
        "1_1_2_sp": {"layernum[1]_bsz8_seq1024_rank0_ms": 99.0},
        "layertype_0_sp": {
            "1024": {
                "parameter_size": 100.0,
                "tp_activation_per_bsz_dict": {"1": 60.0, "2": 30.0, "checkpoint": 8.0},
            }
        },
        "other_memory_pp_off_sp": {
            "1024": {"model_states": {"1": 80.0, "2": 40.0}, "activation": {"1": 10.0, "2": 5.0}}
        },
        "other_memory_pp_on_first_sp": {
            "1024": {"model_states": {"1": 32.0, "2": 16.0}, "activation": {"1": 2.0, "2": 1.0}}
        },
        "other_memory_pp_on_last_sp": {
            "1024": {"model_states": {"1": 48.0, "2": 24.0}, "activation": {"1": 8.0, "2": 4.0}}
        },
    },
    "allreduce_bandwidth_1nodes_4gpus_per_node.json": {
        **{"allreduce_size_4_consec_1": 50.0},
        **{"allreduce_size_2_consec_1": 100.0, "allreduce_size_2_consec_0": 25.0},
    },
    "p2p_bandwidth_1nodes_4gpus_per_node.json": {"pp_size_2": 10.0, "pp_size_4": 5.0},
    "sp_time_1nodes_4gpus_per_node.json": {
        **{f"allreduce_size_2_{size}MB_time": 1 + size for size in (1, 2, 4)},
        **{f"all2all_size_2_{size}MB_time": 0.5 for size in (1, 2, 4)},
    },
}
"""A row passes on 1024 * 4096 * 2 bytes = 8 MiB."""


@pytest.fixture
def costs(tmp_path: Path) -> galvatron.Costs:
    for name, content in PROFILE.items():
        (tmp_path / name).write_text(json.dumps(content))
    return galvatron.read(tmp_path)


def test_galvatrons_files(costs: galvatron.Costs, tmp_path: Path) -> None:
    assert costs.sequence == 1024
    assert (costs.layer.slope, costs.layer.offset) == pytest.approx((2.0, 1.0))
    assert (costs.vocabulary.slope, costs.vocabulary.offset) == pytest.approx((4.0, 0.0))
    assert (costs.saved, costs.kept) == ({1: 60.0, 2: 30.0}, 8.0)
    assert costs.reduce == {(4, True): 0.02, (2, True): 0.01, (2, False): 0.04}
    assert costs.transfer == {2: 0.1, 4: 0.2}
    assert costs.gather[2](4) == 2.5  # half of the all-reduce, as measured
    assert costs.gather[2](8) == pytest.approx(4.5)  # on the line
    (tmp_path / "sp_time_of_another_node.json").write_text("{}")
    with pytest.raises(ValueError, match="one file sp_time"):
        galvatron.read(tmp_path)


def test_a_layer_beside_its_gradients(costs: galvatron.Costs) -> None:
    """dp 2, two rows: forward 2 * 2 + 1 = 5 ms, backward 10 ms, gradients 1/2 * 100 * 0.01 ms.

    Computing and reducing go on together for 0.5 ms' worth of each, then computing alone.
    """
    reducing, alone = galvatron_score.layer_times(costs, Way(1, 1, 2, 2), 2, 1)
    assert alone == pytest.approx(15)
    assert reducing == pytest.approx(5 + 0.5 * galvatron_score.OVERLAP + 9.5)
    fetching = galvatron_score.layer_times(costs, Way(1, 1, 2, 3), 2, 1)
    assert fetching == pytest.approx((reducing + 0.25, alone + 0.25))


def test_a_layer_over_two_devices(costs: galvatron.Costs) -> None:
    """tp 2, pp 2, two rows: 3 ms and 6 ms, recomputed 9; 6 or 9 gathers of 16 MiB, 8.5 ms each.

    Transfers: 2 * 2 * 16 MiB * 0.1 ms for all 32 layers together.
    """
    transfer = 2 * 2 * 16 * 0.1 / 32
    for recomputed, ms in ((False, 3 + 6 + 6 * 8.5), (True, 3 + 9 + 9 * 8.5)):
        way = Way(2, 1, 1, 0, recomputed)
        assert galvatron_score.layer_times(costs, way, 2, 2) == pytest.approx([ms + transfer] * 2)


@pytest.mark.parametrize(
    ("zero", "micro_batches", "whole"),
    [(0, 1, 8), (0, 4, 8), (1, 1, 2), (1, 4, 2), (2, 1, 1), (2, 4, 2), (3, 1, 0), (3, 4, 1)],
)
def test_what_zero_shards(zero: int, micro_batches: int, whole: int) -> None:
    """Of 8 pairs of bytes a parameter, weights and gradient are one each."""
    shard = 1 / 4 + galvatron_score.SLACK
    expected = (whole + (8 - whole) * shard) / 8
    assert galvatron_score.sharded(zero, 4, micro_batches) == pytest.approx(expected)
    assert galvatron_score.sharded(zero, 1, micro_batches) == 1


def test_memory_of_two_stages(costs: galvatron.Costs) -> None:
    """Four rows in two micro-batches, pp 2, tp 1, dp 2: one row each, two and one in flight.

    first   1024 + 32 / 8 * (2 + 6 shard) + 2 * 2       a layer   400 / 8 * (2 + 6 shard) + 60 * 2
    last    1024 + 48 / 8 * (2 + 6 shard) + 8           recomputed                 ...    + 8
    """
    way = Way(1, 1, 2, 1)
    plan = Plan(((way,), (Way(1, 1, 2, 1, True),)), way, 2, None)
    kept = (2 + 6 * 0.503) / 8
    first = math.ceil(1024 + 32 * kept + 4) + math.ceil(400 * kept + 120)
    last = math.ceil(1024 + 48 * kept + 8) + math.ceil(400 * kept + 8)
    assert galvatron_score.memory(costs, plan, 4) == (first, last)
    gathering = Plan(plan.stages, way, 2, 2)  # the buffer of tp 2 holds both rows: 16 MiB
    assert galvatron_score.memory(costs, gathering, 4) == (first + 16, last + 16)


def test_memory_kept_for_the_allocator() -> None:
    assert galvatron_score.reserved(36 * 1024) == 7372
    assert galvatron_score.reserved(20 * 1024) == 0


def simulated(times: list[float], micro_batches: int) -> float:
    """1F1B, forward a third and backward two thirds of a stage's time."""
    ready: dict[tuple[str, int, int], float] = {}
    stages = len(times)
    orders = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        order = [("F", micro_batch) for micro_batch in range(ahead)]
        for micro_batch in range(micro_batches):
            order.append(("B", micro_batch))
            if micro_batch + ahead < micro_batches:
                order.append(("F", micro_batch + ahead))
        orders.append(order)
    clocks, left = [0.0] * stages, sum(map(len, orders))
    while left:
        for stage, order in enumerate(orders):
            while order:
                kind, micro_batch = order[0]
                before = stage - 1 if kind == "F" else stage + 1
                if 0 <= before < stages and (kind, before, micro_batch) not in ready:
                    break
                start = max(clocks[stage], ready.get((kind, before, micro_batch), 0.0))
                clocks[stage] = start + times[stage] * (1 if kind == "F" else 2) / 3
                ready[kind, stage, micro_batch] = clocks[stage]
                order.pop(0)
                left -= 1
    return max(clocks)


def test_a_step_is_bounded_by_each_of_its_stages() -> None:
    """No simulated step is shorter than the formula says; with equal stages it is just that."""
    random.seed(0)
    for _ in range(200):
        times = [random.uniform(0.5, 2.0) for _ in range(random.randint(1, 5))]
        count = random.randint(len(times), 10)
        bound = max(galvatron_score.bounds(times, count))
        assert simulated(times, count) >= bound - 1e-9
        even = [1.0] * len(times)
        assert simulated(even, count) == pytest.approx(max(galvatron_score.bounds(even, count)))


def test_a_slow_stage_in_the_middle_counts() -> None:
    """By its first stage this step takes 4 + 6 = 10 s, by its last 5 + 7; by the middle one 25."""
    assert list(galvatron_score.bounds([1.0, 3.0, 1.0], 8)) == [10.0, 25.0, 12.0]
    assert simulated([1.0, 3.0, 1.0], 8) == pytest.approx(25.0)


def test_the_best_of_the_common_ground(costs: galvatron.Costs) -> None:
    """Against plans of which each stage recomputes any number of layers, on four devices."""
    limit, batch, counts = 8 * 1024, 8, (1, 2, 4)
    found = common_ground.best(costs, batch, 4, limit, counts)
    assert found is not None
    everything = [
        galvatron_score.score(costs, plan, batch, limit).seconds
        for count in counts
        for pp, tp in itertools.product((1, 2), (1, 2))
        if pp <= count and batch % (count * (4 // pp // tp)) == 0
        for zero in (0, 1, 3)
        for again in itertools.product(range(galvatron.LAYERS // pp + 1), repeat=pp)
        for way in [Way(tp, 1, 4 // pp // tp, zero)]
        for plan in [common_ground.plan_of(way, [galvatron.LAYERS // pp] * pp, again, count)]
        if max(galvatron_score.memory(costs, plan, batch)) <= limit
    ]
    assert found[0].seconds == pytest.approx(min(everything))
    assert max(found[0].memory) <= limit
    assert common_ground.best(costs, batch, 4, 1024, counts) is None


@pytest.mark.parametrize("gibibytes", [1, 4, 6, 8, 20])
def test_the_planner_is_no_worse_than_the_common_ground(
    costs: galvatron.Costs, gibibytes: int
) -> None:
    limit, counts = gibibytes * 1024, (1, 2, 4)
    common = common_ground.best(costs, 8, 4, limit, counts)
    found = galvatron_problem.plan(costs, 8, 4, limit, counts)
    assert (found is None) == (common is None)
    if found is not None and common is not None:
        assert found[0].seconds <= common[0].seconds * (1 + 1e-9)
        assert found[0] == galvatron_score.score(costs, found[1], 8, limit)
        assert max(found[0].memory) <= limit


def held(problem: Problem, decision: Decision) -> list[int]:
    """Bytes of each stage, but for those of a recomputed block, which Galvatron does not count."""
    found = []
    bounds = (0, *decision.cuts, problem.units)
    for stage, blocks in zip(estimate(problem, decision).stages, decision.recompute, strict=True):
        first, last = bounds[len(found)], bounds[len(found) + 1]
        of_blocks = [saved for saved in problem.profiles[0].saved if saved.block is not None]
        own = [saved.bytes for saved in of_blocks if first <= saved.savers[0] < last]
        found.append(stage.memory.peak - (max(own) if blocks else 0))
    return found


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_even_stages_hold_galvatrons_bytes(costs: galvatron.Costs, pp: int, zero: int) -> None:
    """Whichever layers run again; uneven ones hold less than two MiB a layer more."""
    way, count, numbers = Way(1, 1, 4 // pp, zero if pp < 4 else 0), 4, random.Random(pp)
    case = galvatron_problem.Case(way, pp, count, 16 // count // way.dp)
    even = galvatron_problem.problem(costs, case, 16, 2**20, even=True)
    uneven = galvatron_problem.problem(costs, case, 16, 2**20, even=False)
    config = Config(pp, way.dp, count, 0, "1f1b")
    each = galvatron.LAYERS // pp
    for _ in range(5):
        again = [sorted(numbers.sample(range(each), numbers.randint(0, each))) for _ in range(pp)]
        blocks = tuple(
            tuple(Again(s * each + layer) for layer in own) for s, own in enumerate(again)
        )
        plan = common_ground.plan_of(way, [each] * pp, [len(own) for own in again], count)
        expected = galvatron_score.memory(costs, plan, 16)
        found = held(even, Decision(config, tuple(range(1, pp)), blocks))
        assert tuple(size / MIB for size in found) == expected
        if pp > 1:
            found = held(uneven, Decision(config, tuple(range(each, 32, each)), blocks))
            off = 1024 + int(galvatron_score.activation(costs, case.rows))
            for size, mebibytes in zip(found, expected, strict=True):
                assert mebibytes <= size / MIB + off <= mebibytes + 2 * each
