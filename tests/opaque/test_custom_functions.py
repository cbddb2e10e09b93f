"""A custom autograd.Function is one op of the graph, and its own backward runs."""

import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopipe.errors import CaptureError
from tests.support.autograd_functions import Double
from tests.support.odd_models import Net, built, inputs, square, unlike
from tests.support.staged import trace_model


class Reversed(torch.autograd.Function):
    """Gradient reversal, as adversarial training has it."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.by * gradient, None


class TwoOfThem(torch.autograd.Function):
    """Two results of two tensors with a number between; saves, and one result has no gradient."""

    @staticmethod
    def forward(ctx, x, by, weight):
        ctx.save_for_backward(x, weight)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return by * x * weight, signs

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight = ctx.saved_tensors
        return gradient * weight, None, (gradient * x).sum(0) * 5


class Configured(torch.autograd.Function):
    """Takes a dict of settings, as YOSO has it."""

    @staticmethod
    def forward(ctx, x, settings):
        ctx.by = settings["by"]
        return x.exp() * ctx.by

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.by, None


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (made,) = ctx.saved_tensors
        return gradient * made / 2


class Adversary(Net):
    def inside(self, hidden):
        return Reversed.apply(self.middle(hidden), 0.5)


class Straight(Net):
    def inside(self, hidden):
        return Double.apply(self.middle(hidden))


class Several(Net):
    def inside(self, hidden):
        made, signs = TwoOfThem.apply(hidden, 3.0, self.middle.bias)
        return WithSetup.apply(self.middle(made).tanh()) + signs


class Reentrant(Net):
    """A checkpoint whose backward is torch's own Function, which runs the code again."""

    def inside(self, hidden):
        made = checkpoint(lambda h: self.middle(h).tanh(), hidden, use_reentrant=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # its results have no gradient
            return made + checkpoint(self.middle, hidden.detach(), use_reentrant=True)


class WithSettings(Net):
    def inside(self, hidden):
        return Configured.apply(self.middle(hidden), {"by": 0.5, "heads": [1, 2]})


class WithoutGradient(Net):
    def inside(self, hidden):
        with torch.no_grad():
            kept = Reversed.apply(self.middle(hidden), 2.0)
        return Reversed.apply(self.middle(hidden), 2.0) + kept


@pytest.mark.parametrize(
    "kind", [Adversary, Straight, Several, WithSettings, WithoutGradient, Reentrant]
)
def test_its_own_backward_runs(kind):
    """Bug: torch.export traces the forward and differentiates that; Double says 7, and not 2."""
    assert unlike(built(kind)) == []
    assert unlike(built(kind), cuts=["relu/1"]) == []


def test_the_graph_says_what_is_applied_and_with_what():
    graph = trace_model(built(Adversary), inputs, square).graph
    (node,) = (node for node in graph.nodes if node.short == "function")
    assert node.args[1] == f"{__name__}.Reversed(_, 0.5)"


def test_layers_that_differ_in_the_number_alone_are_not_taken_for_equal():
    """Their forwards call the same ops; a stub for the second would scale its gradient by 1."""

    class Layer(nn.Module):
        def __init__(self, by):
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 8))
            self.by = by

        def forward(self, x):
            return Reversed.apply(self.layer(x), self.by)

    class Layers(Net):
        def begin(self):
            self.middle = nn.Sequential(Layer(1.0), Layer(2.0), Layer(2.0))

    assert unlike(built(Layers)) == []


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class InPlace(Net):
    def inside(self, hidden):
        return Written.apply(self.middle(hidden))  # here


class WithAFunction(Net):
    def inside(self, hidden):
        return Called.apply(hidden, self.middle)  # here


class WithRows(Net):
    def inside(self, hidden):
        return Reversed.apply(self.middle(hidden), hidden.shape[0])  # here


REFUSED = {
    InPlace: "Written, a custom autograd.Function, writes its input in place; ",
    WithAFunction: "Called, a custom autograd.Function, is given a Linear; ",
    WithRows: "Reversed, a custom autograd.Function, is given a SymInt; ",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_would_hide_something_in_the_op_is_refused_with_its_line(kind):
    """A parameter in a module that it is given, the rows of the trace, a write that nobody sees."""
    before = torch.autograd.Function.__dict__.get("apply")
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CaptureError) as error:
        trace_model(built(kind), inputs, square)
    assert str(error.value).startswith(f"{__file__}:")
    assert f"{__file__}:{line}" in str(error.value) or kind is InPlace
    assert REFUSED[kind] in str(error.value)
    assert torch.autograd.Function.__dict__.get("apply") is before
    assert Double.apply(torch.ones(1)).item() == 2
