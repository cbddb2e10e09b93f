"""The planner's problem beside what rehearsals and graphs say of the same cuts."""

import itertools
import random

import pytest
import torch
from torch import nn

from autopipe import cost
from autopipe.blocks import find_blocks
from autopipe.dataflow import analyse
from autopipe.estimate import tables
from autopipe.graph import bytes_at
from autopipe.partition import legal_cuts, partition
from autopipe.problem import Constraints
from autopipe.profile import Units, build_problem, find_units
from autopipe.rehearsal import rehearse
from tests.inprocess import machine, traced
from tests.staged import trace_model
from tests.zoo import ZOO

CLUSTER = machine(4)


def problem_of(name, *, at_least=8, rows=(1, 2, 4), batch=8, **how):
    found, flow, blocks = traced(name)
    units = find_units(flow, blocks, at_least)
    return units, build_problem(
        flow,
        blocks,
        units,
        CLUSTER,
        batch=batch,
        rows=rows,
        optimizer_factor=2.0,
        window=2,
        constraints=Constraints(),
        **how,
    )


def ranges_of(units, chance, stages):
    cuts = sorted(chance.sample(range(1, len(units.starts)), stages - 1))
    return list(itertools.pairwise([0, *cuts, len(units.starts)]))


@pytest.mark.parametrize("name", list(ZOO))
def test_saved_and_crossing_bytes_are_those_of_a_rehearsal_of_the_same_cuts(name):
    """To the byte, for any cuts between units: what the planner adds up is what a run keeps."""
    as_rehearsed(name)


@pytest.mark.parametrize("name", ["gpt", "unet", "resnet", "llama", "frozen", "t5"])
def test_in_low_precision_too(name):
    """Matrix products are made in bf16, and so are what of theirs is kept and what crosses."""
    as_rehearsed(name, precision="bf16")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_where_blocks_run_again_they_keep_their_arguments(name, precision):
    again = [block.path for block in traced(name)[2]]
    as_rehearsed(name, precision=precision, recompute=again)


def as_rehearsed(name, **how):
    found, flow, blocks = traced(name)
    units, problem = problem_of(name, **how)
    chance = random.Random(name)
    for profile, stages in itertools.product(problem.profiles, (1, 2, 4)):
        ranges = ranges_of(units, chance, stages)
        parts = partition(flow, [units.starts[first] for first, _ in ranges[1:]])
        rehearsal = rehearse(found.graph, parts, blocks, profile.rows, **how)
        table = tables(problem, profile)
        boundaries = rehearsal.boundaries
        for stage, (first, end) in zip(parts, ranges, strict=True):
            where = f"stage {stage.index} of {[units.starts[i] for i, _ in ranges]}"
            assert table.saved[first, end] == rehearsal.saved[stage.index], where
            received = sum(boundaries[ref].bytes for ref, _ in stage.receives)
            assert table.received[first, end] == received, where
            assert table.sent[first, end] == sum(boundaries[r].bytes for r in stage.outgoing), where
            back = [ref for ref, _ in stage.receives if stage.index in boundaries[ref].gradients]
            returned = sum(boundaries[ref].bytes for ref in back)
            assert table.received_gradient[first, end] == returned, where


@pytest.mark.parametrize("name", ["gpt2", "unet", "frozen"])
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
        assert table.constants[first, end] == sum(sizes.values()) - trainable


def test_seconds_of_a_unit_are_the_sum_of_its_nodes():
    found, _, _ = traced("gpt")
    units, problem = problem_of("gpt")
    forward, backward = cost.seconds(cost.costs(found.graph), 2, CLUSTER.slowest_device)
    profile = problem.profiles[1]
    assert profile.rows == 2
    assert sum(profile.forward) == pytest.approx(forward.sum())
    assert sum(profile.backward) == pytest.approx(backward.sum())
    second = slice(units.starts[1], units.starts[2])
    assert profile.forward[1] == pytest.approx(forward[second].sum())


def test_what_runs_again_takes_its_forwards_seconds_once_more():
    found, _, blocks = traced("gpt")
    units, usual = problem_of("gpt")
    _, again = problem_of("gpt", recompute=[blocks[1].path])
    forward, _ = cost.seconds(cost.costs(found.graph), 2, CLUSTER.slowest_device)
    before, after = usual.profiles[1], again.profiles[1]
    assert after.forward == before.forward
    more = [a - b for a, b in zip(after.backward, before.backward, strict=True)]
    assert sum(more) == pytest.approx(forward[blocks[1].first : blocks[1].stop].sum())
    inside = range(units.of(blocks[1].first), units.of(blocks[1].stop - 1) + 1)
    assert all((seconds > 0) == (unit in inside) for unit, seconds in enumerate(more))


def test_matrix_products_run_at_the_rate_of_their_precision():
    """At 2e10 operations a second in place of 1e10; what else a step does takes what it took."""
    _, usual = problem_of("gpt")
    _, low = problem_of("gpt", precision="bf16")
    for before, after in zip(usual.profiles, low.profiles, strict=True):
        assert sum(before.forward) / 2 < sum(after.forward) < sum(before.forward)
        assert sum(before.backward) / 2 < sum(after.backward) < sum(before.backward)


def test_the_problem_knows_how_parameters_are_held():
    assert [problem_of("gpt", zero=zero)[1].zero for zero in (0, 1, 3)] == [0, 1, 3]


def test_the_problem_is_of_the_cluster_and_of_what_was_asked():
    _, problem = problem_of("gpt")
    assert (problem.devices, problem.memory, problem.batch, problem.window) == (4, 2**30, 8, 2)
    assert (problem.latency, problem.bandwidth) == (1e-4, 1e9)
    assert [profile.rows for profile in problem.profiles] == [1, 2, 4]
    assert problem.units == len(problem.profiles[0].forward)


def test_blocks_are_ranges_of_units():
    _, _, blocks = traced("gpt")
    units, problem = problem_of("gpt")
    assert len(problem.blocks) == 4
    for block, (first, end) in zip(blocks, problem.blocks, strict=True):
        assert units.starts[first] == block.first
        assert end == len(units.starts) or units.starts[end] >= block.stop


# Units.


@pytest.mark.parametrize("name", list(ZOO))
def test_every_unit_begins_at_a_legal_cut_and_has_something_to_train(name):
    _, flow, _ = traced(name)
    units = find_units(flow)
    assert set(units.starts[1:]) <= set(legal_cuts(flow))
    trained = {
        units.of(position)
        for state, found in flow.graph.states.items()
        if found.trainable
        for position in flow.users[next(v for v in flow.users if str(v) == f"[{state}]")][:1]
    }
    assert trained == set(range(len(units.starts)))


def test_more_units_are_made_only_when_asked_for():
    _, flow, _ = traced("lstm")
    few = find_units(flow)
    assert len(few.starts) < 6
    more = find_units(flow, at_least=6)
    assert len(more.starts) == 6 and set(few.starts) < set(more.starts)
    every = find_units(flow, at_least=1000)
    assert every.starts == (0, *legal_cuts(flow))


@pytest.mark.parametrize("most", [2, 5, 10])
def test_a_deep_model_has_no_more_units_than_a_planner_can_take(most):
    _, flow, _ = traced("gpt2")
    units = find_units(flow, most=most)
    assert 1 < len(units.starts) <= most


def test_a_position_is_in_the_unit_that_begins_before_it():
    units = Units((0, 4, 9))
    assert [units.of(p) for p in (0, 3, 4, 8, 9, 100)] == [0, 0, 1, 1, 2, 2]


class Widths(nn.Module):
    """8 wide, then 2, then 8: the narrow place is where a cut belongs."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x):
        narrow = self.down(x.tanh())
        return self.up(torch.tanh(narrow.repeat(1, 4))).mean()


def test_a_unit_ends_where_the_fewest_bytes_cross():
    found = trace_model(Widths(), lambda b: {"x": torch.ones(b, 8)})
    units = find_units(analyse(found.graph))
    assert [found.graph.nodes[p].name for p in units.starts[1:]] == ["repeat/0"]


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "resnet"])
def test_of_equally_narrow_places_the_beginning_of_a_block_is_taken(name):
    """Before gpt's block 0 stands a dropout, and the one tensor crosses before and after it."""
    _, flow, blocks = traced(name)
    assert {block.first for block in blocks} <= set(find_units(flow, blocks).starts)


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
    problem = build_problem(
        flow,
        blocks,
        find_units(flow),
        CLUSTER,
        batch=16,
        rows=(1, 2, 4, 8, 16),
        optimizer_factor=2.0,
        window=2,
        constraints=Constraints(),
    )
    for profile in problem.profiles:
        (kept,) = rehearse(found.graph, partition(flow, ()), blocks, profile.rows).saved
        assert sum(saved.bytes for saved in profile.saved) == kept
        # y [b, 4], kept by the matmul, and the softmax [b, b].
        assert kept == 4 * (4 * profile.rows + profile.rows**2)
