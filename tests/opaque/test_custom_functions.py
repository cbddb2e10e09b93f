"""A custom autograd.Function is one op of the graph, and its own backward runs."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopipe.errors import CaptureError, Uncaptured
from autopipe.ir.dataflow import is_random
from autopipe.opaque.custom_functions import as_ops
from autopipe.planners.driver import against_eager
from tests.support.autograd_functions import Double, HalfOfExp
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    refusal,
    square,
    traced,
    unlike,
    unlike_whole_or_cut,
)
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


class Adversary(Net):
    def inside(self, hidden):
        return Reversed.apply(self.middle(hidden), 0.5)


class Straight(Net):
    def inside(self, hidden):
        return Double.apply(self.middle(hidden))


class Several(Net):
    def inside(self, hidden):
        made, signs = TwoOfThem.apply(hidden, 3.0, self.middle.bias)
        return HalfOfExp.apply(self.middle(made).tanh()) + signs


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


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize(
    "kind", [Adversary, Straight, Several, WithSettings, WithoutGradient, Reentrant]
)
def test_its_own_backward_runs(kind):
    """Bug: torch.export traces the forward and differentiates that; Double says 7, and not 2."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


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


class GivesMore(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x, 3, None

    @staticmethod
    def backward(ctx, gradient, *_):
        return 7 * gradient


class InPlace(Net):
    def inside(self, hidden):
        return Written.apply(self.middle(hidden))


class WithAFunction(Net):
    """As checkpoints by hand are, which diffusion models carry with them."""

    def inside(self, hidden):
        return Called.apply(hidden, self.middle.forward)


class WithRows(Net):
    def inside(self, hidden):
        return Reversed.apply(self.middle(hidden), hidden.shape[0])


class WithMore(Net):
    def inside(self, hidden):
        made, by, _ = GivesMore.apply(self.middle(hidden))
        return made / by


class AroundIt(Net):
    """The class stands in forward, and its backward has a tensor of it."""

    def inside(self, hidden):
        scale = hidden.detach().sigmoid()

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 1 * x

            @staticmethod
            def backward(ctx, gradient):
                return gradient * scale

        return Scaled.apply(hidden)


AS_IT_IS = {
    InPlace: "Written, a custom autograd.Function, writes its input in place; ",
    WithAFunction: "Called, a custom autograd.Function, is given a method; ",
    WithRows: "Reversed, a custom autograd.Function, is given a SymInt; ",
    WithMore: "GivesMore, a custom autograd.Function, gives something that is no tensor; ",
    AroundIt: "Scaled, a custom autograd.Function, reads a tensor or a module of the code around ",
}


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("kind", AS_IT_IS, ids=lambda kind: kind.__name__)
def test_what_would_hide_something_in_the_op_runs_as_it_is(kind):
    """Bug: all were refused, and `AroundIt` ended in a traceback. A parameter in a method that it
    is given, the rows of the trace, a write that nobody sees."""
    before = torch.autograd.Function.__dict__.get("apply")
    (region,) = traced(kind).regions
    assert region.name in ("inside()", "inside_lines_2_to_2()")
    assert AS_IT_IS[kind] in region.why
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []
    assert torch.autograd.Function.__dict__.get("apply") is before
    assert Double.apply(torch.ones(1)).item() == 2


class CountsInBackward(Net):
    """Its forward makes the same calls each time."""

    def begin(self):
        self.share = 1.0

    def inside(self, hidden):
        self.share *= 0.5

        class Shared(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 1 * x

            @staticmethod
            def backward(ctx, gradient):
                return gradient * self.share

        return Shared.apply(hidden)


def test_a_backward_that_reads_what_forward_counts_is_refused():
    """Under 1F1B a stage's second forward comes before its first backward, which would read it."""
    with pytest.raises(CaptureError, match="the model keeps share from one call to the next"):
        trace_model(built(CountsInBackward), inputs, square)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class Noisy(Net):
    def inside(self, hidden):
        return self.middle(Noise.apply(hidden))


def test_one_that_draws_random_numbers_has_a_stream_of_its_own():
    """Bug: it drew from the process's generator: other numbers on each tensor-parallel rank, and
    others when a block runs again in backward."""
    graph = trace_model(built(Noisy), inputs, square).graph
    (node,) = (node for node in graph.nodes if node.short == "function")
    assert is_random(node)
    quiet = trace_model(built(Adversary), inputs, square).graph
    assert not any(map(is_random, quiet.nodes))


class KeepsGradients(torch.autograd.Function):
    """Its backward keeps the mean of gradients in a buffer, by which the next forward divides."""

    @staticmethod
    def forward(ctx, x, mean):
        ctx.mean = mean
        return x / (1 + mean)

    @staticmethod
    def backward(ctx, gradient):
        ctx.mean.add_(gradient.abs().mean())
        return gradient, None


class ByLastGradients(Net):
    def begin(self):
        self.register_buffer("mean", torch.zeros(()))

    def inside(self, hidden):
        return KeepsGradients.apply(self.middle(hidden), self.mean)


def test_a_backward_that_writes_a_buffer_is_refused():
    """Bug: two micro-batches had gone forward before the first backward, and nobody said so."""
    with pytest.raises(CaptureError, match="KeepsGradients writes a tensor that its forward is gi"):
        trace_model(built(ByLastGradients), inputs, square)


class ByStrength(torch.autograd.Function):
    strength = 1.0

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ByStrength.strength


class Anneals(Net):
    def inside(self, hidden):
        ByStrength.strength += 1
        return ByStrength.apply(self.middle(hidden))


def test_a_number_that_only_backward_reads_is_part_of_the_call(monkeypatch):
    """Bug: forward made the same calls each time, so the strength of the first one was kept."""
    monkeypatch.setattr(against_eager, "MOST_BYTES", 0)
    assert "the model keeps ByStrength.strength from one call to the" in refusal(built(Anneals))


class HookedWhereValuesAreRead(Net):
    """A part with a backward hook, which runs as it is, in a model whose values Python reads."""

    def begin(self):
        self.middle.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))

    def inside(self, hidden):
        hidden = self.middle(hidden)
        return hidden if hidden.abs().max() < 1e6 else hidden / 2


class Normalised(Net):
    """A Function of torch's own, which it applies in Python."""

    def inside(self, hidden):
        return nn.CrossMapLRN2d(3)(self.middle(hidden)[:, :, None, None])[:, :, 0, 0]


@pytest.mark.parametrize(
    "kind", chosen([HookedWhereValuesAreRead, Normalised], now=(HookedWhereValuesAreRead,))
)
def test_functions_that_torch_applies(kind):
    """Bugs: the hook was said to be one on every module; torch's own was "not for one process"."""
    assert unlike(built(kind)) == []


class Mixed(Net):
    """Mixup: of each micro-batch a share is drawn by Beta, whose Function is torch's own."""

    def inside(self, hidden):
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return share * hidden + (1 - share) * self.middle(hidden)


def test_a_draw_of_beta_has_a_stream_of_its_own():
    """Bug: it was refused as what is for several processes."""
    graph = trace_model(built(Mixed), inputs, square).graph
    (drawn,) = (node for node in graph.nodes if is_random(node))
    assert drawn.op == "autopipe.function.default"


SCALES = {"of": 1.0}


class ByASetting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        ctx.scale = SCALES["of"]
        return hidden * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


class SetsIt(Net):
    def inside(self, hidden):
        SCALES["of"] = 2.0
        hidden = ByASetting.apply(self.middle(hidden))
        SCALES["of"] = 1.0
        return hidden


def test_a_setting_that_forward_sets_for_a_function_is_refused():
    """Bug: a large model was trained by what a rank has there, where nothing sets it."""
    words = "ByASetting, [^\n]* reads SCALES, which forward sets to {'of': 2.0} from {'of': 1.0}"
    with pytest.raises(CaptureError, match=words):
        trace_model(built(SetsIt), inputs, square)


def reversing_more_and_more():
    """A reversal by a variable around its class, which forward counts up."""
    by = 0.0

    class Reversing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -by * gradient

    class Counting(Net):
        def inside(self, hidden):
            nonlocal by
            by += 0.5
            return Reversing.apply(self.middle(hidden))

    return built(Counting)


def test_a_variable_around_a_function_that_forward_counts_up_is_refused(monkeypatch):
    """Bug: a large model was trained by what it was at first, for no rank counts it up."""
    monkeypatch.setattr(against_eager, "MOST_FLOPS", 0)
    said = refusal(reversing_more_and_more())
    assert "the model keeps reversing_more_and_more.<locals>.Counting.inside from one call" in said


def rounded(bits):
    """A straight-through rounding to so many bits, by a class of its own."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return (x * 2**bits).round() / 2**bits

        @staticmethod
        def backward(ctx, gradient):
            return gradient * bits

    return Rounded


class RoundedTwice(Net):
    def begin(self):
        self.fine, self.coarse = rounded(8), rounded(2)

    def inside(self, hidden):
        return self.coarse.apply(self.middle(self.fine.apply(hidden)))


def test_two_functions_of_one_name_differ_by_the_numbers_around_them():
    assert unlike(built(RoundedTwice)) == []
    calls = [node.args[1] for node in traced(RoundedTwice).graph.nodes if "autopipe" in node.op]
    assert [call.rpartition("(")[2] for call in calls] == ["_, bits=8)", "_, bits=2)"]


def shifted(by):
    """It adds a number of which one branch of the code alone would know."""
    if by is not None:
        most = by + 1

    class Shifted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2 if by is None else x.clamp(max=most)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3

    return Shifted


class Shifts(Net):
    def inside(self, hidden):
        return shifted(None).apply(self.middle(hidden))


def test_a_variable_around_a_function_may_have_no_value():
    """Bug: planning ended in a ValueError of Python's: "Cell is empty"."""
    assert unlike(built(Shifts)) == []


def bent(bend):
    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return bend(x)

        @staticmethod
        def backward(ctx, gradient):
            return Bent.apply(gradient)

    return Bent


def test_one_of_another_model_that_has_its_name_but_not_its_code_is_no_op():
    """Bug: where one process had traced both models, the first ran the second's Function."""
    x = torch.ones(2)
    for _ in range(2):  # in a second trace the class is another one
        with as_ops():
            assert torch.equal(bent(torch.sin).apply(x), x.sin())
    for other in (torch.cos, lambda x: x.sin()):
        with as_ops(), pytest.raises(Uncaptured, match="Bent, .* is one of two of that name"):
            bent(other).apply(x)


BENT = """
import torch
class Config:
    name = "sin"
def bent(config):
    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return getattr(x, config.name)()
        @staticmethod
        def backward(ctx, gradient): return gradient
    return Bent
Bent = bent(Config())
"""


def test_one_of_a_notebook_s_cell_that_runs_again_stays_an_op():
    """Other lines stand above it by then, and the classes that it reads are made again."""
    x = torch.ones(2)
    for above in ("", "\n"):
        cell = {"__name__": "cell"}
        exec(above + BENT, cell)
        with as_ops():
            assert torch.equal(cell["Bent"].apply(x), x.sin())
