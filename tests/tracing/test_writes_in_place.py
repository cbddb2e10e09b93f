"""Writes in place, to values, buffers and weights: readers see them, gradients are eager's.

Each of these was once trained on wrong gradients without a word, or refused with a sentence that
led nowhere.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.errors import CaptureError
from autopipe.ir.graph import State
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    square,
    traced,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import trace_model


class Aside(Net):
    """A branch that no result comes of; its statistics are kept all the same."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)
        self.other = nn.InstanceNorm1d(8, track_running_stats=True)

    def inside(self, hidden):
        self.norm(self.middle(hidden))
        self.other(hidden[:, :, None].expand(-1, -1, 3))
        return self.middle(hidden)


def test_running_statistics_are_written_by_a_branch_that_nothing_reads():
    """Bug: only ops whose schemas declare a write were kept, and `batch_norm` declares none.

    Backbones of which one feature map is trained were refused: "another one by its graph".
    """
    assert unlike_whole_or_cut(built(Aside), cuts=["relu/1"]) == []


class Clamped(Net):
    """As flava clamps its temperature, and a Wasserstein GAN's critic its weights."""

    def inside(self, hidden):
        with torch.no_grad():
            self.middle.weight.clamp_(-0.1, 0.1)
        return self.middle(hidden)


class ClampedData(Net):
    """As gemma3n has it; a second time changes nothing, nor does another name of the weight."""

    def inside(self, hidden):
        seen = self.middle.weight.data.clamp_(-0.1, max=0.1)
        hidden = self.middle(hidden)
        self.middle.weight.data.clamp_(-0.1, 0.1)
        return self.middle(hidden) * seen.abs().max()


class Masked(Net):
    """As PixelCNN has it: the taps of its convolutions that would see what is to come."""

    def begin(self):
        self.register_buffer("mask", torch.ones(8, 8).tril())

    def inside(self, hidden):
        self.middle.weight.data *= self.mask
        return self.middle(hidden)


class MaskedAnew(Masked):
    """Another tensor in `.data`, of the same values; one mask for all rows, and no number."""

    def begin(self):
        self.register_buffer("mask", torch.arange(8) % 3 > 0)

    def inside(self, hidden):
        self.middle.weight.data = self.mask * self.middle.weight.data
        return self.middle(hidden)


class FilledByABuffer(MaskedAnew):
    def inside(self, hidden):
        with torch.no_grad():
            self.middle.weight.masked_fill_(self.mask, 0.0)
        return self.middle(hidden)


class ClampedAnew(Net):
    def inside(self, hidden):
        self.middle.weight.data = self.middle.weight.detach().clamp(-0.1, 0.1)
        return self.middle(hidden)


class Renormed(Net):
    """As EEGNet has it: no filter's norm is more than so much."""

    def inside(self, hidden):
        weight = self.middle.weight
        weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.5)
        return self.middle(hidden)


class Normalized(Net):
    """As SwAV has it: each prototype is of length 1."""

    def inside(self, hidden):
        with torch.no_grad():
            weight = self.middle.weight.data.clone()
            self.middle.weight.copy_(nn.functional.normalize(weight, dim=1, p=2))
        return self.middle(hidden)


class NormalizedData(Net):
    def inside(self, hidden):
        weight = self.middle.weight
        weight.data = weight.data / weight.data.norm(dim=0, keepdim=True)
        return self.middle(hidden)


class NormalizedInPlace(Net):
    def inside(self, hidden):
        weight = self.middle.weight.data
        weight.div_(weight.norm(dim=1, keepdim=True))
        return self.middle(hidden)


class AsItWas(Net):
    """Reads how long its rows were, which no second micro-batch finds."""

    def inside(self, hidden):
        weight = self.middle.weight.data
        lengths = weight.norm(dim=1, keepdim=True)
        self.middle.weight.data = weight / lengths
        return self.middle(hidden) * lengths.mean()


class OfAnother(Net):
    def inside(self, hidden):
        with torch.no_grad():
            weight = nn.functional.normalize(self.down.weight.T @ self.down.weight)
            self.middle.weight.copy_(weight)
        return self.middle(hidden)


class LongerTwice(Net):
    """What is shorter than 0.1 is divided by 0.1, and by that once more."""

    def inside(self, hidden):
        self.middle.weight.data = nn.functional.normalize(self.middle.weight.data, eps=0.1)
        return self.middle(hidden)


class ReadBefore(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.middle.weight.data = nn.functional.normalize(self.middle.weight.data)
        return self.middle(hidden)


@pytest.mark.parametrize(
    "kind",
    chosen([AsItWas, OfAnother, LongerTwice, ReadBefore], now=(OfAnother,)),
)
def test_norms_that_are_others_the_second_time_are_refused(kind):
    with pytest.raises(CaptureError, match="forward writes the parameter 'middle.weight'"):
        trace_model(built(kind), inputs, square)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (NormalizedInPlace, ("normalize_", (2, (1,), 0.0))),
        pytest.param(Normalized, ("normalize_", (2.0, (1,), 1e-12)), marks=pytest.mark.long),
        pytest.param(NormalizedData, ("normalize_", (2, (0,), 0.0)), marks=pytest.mark.long),
        pytest.param(Masked, ("mul_", (State("mask"),)), marks=pytest.mark.long),
        (MaskedAnew, ("mul_", (State("mask"),))),
        pytest.param(
            FilledByABuffer, ("masked_fill_", (State("mask"), 0.0)), marks=pytest.mark.long
        ),
        pytest.param(ClampedAnew, ("clamp_", (-0.1, 0.1)), marks=pytest.mark.long),
        pytest.param(Renormed, ("renorm_", (2, 0, 0.5)), marks=pytest.mark.long),
    ],
)
def test_a_weight_that_forward_masks_or_limits_is_so_for_its_readers(kind, how):
    """Bug: all but clamping by numbers was refused, with a hint that says to clamp."""
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []
    op, rest = traced(kind).graph.states["middle.weight"].projection
    assert (op.removeprefix("aten.").partition(".")[0], rest) == how


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [Clamped, ClampedData])
def test_a_weight_that_forward_clamps_is_clamped_for_its_readers(kind):
    """It has its gradient; the runtime clamps the weight itself before the optimizer's step."""
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []
    graph = traced(kind).graph
    assert graph.states["middle.weight"].projection == ("aten.clamp_.default", (-0.1, 0.1))
    lines = [str(node).partition(" -> ")[0] for node in graph.nodes]
    if kind is Clamped:
        assert {
            "detach/0 = aten.detach.default([middle.weight])",
            "clamp/0 = aten.clamp.default(detach/0, -0.1, 0.1)",
            "sub/0 = aten.sub.Tensor([middle.weight], detach/0)",
            "add/0 = aten.add.Tensor(clamp/0, sub/0)",
            "middle/linear/0 = aten.linear.default(relu/0, add/0, [middle.bias])",
        } <= {*lines}


class MovedByData(Net):
    """As MoCo's keys follow its queries."""

    def begin(self):
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def inside(self, hidden):
        for own, other in zip(self.teacher.parameters(), self.middle.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
        return self.middle(hidden) - self.teacher(hidden)


def test_the_data_of_a_frozen_parameter_may_be_set():
    """Bug: it was refused as one that the optimizer trains."""
    assert unlike(built(MovedByData)) == []


class EvaluatesFirst(Net):
    """Its backward reads the statistics that training has written by then: no version tells."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        norm = self.norm
        fixed = F.batch_norm(hidden, norm.running_mean, norm.running_var)
        return self.middle(norm(hidden) + fixed)


def test_a_norm_in_evaluation_before_one_in_training_is_refused():
    """Bug: under 1F1B its backward read what a later micro-batch had written, without a word."""
    with pytest.raises(CaptureError, match=r"a norm in evaluation reads \[norm.running_mean\], wh"):
        trace_model(built(EvaluatesFirst), inputs, square)


class ThroughViews(Net):
    def inside(self, hidden):
        made = torch.zeros(hidden.shape[0], 2, 8)
        made[:, 0] = self.middle(hidden)
        made.view(-1, 16)[:, 8:] += hidden.sin()
        return made.sum(1)


def test_writes_through_views_of_a_new_tensor():
    assert unlike(built(ThroughViews)) == []


class WritesUnderNoGrad(Net):
    """Writes values in place under no_grad: what was computed before keeps its gradient, as if
    nothing had been written."""

    def inside(self, hidden):
        hidden = self.middle(hidden) + 0
        with torch.no_grad():
            self.write(hidden)
        return hidden + hidden.sin()


class Clamps(WritesUnderNoGrad):
    def write(self, hidden):
        hidden.clamp_(-0.1, 0.1)


class Masks(WritesUnderNoGrad):
    def write(self, hidden):
        hidden[hidden > 0.5] = 0.5


class ScalesAPart(WritesUnderNoGrad):
    def write(self, hidden):
        hidden[:, :2].mul_(3)


class Rounds(WritesUnderNoGrad):
    def write(self, hidden):
        hidden.copy_(hidden.round(decimals=1))


class ClampsInto(WritesUnderNoGrad):
    def write(self, hidden):
        torch.clamp(hidden, -0.1, 0.1, out=hidden)


class UsesWhatItWrote(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden) + 0
        with torch.no_grad():
            same = hidden.mul_(2).clamp_(-0.1, 0.1)
            with torch.enable_grad():
                more = self.middle(hidden)
        return same * more


UNDER_NO_GRAD = (Clamps, Masks, ScalesAPart, Rounds, ClampsInto, UsesWhatItWrote)


@pytest.mark.parametrize(
    "kind", chosen(UNDER_NO_GRAD, now=(Clamps,)), ids=lambda kind: kind.__name__
)
def test_a_write_under_no_grad_leaves_gradients_as_they_were(kind):
    """Bug: an op in place returns what it writes, and a trace gives later readers its result: they
    read one of an op under no_grad, and no gradient came back to what was written."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


class ReshapesInPlace(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden) + 0
        with torch.no_grad():
            hidden.unsqueeze_(0)
        return hidden.sum(0)


def test_another_shape_in_place_under_no_grad_is_refused():
    with pytest.raises(CaptureError, match="is given another shape in place, under torch.no_grad"):
        trace_model(built(ReshapesInPlace), inputs, square)


class Out(Net):
    """`out=` of a part of a new tensor, and of a buffer; nothing reads what the calls return."""

    def begin(self):
        self.register_buffer("average", torch.zeros(8))

    def inside(self, hidden):
        made = torch.zeros(hidden.shape[0], 2, 8)
        torch.mul(hidden.detach(), 2, out=made[:, 0])
        torch.add(0.9 * self.average, hidden.detach().mean(0), out=self.average)
        return self.middle(hidden) + made.sum(1) + self.average


def test_out_is_a_write_in_place():
    """Bug: only a first argument was taken for written: both calls were left out as unread."""
    assert unlike_whole_or_cut(built(Out), cuts=["relu/1"]) == []
