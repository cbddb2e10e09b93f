"""The planner's problem beside what rehearsals and graphs say of the same cuts."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopipe.cluster.cluster import Group, NodeGroup
from autopipe.cluster.tp_groups import tp_groups
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.blocks import find_blocks
from autopipe.ir.cut_points import find_units
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import bytes_at
from autopipe.ir.partition import partition
from autopipe.planners.costs.profile import Costing
from autopipe.planners.model.block_parts import figures
from autopipe.planners.model.devices import machine_of
from autopipe.planners.model.problem import Again, Constraints
from autopipe.planners.model.range_tables import tables
from autopipe.planners.search.registry import PLANNERS
from autopipe.stages.dry_run import rehearse
from tests.support.inprocess import machine, traced
from tests.support.long import chosen, sampled
from tests.support.staged import trace_model
from tests.support.zoo import ZOO

CLUSTER = machine(4)


def problem_of(name, *, at_least=8, rows=(1, 2, 4), batch=8, **how):
    """Of the zoo's model the units and the problem; no block runs again, if nobody says so."""
    found, flow, blocks = traced(name)
    units = find_units(flow, blocks, at_least)
    how = {"recompute": [], **how}
    return units, problem_on(CLUSTER, flow, blocks, units, batch=batch, rows=rows, **how)[0]


def problem_on(cluster, flow, blocks, units, *, batch=8, rows=(1, 2, 4), **how):
    """The problem, and the paths of its recomputable blocks."""
    devices, kinds = machine_of(cluster, tp_groups(cluster, how.get("tp", 1)))
    how = {"optimizer_factor": 2.0, "window": 2, "constraints": Constraints(), **how}
    given = {"flow": flow, "blocks": blocks, "units": units, "machine": devices, "kinds": kinds}
    return Costing(**given, batch=batch, rows=rows, **how).profiled()[:2]


def ranges_of(units, chance, stages):
    cuts = sorted(chance.sample(range(1, len(units.starts)), stages - 1))
    return list(itertools.pairwise([0, *cuts, len(units.starts)]))


@pytest.mark.parametrize("name", chosen(ZOO, now=("unet", "frozen", "picked")))
def test_saved_and_crossing_bytes_are_those_of_a_rehearsal_of_the_same_cuts(name):
    """To the byte, for any cuts between units: what the planner adds up is what a run keeps."""
    as_rehearsed(name)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    chosen(("gpt", "unet", "resnet", "llama", "frozen", "t5"), now=("resnet",)),
)
def test_in_low_precision_too(name):
    """Matrix products are made in bf16, and so are what of theirs is kept and what crosses."""
    as_rehearsed(name, precision="bf16-autocast")


@pytest.mark.parametrize("precision", chosen(["fp32", "bf16-autocast"], now=("bf16-autocast",)))
@pytest.mark.parametrize("name", chosen(("gpt", "llama", "gpt2"), now=("gpt",)))
def test_where_blocks_run_again_they_keep_their_arguments(name, precision):
    again = [block.path for block in traced(name)[2]]
    as_rehearsed(name, precision=precision, recompute=again)


@pytest.mark.long
def test_one_block_alone_runs_again():
    as_rehearsed("gpt", recompute=[traced("gpt")[2][2].path])


def saves(problem, rows, first, end):
    """Bytes that the blocks of a range do not keep, as all that are asked for run again."""
    asked = problem.constraints.recompute
    parts = [
        (block, max(first - start, 0), min(end, stop) - start)
        for block, (start, stop) in enumerate(problem.recomputable)
        if start < end and stop > first and (asked is None or Again(block) in asked)
    ]
    return sum(figures(problem, rows, 0, block, (low, high))[0] for block, low, high in parts)


def as_rehearsed(name, **how):
    """Three numbers of rows, each cut into 1, 2 and 4 stages; by default each once."""
    found, flow, blocks = traced(name)
    units, problem = problem_of(name, **how)
    chance = random.Random(name)
    for profile, stages in sampled([*itertools.product(problem.profiles, (1, 2, 4))], of=4):
        ranges = ranges_of(units, chance, stages)
        parts = partition(flow, [units.starts[first] for first, _ in ranges[1:]])
        rehearsal = rehearse(found.graph, parts, blocks, profile.rows, **how)
        table = tables(problem, profile)
        boundaries = rehearsal.boundaries
        for stage, (first, end) in zip(parts, ranges, strict=True):
            where = f"stage {stage.index} of {[units.starts[i] for i, _ in ranges]}"
            kept = table.saved[first, end] - saves(problem, profile.rows, first, end)
            assert kept == rehearsal.saved[stage.index], where
            received = sum(boundaries[ref].bytes for ref, _ in stage.receives)
            assert table.received[first, end] == received, where
            assert table.sent[first, end] == sum(boundaries[r].bytes for r in stage.outgoing), where
            back = [ref for ref, _ in stage.receives if stage.index in boundaries[ref].gradients]
            returned = sum(boundaries[ref].bytes for ref in back)
            assert table.received_gradient[first, end] == returned, where


@pytest.mark.parametrize(
    "name",
    chosen(["gpt2", "unet", "frozen"], now=("unet", "frozen")),
)
def test_parameters_and_constants_of_a_range_are_those_of_its_stage(name):
    found, flow, _ = traced(name)
    units, problem = problem_of(name)
    ranges = ranges_of(units, random.Random(name), 3)
    parts = partition(flow, [units.starts[first] for first, _ in ranges[1:]])
    table = tables(problem, problem.profiles[0])
    states = found.graph.states
    for stage, (first, end) in zip(parts, ranges, strict=True):
        sizes = {name: bytes_at(states[name].spec, 1) for name in stage.states}
        trainable = sum(size for name, size in sizes.items() if states[name].trainable)
        assert table.trainable[first, end] == trainable
        buffers = sum(size for name, size in sizes.items() if states[name].kind != "parameter")
        assert table.constants[first, end] == buffers
        assert table.frozen[first, end] == sum(sizes.values()) - trainable - buffers


def test_seconds_of_a_unit_are_the_sum_of_its_nodes():
    found, _, _ = traced("gpt")
    units, problem = problem_of("gpt")
    forward, backward = op_seconds.seconds(op_costs.costs(found.graph), 2, CLUSTER.row[0])
    profile = problem.profiles[1]
    assert profile.rows == 2
    assert sum(profile.forward[0]) == pytest.approx(forward.sum())
    assert sum(profile.backward[0]) == pytest.approx(backward.sum())
    second = slice(units.starts[1], units.starts[2])
    assert profile.forward[0][1] == pytest.approx(forward[second].sum())


def test_what_runs_again_takes_its_forwards_seconds_once_more():
    found, _, blocks = traced("gpt")
    units, problem = problem_of("gpt", recompute=[blocks[1].path])
    forward, _ = op_seconds.seconds(op_costs.costs(found.graph), 2, CLUSTER.row[0])
    ((number, _),) = problem.constraints.recompute
    (more,) = problem.profiles[1].recompute[number]
    assert sum(more) == pytest.approx(forward[blocks[1].first : blocks[1].stop].sum())
    first, last = problem.recomputable[number]
    assert (first, last) == (units.of(blocks[1].first), units.of(blocks[1].stop - 1) + 1)
    assert len(more) == last - first and all(seconds > 0 for seconds in more)


@pytest.mark.long
def test_where_nobody_says_which_blocks_run_again_all_that_can_may():
    """Those that draw random numbers may: they draw the same. The planner's choice is free. Where
    somebody does say, the others are what a refusal can speak of."""
    _, flow, blocks = traced("gpt")
    units = find_units(flow, blocks, 8)
    problem, paths = problem_on(CLUSTER, flow, blocks, units)
    assert paths == tuple(block.path for block in blocks)
    assert len(problem.recomputable) == 4 and problem.constraints.recompute is None
    fixed, paths = problem_on(CLUSTER, flow, blocks, units, recompute=["blocks.1", "blocks.3"])
    assert [paths[number] for number, _ in fixed.constraints.recompute] == ["blocks.1", "blocks.3"]
    none, paths = problem_on(CLUSTER, flow, blocks, units, recompute=[])
    assert (len(paths), none.constraints.recompute) == (4, ())


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("name", ["gpt", "mask"])
def test_ways_to_keep_less_are_looked_for_where_memory_may_be_short(name, monkeypatch):
    """Where it is ample the planner decides the same without them, in a fifth less time."""
    _, flow, blocks = traced(name)
    units = find_units(flow, blocks, 8)

    def problem(memory):
        return problem_on(machine(4, memory), flow, blocks, units)[0]

    model = sum(int(state.spec.bytes) for state in flow.graph.states.values())
    short, ample = problem(4 * model), problem(2**36)
    assert any(any(profile.levels) for profile in short.profiles)
    assert not any(any(profile.levels) for profile in ample.profiles)
    monkeypatch.setattr("autopipe.planners.costs.profile.AMPLE", math.inf)
    looked = problem(2**36)
    assert looked.profiles == short.profiles
    one, other = PLANNERS["dynamic"](looked), PLANNERS["dynamic"](ample)
    assert (one.decision, one.estimate) == (other.decision, other.estimate)


def test_every_kind_of_device_has_seconds_of_its_own():
    """A device of half the rates takes twice as long, and is of the second kind: the slower."""
    _, flow, blocks = traced("gpt")
    (group,) = CLUSTER.nodes[0].groups
    fast = replace(group.device, launch=0.0)
    slow = replace(fast, kind="slow", flops={"fp32": 5e9}, bandwidth=fast.bandwidth / 2)
    mixed = replace(CLUSTER, nodes=(NodeGroup(1, (Group(2, slow), Group(2, fast))),))
    problem, _ = problem_on(mixed, flow, blocks, find_units(flow, blocks, 8), recompute=[])
    assert problem.machine.kinds == (1, 1, 0, 0)
    for profile in problem.profiles:
        for quick, twice in (profile.forward, profile.backward):
            assert twice == pytest.approx([2 * seconds for seconds in quick])


def test_matrix_products_run_at_the_rate_of_their_precision():
    """At 2e10 operations a second in place of 1e10; what else a step does takes what it took."""
    _, usual = problem_of("gpt")
    _, low = problem_of("gpt", precision="bf16-autocast")
    for before, after in zip(usual.profiles, low.profiles, strict=True):
        for (one,), (other,) in (
            (before.forward, after.forward),
            (before.backward, after.backward),
        ):
            assert sum(one) / 2 < sum(other) < sum(one)


def test_seconds_of_exchanging_are_in_both_ways_and_told_apart():
    """Each node sends for a millisecond forward and two backward, at any size."""
    found, flow, blocks = traced("gpt")
    nodes = len(found.graph.nodes)
    units, alone = problem_of("gpt")
    sending = {"tp": 2, "sending": lambda graph, rows, link: [(1e-3, 2e-3)] * len(graph.nodes)}
    problem, _ = problem_on(CLUSTER, flow, blocks, units, recompute=[], **sending)
    for before, after in zip(alone.profiles, problem.profiles, strict=True):
        assert sum(after.forward[0]) == pytest.approx(sum(before.forward[0]) + nodes * 1e-3)
        assert sum(after.backward[0]) == pytest.approx(sum(before.backward[0]) + nodes * 2e-3)
        assert sum(after.exchange[0]) == pytest.approx(nodes * 3e-3)
        assert before.exchange == ()


def test_the_problem_is_of_the_cluster_and_of_what_was_asked():
    _, problem = problem_of("gpt", zeros=(0, 1, 3))
    assert (problem.batch, problem.window, problem.zeros, problem.tp) == (8, 2, (0, 1, 3), 1)
    devices = problem.machine
    assert (devices.devices, devices.memory) == (4, (2**30,) * 4)
    assert devices.link(1, 0, 1).link == CLUSTER.within
    assert [profile.rows for profile in problem.profiles] == [1, 2, 4]
    assert problem.units == len(problem.profiles[0].forward[0])


def test_blocks_are_ranges_of_units():
    _, _, blocks = traced("gpt")
    units, problem = problem_of("gpt")
    assert len(problem.blocks) == 4
    for block, (first, end) in zip(blocks, problem.blocks, strict=True):
        assert units.starts[first] == block.first
        assert end == len(units.starts) or units.starts[end] >= block.stop


# Bytes in the rows.


class Squares(nn.Module):
    """Attention between the rows of a batch: it keeps b * b numbers, no straight line."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return torch.softmax(y @ y.t(), 1).mean()


def test_bytes_that_are_no_line_in_the_rows_are_observed_at_every_size():
    found = trace_model(Squares(), lambda b: {"x": torch.ones(b, 4)})
    flow, blocks = analyse(found.graph), find_blocks(found.graph)
    rows = (1, 2, 4, 8, 16)
    problem, _ = problem_on(CLUSTER, flow, blocks, find_units(flow), batch=16, rows=rows)
    for profile in problem.profiles:
        (kept,) = rehearse(found.graph, partition(flow, ()), blocks, profile.rows).saved
        assert sum(saved.bytes for saved in profile.saved) == kept
        # y [b, 4], kept by the matmul, and the softmax [b, b].
        assert kept == 4 * (4 * profile.rows + profile.rows**2)


class Mixes(nn.Module):
    """Mixes features by shares that its weight makes, which are kept, as many at any rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return torch.tanh(x @ self.weight.softmax(-1))


def test_no_level_drops_more_than_is_kept():
    """A gathered weight, whose bytes do not grow with the rows, was taken to: a DeepSeek-V3 on
    tensor-parallel ranks had fewer than no activations."""
    model = nn.Sequential(*(Mixes() for _ in range(4)), nn.Linear(64, 1))
    found = trace_model(model, lambda b: {"input": torch.randn(b, 64)}, lambda out, _: out.mean())
    flow, blocks = analyse(found.graph), find_blocks(found.graph)
    scarce = machine(4, 2**12)
    problem, _ = problem_on(scarce, flow, blocks, find_units(flow), batch=64, rows=(1, 8, 64))
    first, *_, last = problem.profiles
    for profile in (first, last):
        dropped = sum(max(level.dropped for level in levels) for levels in profile.levels)
        assert 0.9 * 4 * 4 * 64 * 64 < dropped < sum(kept.bytes for kept in profile.saved)
