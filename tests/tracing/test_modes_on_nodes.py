"""no_grad and autocast around a part of a model: marks on nodes, which compute as in eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.graph import Autocast
from tests.support.row_graphs import graph_of, mean, node, rows
from tests.support.staged import differences, eager_step, staged_step, trace_model
from tests.support.zoo import Case


class Regions(nn.Module):
    """no_grad within grad within no_grad, and a factor made from a weight inside."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            outer = self.first(x)
            with torch.enable_grad():
                inner = self.second(x)
            scale = self.second.weight.abs().sum()
        return outer + inner * scale


REGIONS = Case(Regions, rows(4), mean)


def test_no_grad_regions_are_marks_on_nodes():
    marks = {n.name: n.grad for n in graph_of(Regions()).nodes}
    assert marks == {
        "first/linear/0": False,
        "second/linear/0": True,
        "abs/0": False,
        "sum/0": False,
        "mul/0": True,
        "add/0": True,
        "loss()/mean/0": True,
    }


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("cuts", [[], ["second/linear/0"], ["abs/0"], ["mul/0"]])
def test_what_no_grad_computes_from_a_weight_carries_no_gradient(cuts):
    found = trace_model(REGIONS.model(), REGIONS.inputs, mean)
    batch = REGIONS.inputs(4)
    split = staged_step(REGIONS.model(), found, batch, cuts, 2)
    assert split.gradients["first.weight"] is None
    assert differences(split, eager_step(REGIONS, found, batch, 2)) == []


class HandedBack(nn.Module):
    """Under no_grad, ops that return their argument as it is, of a value and of a weight; views do
    not, and cut the gradient off. Nothing is trained through what a router only ranks by."""

    def __init__(self):
        super().__init__()
        self.router, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            ranked = (x.to(torch.float32) @ self.second.weight.float()).contiguous()
            order = self.router(F.dropout(ranked, training=False)).argmax(-1, keepdim=True)
            same, part = x.contiguous(), x[:]
        return self.second(x).gather(-1, order) + same * part


def test_what_an_op_hands_back_under_no_grad_keeps_its_gradient():
    """As an indexer of sparse attention casts the layer's input to the dtype that it has."""
    case = Case(HandedBack, rows(4), mean)
    found = trace_model(case.model(), case.inputs, mean)
    ranking = ["matmul/0", "router/linear/0", "argmax/0", "slice/0"]
    assert [n.name for n in found.graph.nodes if not n.grad] == ranking
    whole = eager_step(case, found, case.inputs(4), 2)
    for cuts in ([], ["argmax/0"], ["second/linear/0"]):
        split = staged_step(case.model(), found, case.inputs(4), cuts, 2)
        assert differences(split, whole) == []


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float())
            return self.first(x).float()


MIXED = Case(Mixed, rows(4), mean)


def test_autocast_regions_are_marks_on_nodes():
    graph = graph_of(Mixed())
    low = Autocast("cpu", torch.bfloat16, True)
    assert node(graph, "first/linear/0").autocast == low
    assert node(graph, "second/linear/0").autocast.enabled is False
    assert node(graph, "first@1/linear/0").autocast == low
    assert node(graph, "loss()/mean/0").autocast is None
    assert node(graph, "first/linear/0").outputs[0].dtype is torch.bfloat16


def test_autocast_regions_compute_what_eager_computes():
    found = trace_model(MIXED.model(), MIXED.inputs, mean)
    batch = MIXED.inputs(4)
    split = staged_step(MIXED.model(), found, batch, ["second/linear/0"], 2)
    # first.weight is cast in two stages, so its gradient is rounded to bfloat16 in two parts.
    assert differences(split, eager_step(MIXED, found, batch, 2), tolerance=1e-2) == []
