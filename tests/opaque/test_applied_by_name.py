"""`double = Double.apply`, as torch's documentation writes it, is the op that `Double.apply` is."""

import pytest
import torch

from tests.support.autograd_functions import Double, HalfOfExp
from tests.support.odd_models import Net, built, traced, unlike_whole_or_cut


class Signs(torch.autograd.Function):
    """Two results, one without a gradient; the backward is not that of the forward."""

    @staticmethod
    def forward(ctx, x, by):
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.by = by
        return by * x, signs

    @staticmethod
    def backward(ctx, gradient, _):
        return 5 * ctx.by * gradient, None


class Quadruple(torch.autograd.Function):
    """Its forward and backward are written by another Function's."""

    @staticmethod
    def forward(ctx, x):
        return Double.forward(ctx, double(x))

    @staticmethod
    def backward(ctx, gradient):
        return Double.backward(ctx, gradient)


double, signs_of, quadruple, exp = Double.apply, Signs.apply, Quadruple.apply, HalfOfExp.apply


class Straight(Net):
    def inside(self, hidden):
        return double(self.middle(hidden))


class Several(Net):
    def inside(self, hidden):
        made, signs = signs_of(self.middle(hidden), 3.0)
        return made * signs


class ByAnother(Net):
    def inside(self, hidden):
        return quadruple(self.middle(hidden))


class WithoutGradient(Net):
    def inside(self, hidden):
        with torch.no_grad():
            kept = double(self.middle(hidden))
        return double(self.middle(hidden)) + kept


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("kind", [Straight, Several, ByAnother, WithoutGradient])
def test_its_own_backward_runs(kind):
    """Bug: the forward was traced and differentiated: 2 where Double says 7, which only a
    comparison with the model told, and of a large model there is none."""
    trace = traced(kind)
    assert not trace.regions and any(node.short == "function" for node in trace.graph.nodes)
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []
    assert double(torch.ones(1)).item() == 2


def test_one_with_a_setup_of_its_own_runs_as_it_is():
    class SetUp(Net):
        def inside(self, hidden):
            return exp(self.middle(hidden).tanh())

    (region,) = traced(SetUp).regions
    assert (
        "HalfOfExp, a custom autograd.Function, is applied by a name that was given" in region.why
    )
    assert unlike_whole_or_cut(built(SetUp), traced=traced(SetUp), cuts=["relu/1"]) == []
