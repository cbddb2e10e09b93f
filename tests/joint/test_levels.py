"""The levels of a block: golden cases, and brute force over all that could run again."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.joint import least_cut
from autopipe.joint.joint_graph import Layout, differentiate
from autopipe.joint.least_cut import FREE
from autopipe.joint.levels import hull
from autopipe.joint.run_again import is_cheap, networks
from autopipe.joint.split_backward import needed
from autopipe.stages.lower import Lowered

ROWS, WIDTH, FLOAT = 16, 8, 4
TENSOR = ROWS * WIDTH * FLOAT
SCORES = ROWS * ROWS * FLOAT


class Block(nn.Module):
    """`run(self, x)` is what the block does."""

    def __init__(self, run):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.run = run

    def forward(self, x):
        return (self.run(self, x),)


def gated(m, x):
    return m.three(nn.functional.silu(m.one(x)) * m.two(x))


def attention(m, x):
    q, k, v = m.one(x), m.two(x), m.three(x)
    return torch.softmax(q @ k.T, -1) @ v


def normed_twice(m, x):
    y = x + m.two(nn.functional.gelu(m.one(m.norm(x))))
    return y + m.three(m.norm(y))


RUNS = gated, attention, normed_twice


def network_of(run, *, least):
    """The block's network, of which each call is a group of its own, and the names of the calls."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    layouts = [Layout.of(x)], [Layout.of(x.detach())]
    joint = differentiate(Lowered(None, Block(run), ROWS), *layouts)
    numbers = {call: number for number, call in enumerate(joint.forward)}

    def price(call):
        return FREE if least and is_cheap(call) else numbers[call]

    ((_, network, _),) = networks(joint, needed(joint), price)
    return network, {number: name_of(call.target) for call, number in numbers.items()}


def name_of(target):
    return getattr(target, "overloadpacket", target).__name__


def seconds_of(network, names):
    """A second for what moves memory, ten for a product."""
    return {group: 10.0 if names[group] in ("mm", "addmm") else 1.0 for group in network.groups}


def told(run, *, least):
    """Of each level bytes kept, seconds, and the names of what runs again."""
    network, names = network_of(run, least=least)
    found = hull(network, seconds_of(network, names), lambda _: False)
    return [(one.kept, one.seconds, sorted(names[g] for g in one.again)) for one in found]


def test_a_gate_runs_again_before_products_do():
    """As autograd keeps it: both factors, silu's result, their product, which the last one reads.
    The gate alone gives back two of them for two seconds; then a product gives back one for ten."""
    assert told(gated, least=False) == [
        (4 * TENSOR, 0, []),
        (2 * TENSOR, 2, ["mul", "silu"]),
        (0, 22, ["addmm", "addmm", "mul", "silu"]),
    ]


def test_a_compiled_block_has_run_the_gate_again_already():
    assert told(gated, least=True) == [
        (2 * TENSOR, 0, []),
        (0, 20, ["addmm", "addmm"]),
    ]


def test_attention_whose_probabilities_run_again():
    """q, k, v and the probabilities are kept. Softmax cannot run again without the scores, so that
    the product that makes them does too: selective recomputation, by Korthikanti et al."""
    assert told(attention, least=True) == [
        (3 * TENSOR + SCORES, 0, []),
        (3 * TENSOR, 10, ["mm"]),
        (0, 40, ["addmm", "addmm", "addmm", "mm"]),
    ]


@pytest.mark.parametrize("least", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_levels_are_the_hull_of_all_choices(run, least):
    """Of every set of calls that might run again its seconds and the least bytes kept. No set lies
    below a line between two levels, nor keeps less than the last one."""
    network, names = network_of(run, least=least)
    seconds = seconds_of(network, names)
    levels = hull(network, seconds, lambda _: False)
    groups = sorted(network.groups)
    assert len(groups) <= 12
    sets = chain.from_iterable(combinations(groups, size) for size in range(len(groups) + 1))
    points = [
        (sum(seconds[g] for g in some), network.least(dict.fromkeys(some, 0.0)).bytes)
        for some in sets
    ]
    assert levels[0].kept == points[0][1] and levels[0].seconds == 0
    assert levels[-1].kept == min(kept for _, kept in points)
    assert {(level.seconds, level.kept) for level in levels} <= {*points}
    for before, after in zip(levels, levels[1:], strict=False):
        slope = (after.kept - before.kept) / (after.seconds - before.seconds)
        assert slope < 0
        for time, kept in points:
            assert kept >= before.kept + slope * (time - before.seconds) - 1e-6


def test_flows_are_asked_for_by_numbers_of_32_bits(monkeypatch):
    """scipy before 1.15 stops at longer ones: `Buffer dtype mismatch, expected 'ITYPE_t'`."""
    asked = []

    def maximum_flow(network, *ends):
        asked.append((network.indices.dtype, network.indptr.dtype))
        return flow(network, *ends)

    flow = least_cut.maximum_flow
    monkeypatch.setattr(least_cut, "maximum_flow", maximum_flow)
    told(gated, least=True)
    assert asked and {*asked} == {(np.dtype(np.int32),) * 2}
