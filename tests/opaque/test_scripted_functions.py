"""Functions that torch.jit has compiled are traced op by op, called before or not."""

import warnings

import pytest
import torch
from torch import Tensor

from tests.support.odd_models import Net, built, traced, unlike_whole_or_cut


def clamped(hidden: Tensor, bound: float) -> Tensor:
    return (hidden / bound).tanh() * bound


def clamped_again(hidden: Tensor, bound: float) -> Tensor:
    return (hidden / bound).tanh() * bound


def by_rows(hidden: Tensor) -> Tensor:
    return hidden.view(hidden.size(0), 2, 4).transpose(1, 2).reshape(hidden.size(0), 8)


def positive_or_not(hidden: Tensor) -> Tensor:
    return hidden.exp() if hidden.sum() > 0 else hidden.sin()


def compiled(by, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, branches are traced as taken
        return by(*args)


def called(function, *args):
    """After two calls with a gradient torch.jit runs a graph of its own."""
    for _ in range(4):
        function(torch.ones(2, 8, requires_grad=True), *args).sum().backward()
    return function


class Scripted(Net):
    function = staticmethod(compiled(torch.jit.script, clamped))

    def inside(self, hidden):
        return self.function(self.middle(hidden), 3.0) + hidden


class CalledBefore(Scripted):
    function = staticmethod(called(compiled(torch.jit.script, clamped_again), 3.0))


class OfSizes(Net):
    function = staticmethod(compiled(torch.jit.script, by_rows))

    def inside(self, hidden):
        return self.function(self.middle(hidden))


class Traced(OfSizes):
    """By an example whose sum is positive; its Python would take the sine of other rows."""

    function = staticmethod(compiled(torch.jit.trace, positive_or_not, torch.ones(2, 8)))


class TracedAndCalledBefore(OfSizes):
    function = staticmethod(called(compiled(torch.jit.trace, positive_or_not, torch.ones(2, 8))))


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("kind", [Scripted, CalledBefore, OfSizes, Traced, TracedAndCalledBefore])
def test_its_ops_are_in_the_graph(kind):
    """Bug: of a function that was called before, a graph without its gradients was traced, which
    only a comparison with the model told, and of a large model there is none."""
    trace = traced(kind)
    assert not trace.regions
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []
