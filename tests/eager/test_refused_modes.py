"""Modes that forward enters, and what it asks of torch: a graph does as eager, or there is none."""

import inspect

import pytest
import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.errors import CaptureError
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    square,
    traced,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import trace_model


class Inference(Net):
    def inside(self, hidden):
        with torch.inference_mode():
            scale = self.middle(hidden).norm(dim=1, keepdim=True)
        return self.middle(hidden) / (1 + scale.clone())


class Decorated(Net):
    @torch.inference_mode()
    def scale(self, hidden):
        with torch.inference_mode(False):  # gradients are on again
            trained = self.middle(hidden)
        return self.middle(hidden).norm(), trained

    def inside(self, hidden):
        scale, trained = self.scale(hidden)
        return trained / (1 + scale.clone())


@pytest.mark.parametrize("kind", chosen([Inference, Decorated], now=(Inference,)))
def test_what_is_computed_in_inference_mode_has_no_gradient(kind):
    """Bug: it had one in the graph: gradients up to 11 % off, and large models without a word."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


class AsksTorch(Net):
    """As code does that has a faster way where it is compiled."""

    def inside(self, hidden):
        if is_compiling() or torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return self.middle(hidden) * 3
        return self.middle(hidden)


class AsksDynamo(Net):
    """As code does that was written before torch.compiler had the question."""

    def inside(self, hidden):
        return self.middle(hidden) * (3 if torch._dynamo.is_compiling() else 1)


class Density(Net):
    """From torch 2.15 on a distribution checks its arguments by an op where it is exported."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        return hidden - torch.distributions.Normal(hidden, hidden.exp()).log_prob(2 * hidden)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [AsksTorch, AsksDynamo, Density])
def test_a_trace_has_the_branches_of_eager(kind):
    """Bugs: it had those for compilers, which need not compute the same; then lacked a read."""
    assert unlike(built(kind)) == []


class CompiledWhole(Net):
    """Layers that torch.compile wraps as one graph each, and a function that it decorates."""

    def begin(self):
        self.middle = torch.compile(self.middle, backend="eager", fullgraph=True)
        self.gate = torch.compile(lambda h: h * h.sigmoid(), backend="eager", fullgraph=True)

    def inside(self, hidden):
        return self.gate(self.middle(hidden))


class CompiledInAPart(CompiledWhole):
    def inside(self, hidden):
        rows = (hidden.sum(1) > 0).nonzero().flatten()
        return hidden.index_copy(0, rows, self.middle(hidden[rows])) + self.gate(hidden)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # that dynamo asks for
@pytest.mark.parametrize("kind", chosen([CompiledWhole, CompiledInAPart], now=(CompiledInAPart,)))
def test_what_must_be_compiled_as_a_whole_is_traced_as_it_was(kind):
    """Bug: "the model raises RuntimeError: torch.compile with fullgraph=True found no compiled
    frames ... does model(**inputs(2)) go well by itself?" It does."""
    assert unlike(built(kind)) == []
    assert planned(built(kind)).stages


class Halving(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 0.5 if func is torch.ops.aten.sin.default else made


class UnderAMode(Net):
    def inside(self, hidden):
        with Halving():  # here
            return self.middle(hidden).sin()


class ForwardMode(Net):
    """Bug: a traceback, for the graph had a call that is no op."""

    def inside(self, hidden):
        with forward_ad.dual_level():  # here
            dual = forward_ad.make_dual(self.middle(hidden), torch.ones_like(hidden))
            value, tangent = forward_ad.unpack_dual(dual.sin() * dual)
        return value + tangent


class Applies(Net):
    """Bug: the process died, for the function was called on a tensor without memory."""

    def inside(self, hidden):
        signs = hidden.detach().clone()
        signs.apply_(lambda entry: 1.0 if entry > 0 else 2.0)  # here
        return self.middle(hidden) * signs


AS_THEY_ARE = {
    UnderAMode: "forward runs under Halving, a TorchDispatchMode; what it does to ops is in no "
    "graph",
    ForwardMode: "forward takes derivatives in forward mode, which are in no graph",
    Applies: "a function of Python's computes the elements of a tensor, which no graph has",
}


@pytest.mark.parametrize(
    "kind",
    chosen(AS_THEY_ARE, now=(UnderAMode,)),
    ids=lambda kind: kind.__name__,
)
def test_what_no_trace_sees_runs_as_it_is(kind):
    (region,) = traced(kind).regions
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    assert (region.method, region.why) == ("inside", f"{__file__}:{line}: {AS_THEY_ARE[kind]}")
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []


class ReadsTheLastGradient(Net):
    """Keeps an activation, and reads its gradient in the next call."""

    def begin(self):
        self.last = None

    def inside(self, hidden):
        hidden = self.middle(hidden)
        scale = 1.0 if self.last is None or self.last.grad is None else self.last.grad.norm()
        if hidden.requires_grad:
            hidden.retain_grad()
        self.last = hidden
        return hidden * scale


def test_a_gradient_that_an_activation_was_left_is_not_read():
    """Bug: without a backward there is none: each micro-batch was as the first."""
    with pytest.raises(CaptureError, match="forward reads the gradient of a tensor, which the mic"):
        trace_model(built(ReadsTheLastGradient), inputs, square)


class SameNumbersTwice(Net):
    def inside(self, hidden):
        state = torch.get_rng_state()
        first = F.dropout(self.middle(hidden))
        torch.set_rng_state(state)
        return first - F.dropout(hidden)


class Forked(Net):
    def inside(self, hidden):
        with torch.random.fork_rng(devices=[]):
            first = F.dropout(self.middle(hidden))
        return first - F.dropout(hidden)


@pytest.mark.parametrize("kind", chosen([SameNumbersTwice, Forked], now=(Forked,)))
def test_a_state_of_random_numbers_that_forward_sets(kind):
    """Bug: the two draws were ops of a graph, with a stream each, and were never the same."""
    (region,) = trace_model(built(kind), inputs, square).regions
    assert (region.module, region.method) == ("", "inside")
    assert "sets the state of torch's random numbers" in region.why


class SeededWithin(Net):
    def inside(self, hidden):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.middle(hidden) + torch.randn(8)


def test_a_seed_within_a_fork_is_the_models_own():
    assert unlike(built(SeededWithin)) == []
