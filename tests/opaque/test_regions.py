"""What no trace can look into runs as it is, in as small a call as can be, and is one op."""

import copy

import pytest
import torch
from torch import nn

from autopipe.batch.description import describe
from autopipe.frontend.construct import fake_copy
from autopipe.ir.dataflow import analyse
from autopipe.ir.fingerprint import fingerprint
from autopipe.ir.graph import REGION_OP
from autopipe.tracing.trace import trace
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    regions_of,
    square,
    unlike_whole_or_cut,
)
from tests.support.region_models import (
    WORK,
    Buffers,
    CalledFromOutside,
    Experts,
    Layers,
    Mapped,
    MarkedRows,
    ModuleHook,
    Nearest,
    SomeRows,
    Twice,
    Widened,
)
from tests.support.staged import staged_step, trace_model


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize(
    "kind",
    chosen(WORK, now=(SomeRows, Buffers)),
    ids=lambda kind: kind.__name__,
)
def test_it_computes_what_eager_computes(kind):
    """Loss, every gradient and every buffer of three micro-batches, in one stage and in two."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


CALLS = {
    SomeRows: ["inside()"],
    MarkedRows: [],  # torch.where says what it writes
    Nearest: [],
    Widened: ["unequal"],
    ModuleHook: ["middle"],
    CalledFromOutside: ["part", "part.rows"],
    Twice: ["half()", "half()#1"],
    Layers: [f"middle.{n}.chosen()" for n in range(3)],
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("kind", chosen(CALLS, now=(Twice,)), ids=lambda kind: kind.__name__)
def test_it_is_the_smallest_call_that_takes_and_gives_tensors_of_static_sizes(kind):
    assert regions_of(kind) == CALLS[kind]


def test_it_reads_the_experts_that_got_no_row_too():
    traced = trace_model(built(Experts), inputs, square)
    (region,) = traced.regions
    assert {name for name in region.states if name.startswith("experts")} == {
        f"experts.{n}.{leaf}" for n in range(6) for leaf in ("weight", "bias")
    }


def test_models_that_export_whole_have_none():
    assert regions_of(Net) == []


class Codes(nn.Module):
    """Nearest codes, which follow what is near them; the loss and usage stay in attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))
        self.seen = torch.zeros(4)

    def forward(self, hidden):
        near = torch.cdist(hidden.detach(), self.codes).argmin(1)
        one = nn.functional.one_hot(near, 4).to(hidden.dtype)
        found = self.codes[near]
        with torch.no_grad():
            self.codes.lerp_(one.T @ hidden / (one.sum(0)[:, None] + 1), 0.1)
        self.away, self.usage = (hidden - found).square().mean(), one.mean(0)
        return hidden + (found - hidden).detach()


class Quantized(Net):
    def begin(self):
        self.first, self.second = Codes(), Codes()

    def inside(self, hidden):
        hidden = self.second(self.middle(self.first(hidden)))
        return hidden + self.first.away + self.second.away + 0 * self.second.usage.sum()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Experts, Quantized])
def test_a_rank_traces_the_same_graph_from_the_record_alone(kind):
    """It has no weights then: `real` is None. Bug: what a trace had left in attributes, and plain
    tensors within one, could not be copied for a call all of whose states are written."""
    model = built(kind)
    traced = trace_model(model, inputs, square)
    batch = inputs(2)
    specs = describe(batch, inputs(3), 2, 3)
    how = {"reads": traced.reads, "regions": traced.regions}
    again = trace(fake_copy(model), batch, specs, square, **how)
    assert fingerprint(again.graph) == fingerprint(traced.graph)


def test_two_models_with_calls_of_one_name_keep_apart():
    """Their graphs say the same; each runs the code that it was traced from."""

    class Other(Net):
        def inside(self, hidden):
            return torch.vmap(lambda row: 2 * (self.middle.weight @ row) + row.norm())(hidden)

    models = [built(Mapped), built(Other)]
    traces = [trace_model(model, inputs, square) for model in models]
    losses = [
        staged_step(copy.deepcopy(model), traced, inputs(2), (), 1).losses[0]
        for model, traced in zip(models, traces, strict=True)
    ]
    expected = [square(model(inputs(2)["x"]), inputs(2)) for model in models]
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert not torch.equal(*losses)


def test_it_is_not_run_again_in_another_stage_nor_in_backward():
    traced = trace_model(built(Mapped), inputs, square)
    (position,) = [p for p, node in enumerate(traced.graph.nodes) if node.op == REGION_OP]
    assert not analyse(traced.graph).local[position]


def test_a_loss_over_the_whole_batch_runs_it_twice():
    """Bug: the graph of the first pass had no regions, and planning ended in a KeyError."""

    def together(outputs, batch):
        return square(outputs, batch) + outputs.mean(0).square().sum()

    plan = planned(built(SomeRows), together, loss_over="batch", pp=2, micro_batches=2)
    assert plan.loss_over == "batch" and plan.regions
