"""What a micro-batch holds between the halves of its backward, by the nodes of the whole model."""

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.ir.dataflow import analyse
from autopipe.ir.repeats import shorten
from autopipe.joint.split_backward_layouts import JointDryRun
from autopipe.joint.wanted import Wanted
from autopipe.planners.model.places import waitings
from autopipe.planners.model.problem import Config
from autopipe.planners.saved.observe import observe_saved
from autopipe.schedules.instructions import holders
from autopipe.schedules.registry import between_halves, make, waiting
from tests.support.inprocess import cut
from tests.support.problems import line
from tests.support.staged import trace_model

ROWS, FLOAT = 4, 4


class Layers(nn.Module):
    """tanh(up(x)), [4, 8]; down of it, [4, 2]; tanh; out, [4, 3]."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(2, 3)

    def forward(self, x):
        return self.out(self.down(self.up(x).tanh()).tanh()).sum()


def test_a_chain_worked_by_hand():
    """Between the halves a layer has the gradient of its result beside its input, which stays.

    dz = tanh'(y) dy   of `up` [4, 8] and of `down` [4, 2], made by the first half for dw = dz.t() x
    out                its gradient is a sum's, one number expanded
    """
    short = shorten(analyse(trace_model(Layers(), lambda rows: torch.randn(rows, 6)).graph), ())
    found = observe_saved(short, "fp32", ROWS, compiled=True)
    by = dict(zip([node.name for node in short.graph.nodes], found.waiting.tolist(), strict=True))
    assert {name: size for name, size in by.items() if size} == {
        "tanh/0": ROWS * 8 * FLOAT,
        "tanh/1": ROWS * 2 * FLOAT,
        "sum/0": FLOAT,
    }


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_the_nodes_of_a_stage_hold_what_its_own_halves_hold(name):
    """Of a stage between others, whose halves are made for it alone."""
    found = cut(name, 3)
    halves = JointDryRun(found.graph, found.blocks, found.rows, wanted=Wanted(True, least=True))
    held = halves.instead(found.stages, found.rehearsal)
    exact = held.stash[1] - held.saved[1]
    short = shorten(found.flow, ())
    seen = observe_saved(short, "fp32", found.rows, compiled=True)
    by_nodes = int(sum(seen.waiting[short.like[[*found.stages[1].nodes]]]))
    assert by_nodes == pytest.approx(exact, abs=0.1 * held.saved[1])


class Tied(nn.Module):
    """A table of 64 x 8 that the first node and the last one read."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.second(self.first(self.table(x)).tanh())
        return (hidden.tanh() @ self.table.weight.t()).logsumexp(-1).sum()


def test_the_last_use_of_a_table_hands_its_gradient_over():
    """Bug: each stage between an embedding and a head with its weight was said to hold a gradient
    of it, 1.2 GiB of Gemma 3, since the whole model's backward holds one until both are added."""
    trace = trace_model(Tied(), lambda rows: torch.randint(0, 64, (rows, 5)))
    short = shorten(analyse(trace.graph), ())
    found = observe_saved(short, "fp32", ROWS, compiled=True)
    names = [node.name for node in short.graph.nodes]
    made = dict(zip(names, found.made.tolist(), strict=True))
    assert made["second/linear/0"] < 64 * 8 * FLOAT
    assert max(made.values()) >= 64 * 8 * FLOAT, "where it is made it is there"


def test_stages_of_zb_h1_let_more_micro_batches_wait_the_later_they_are():
    """Of 8 micro-batches on 4 ranks: rank r runs W of micro-batch k behind I of k + r.

    rank 1:    F0 F1 F2 I0 F3 I1 W0 ...     of the 4 in flight two wait when I1 has run
    """
    programs = make("zb-h1", 4, 8)
    assert [waiting(program, rank) for rank, program in enumerate(programs)] == [1, 2, 3, 4]
    assert waiting(make("1f1b", 4, 8)[2], 2) == 0
    assert between_halves("zb-h1", 4, 8) == between_halves("zb-h1", 4, 50) == (1, 2, 3, 4)
    for ranks, chunks, name in ((4, 1, "zb-h1"), (3, 2, "zb-v")):
        programs = make(name, ranks, 40, chunks=chunks)
        every = [waiting(programs[rank], n) for n, rank in enumerate(holders(programs))]
        assert [*between_halves(name, ranks, 40, chunks)] == every, "a few show the pattern of all"
    problem = line((1.0,) * 4, devices=4)
    # The first half of the first stage has nothing to do, and frees nothing.
    assert waitings(problem, Config(4, 1, 4, 0, "zb-h1")) == (0, 2, 3, 4)
    assert waitings(problem, Config(4, 1, 4, 0, "1f1b")) == (0, 0, 0, 0)


def test_bytes_that_wait_are_counted_of_compiled_stages_alone():
    short = shorten(analyse(trace_model(Layers(), lambda rows: torch.randn(rows, 6)).graph), ())
    assert not np.any(observe_saved(short, "fp32", ROWS).waiting)
