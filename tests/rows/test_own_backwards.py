"""Planning names a custom Function whose gradients are no shares of the whole batch's."""

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from autopipe.rows import own_backwards
from tests.support.autograd_functions import Double
from tests.support.odd_models import Net, built, inputs, square
from tests.support.staged import trace_model


class Penalty(torch.autograd.Function):
    """As RWKV's: its gradient of the outputs has nothing of the one that it is given."""

    @staticmethod
    def forward(ctx, loss, outputs):
        ctx.save_for_backward(outputs)
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        (outputs,) = ctx.saved_tensors
        return gradient, 1e-4 * outputs


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.1, 0.1)


class Rounded(torch.autograd.Function):
    """A straight-through estimator, and an index without a gradient."""

    @staticmethod
    def forward(ctx, hidden, index):
        return hidden.round() + index

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ByTheLastForward(torch.autograd.Function):
    """Its backward scales by the mean of the rows whose forward has run last."""

    mean = 1.0

    @staticmethod
    def forward(ctx, hidden):
        ByTheLastForward.mean = hidden.abs().mean()
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ByTheLastForward.mean


class ByItsOwnForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        ctx.mean = hidden.abs().mean()
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mean


class Raises(torch.autograd.Function):
    """Not on the model's numbers: those are positive."""

    @staticmethod
    def forward(ctx, hidden):
        assert bool((hidden >= 0).all())
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Of(Net):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def inside(self, hidden):
        return self.function(self.middle(hidden).abs())


def graph_of(function):
    return trace_model(built(lambda: Of(function)), inputs, square).graph


def test_a_backward_that_reads_what_the_last_forward_has_kept_is_refused():
    """Bug: in a pipeline forward has run on later micro-batches by then; gradients were theirs."""
    with pytest.raises(CaptureError, match="the backward of ByTheLastForward computes with what"):
        own_backwards.check(graph_of(ByTheLastForward.apply))
    own_backwards.check(graph_of(ByItsOwnForward.apply))


def remark(function, loss=square):
    return own_backwards.remark(trace_model(built(lambda: Of(function)), inputs, loss).graph)


def penalized(outputs, batch):
    return Penalty.apply(square(outputs, batch), outputs)


def test_a_gradient_that_does_not_scale_is_named():
    assert "the backward of Penalty does not scale" in remark(lambda hidden: hidden, penalized)
    assert "the backward of Clipped does not scale" in remark(Clipped.apply)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    "function",
    [Double.apply, lambda hidden: Rounded.apply(hidden, torch.arange(8)), Raises.apply],
)
def test_one_that_does_is_not(function):
    assert remark(function) is None


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_divides_by_how_often_a_word_occurs(kind):
    """Bug: micro-batches gave another gradient than the batch, and nothing said so."""

    class Words(nn.Module):
        def __init__(self, by_frequency):
            super().__init__()
            self.words = kind(5, 4, scale_grad_by_freq=by_frequency)

        def forward(self, x):
            return self.words(x).square().mean()

    def remark_of(by_frequency):
        def batch(rows):
            return {"x": torch.arange(rows * 6).view(rows, 6) % 5}

        return own_backwards.remark(trace_model(Words(by_frequency), batch).graph)

    assert remark_of(False) is None
    assert "scale_grad_by_freq divides a word's gradient by how often its own" in remark_of(True)


def test_micro_batches_sum_to_another_gradient():
    """The reason for the line: m micro-batches add m times what Penalty adds."""
    outputs = torch.randn(4, 3)

    def gradient(parts):
        leaf = outputs.clone().requires_grad_()
        for part in leaf.chunk(parts):
            (Penalty.apply(part.square().mean(), part) / parts).backward()
        return leaf.grad

    whole, halves = gradient(1), gradient(2)
    plain = outputs / 6
    torch.testing.assert_close(whole - plain, 1e-4 * outputs)
    torch.testing.assert_close(halves - plain, 1e-4 * outputs)


class ByChance(torch.autograd.Function):
    """Its backward rounds up or down by chance."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.rand_like(gradient) < 0.5)


class OfNothingToo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, empty):
        ctx.save_for_backward(empty)
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        (empty,) = ctx.saved_tensors
        return gradient, torch.zeros_like(empty)


def test_chance_and_empty_tensors_are_no_reason():
    """Bug: the largest entry of an empty gradient was asked for."""
    assert remark(ByChance.apply) is None
    assert remark(lambda hidden: OfNothingToo.apply(hidden, hidden[:, :0])) is None
