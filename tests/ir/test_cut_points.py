"""Where a planner looks for cuts."""

import pytest
import torch
from torch import nn

from autopipe.ir.cut_points import Units, find_units
from autopipe.ir.dataflow import analyse
from autopipe.ir.partition import legal_cuts
from tests.support.inprocess import traced
from tests.support.staged import trace_model
from tests.support.zoo import ZOO


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


@pytest.mark.parametrize("most", [2, 5, 10])
def test_no_two_layers_are_joined_in_a_deep_model(most):
    """128 layers of 8 parameters each, cut at every ninth: some units had one layer, some two, and
    64 equal stages were not to be had (GPT of 1008 B, SC21: a step was 1.5 times too long)."""
    _, flow, blocks = traced("gpt2")
    assert {block.first for block in blocks} <= set(find_units(flow, blocks, most=most).starts)
