"""Hooks, random numbers, reads and names in forward: the graph computes what the model does.

Each of these was once trained on wrong gradients without a word, or refused with a sentence that
led nowhere.
"""

import random

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.checkpoint import checkpoint

from autopipe.errors import CaptureError
from autopipe.frontend import unwritten
from autopipe.frontend.construct import build_fake
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


class Unused(Net):
    """Draws, as models with layerdrop do, and never uses the number."""

    def inside(self, hidden):
        return self.middle(hidden) if random.random() < 2 else hidden


@pytest.mark.long
def test_a_random_number_that_changes_nothing_is_no_obstacle():
    before = random.getstate()
    assert unlike(built(Unused)) == []
    model = built(Net)
    trace_model(model, inputs, square)
    assert before != random.getstate(), "eager has drawn"


class OfWholeNumbers(Net):
    """All of them are 1."""

    def inside(self, hidden):
        return self.middle(hidden) * torch.randint_like(hidden, 1, 2)


def test_whole_numbers_drawn_like_a_trained_tensor_have_no_gradient():
    """Bug: refused, as the op below `torch.randint_like` fails in backward."""
    assert unlike(built(OfWholeNumbers)) == []


class HooksAround(Net):
    """An adapter that a hook adds, and a list in which another keeps what it sees."""

    def begin(self):
        self.adapter, self.seen = nn.Linear(8, 8), []
        self.middle.register_forward_hook(lambda layer, args, made: made + self.adapter(args[0]))
        self.adapter.register_forward_hook(lambda layer, args, made: self.seen.append(made))

    def inside(self, hidden):
        self.seen.clear()
        return self.middle(hidden) * self.seen[-1]


def test_a_copy_of_a_model_has_hooks_of_its_own():
    """Bug: a hook called the adapter of the model that was copied, under no name of the copy's: a
    rank that was given the model refused the plan of the function that builds it."""
    assert unlike(built(HooksAround), traced=traced(HooksAround)) == []
    names = [node.name for node in traced(HooksAround).graph.nodes]
    assert "adapter/linear/0" in names


class Cumulative(Net):
    def begin(self):
        self.middle = nn.BatchNorm1d(8, momentum=None)


class RoutedIn(Net):
    """As switch and nllb have it: the router is put to a dtype, which it has already."""

    def inside(self, hidden):
        return self.middle.to(hidden.dtype)(hidden)


class BroughtIn(Net):
    """Bug: refused as if it read a gradient. Mixtures bring their chosen experts to where x is."""

    def inside(self, hidden):
        self.middle.to(hidden.device)
        return self.middle.to(hidden).to(device=hidden.device, non_blocking=True)(hidden)


class ReadsData(Net):
    """As I-BERT has it: the range of its activations, without a gradient."""

    def inside(self, hidden):
        return self.middle(hidden) / hidden.data.abs().max()


class WritesData(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        hidden.data.mul_(2)
        return hidden


class MovesItsWeight(Net):
    """As losses with proxies have it: a weight is put where its input is, and was there already."""

    def inside(self, hidden):
        self.middle.weight.data = self.middle.weight.data.to(hidden.device).to(dtype=hidden.dtype)
        self.middle.bias.data = self.middle.bias.data
        return self.middle(hidden)


class MovesItInAPart(MovesItsWeight):
    def inside(self, hidden):
        chosen = hidden[hidden[:, 0] > 0]
        return super().inside(hidden) + chosen.sum()


class CastsByWord(Net):
    """`x.data.type()` gives a word, as code of torch 0.4 has it; it was taken for a tensor."""

    def inside(self, hidden):
        return self.middle(hidden) + torch.arange(8).type(hidden.data.type())


class OnATensor(Net):
    """Reads what it has set on a parameter and on a buffer: a trace had neither."""

    def begin(self):
        self.middle.weight.scale = 3.0
        self.register_buffer("table", torch.ones(8))
        self.table.scale = 2.0

    def inside(self, hidden):
        scale = self.middle.weight.scale if hasattr(self.middle.weight, "scale") else 1.0
        return self.middle(hidden) * self.table * self.table.scale * scale


class InAPart(OnATensor):
    def inside(self, hidden):
        chosen = hidden[hidden[:, 0] > 0]
        return super().inside(hidden) + chosen.sum()


MAY = [
    Cumulative,
    RoutedIn,
    BroughtIn,
    ReadsData,
    WritesData,
    MovesItsWeight,
    MovesItInAPart,
    CastsByWord,
]


@pytest.mark.parametrize(
    "kind",
    chosen(
        [*MAY, OnATensor, InAPart],
        now=(BroughtIn, WritesData, MovesItsWeight, InAPart),
    ),
)
def test_what_python_does_in_forward_is_done_by_tensors_or_left_out(kind):
    """Bugs: all were refused; Python reads a count, the gradient of a parameter, x.data."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


class AsksForOthers(Net):
    def begin(self):
        self.norm = nn.SyncBatchNorm(8)

    def inside(self, hidden):
        hidden = self.norm(self.middle(hidden))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(hidden)
        return hidden


def test_a_rank_traces_what_was_planned_where_no_process_group_was():
    """Bugs: a rank's graph had an all_reduce, and was refused as another model's; SyncBatchNorm."""

    def graph():
        return str(trace_model(built(AsksForOthers), inputs, square).graph)

    planned, store = graph(), torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert graph() == planned
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


class HookBehind(Net):
    """A hook on the function that made a tensor, which is no hook of the tensor."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        if hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
        return hidden


def test_a_hook_on_what_made_a_tensor_runs_as_it_is():
    """Bug: it was dropped; only a model small enough to be compared with its graph was refused."""
    (region,) = traced(HookBehind).regions
    assert region.method == "inside" and "forward reads .grad_fn" in region.why
    assert unlike_whole_or_cut(built(HookBehind), traced=traced(HookBehind), cuts=["relu/1"]) == []


class Weights(nn.Module):
    """A parameter, a buffer and a module under names that fx's own graphs of code have."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.full((8,), 1.5))
        self.register_buffer("meta", torch.full((8,), 0.5))
        self.graph = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, hidden):
        return self.graph(hidden * self.code) + self.meta


class WordsOfFx(Net):
    def begin(self):
        self.graph = nn.Sequential(Weights(), Weights())
        self.code = nn.Parameter(torch.full((8,), 0.5))

    def inside(self, hidden):
        return self.graph(hidden) * self.code


def test_names_that_graphs_of_code_have_themselves():
    """Bug: "Code has not been generated! Please report a bug to PyTorch"."""
    assert unlike_whole_or_cut(built(WordsOfFx), cuts=["graph.1/mul/0"]) == []


class WordsOfPython(Net):
    """A parameter, a module and a buffer under names that are words of Python."""

    def begin(self):
        self.register_parameter("lambda", nn.Parameter(torch.full((8,), 1.5)))
        self.add_module("class", nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.register_buffer("is", torch.full((8,), 0.5))

    def inside(self, hidden):
        return self.get_submodule("class")(hidden * getattr(self, "lambda")) + getattr(self, "is")


def test_names_that_are_words_of_python():
    """Bug: stages read `self.lambda`, which is no Python."""
    assert unlike_whole_or_cut(built(WordsOfPython), cuts=["relu/1"]) == []


class Nested(Net):
    def inside(self, hidden):
        def outer(h):
            return checkpoint(self.middle, h.sin(), use_reentrant=False)

        return checkpoint(outer, self.middle(hidden), use_reentrant=False)


def test_a_checkpoint_in_another_one_keeps_gradients():
    """Bug: the trace had gradients switched off from the inner one on: no parameter had any."""
    assert unlike_whole_or_cut(built(Nested), cuts=["relu/1"]) == []


class OpOfThatName(Net):
    """The op is `aten.random_.from`. All numbers are 1."""

    def inside(self, hidden):
        return self.middle(hidden) * torch.empty_like(hidden).random_(1, 2)


def test_an_op_whose_name_is_a_word_of_python():
    """Bug: "the model cannot be captured: SyntaxError: invalid syntax (proxy_tensor.py:1738)"."""
    assert unlike_whole_or_cut(built(OpOfThatName), cuts=["middle/linear/0"]) == []


class AsksAsItIsBuilt(Net):
    """As layers of vector-quantize-pytorch do, which share a codebook's counts."""

    def begin(self):
        self.shares = torch.distributed.is_initialized()

    def inside(self, hidden):
        hidden = self.middle(hidden)
        mean = hidden.detach().mean(0)
        if self.shares:
            torch.distributed.all_reduce(mean)
        return hidden - mean


def test_a_model_that_asks_for_others_as_it_is_built_is_built_as_it_was_planned():
    """Bugs: a rank, which builds it among others, refused its plan as another model's; and a model
    that was built among others waited for a stage that never calls."""
    planned, store = trace_model(built(AsksAsItIsBuilt), inputs, square), HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert not build_fake(AsksAsItIsBuilt).shares
        assert not unwritten.with_numbers(AsksAsItIsBuilt, (), print).shares
        with pytest.raises(CaptureError, match="calls all_reduce of torch.distributed, for which"):
            trace_model(built(AsksAsItIsBuilt), inputs, square)
    finally:
        torch.distributed.destroy_process_group()
    assert unlike(built(AsksAsItIsBuilt), traced=planned) == []
