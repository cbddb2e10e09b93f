"""Effects of a call that runs as it is: which are refused, and which change its arguments."""

import random
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from autopipe.errors import CaptureError
from tests.support.long import chosen
from tests.support.odd_models import (
    Leaves,
    Net,
    built,
    inputs,
    regions_of,
    square,
    traced,
    unlike,
)
from tests.support.staged import (
    trace_model,
)


class DrawsInPython(Net):
    def inside(self, hidden):
        return torch.vmap(torch.sin)(hidden) * random.random()


class LaterInPython(Net):
    """Each of its first calls does the same."""

    def begin(self):
        self.calls = 0

    def inside(self, hidden):
        self.calls += 1
        return torch.vmap(torch.sin)(self.middle(hidden)) * (2 if self.calls > 40 else 1)


class Backward(Net):
    def inside(self, hidden):
        self.middle(hidden.detach()).sum().backward()
        return torch.vmap(torch.sin)(hidden)


class Counts(Net):
    calls = 0

    def inside(self, hidden):
        self.calls += 1
        return torch.vmap(torch.sin)(self.middle(hidden)) * self.calls


class InitialisedByRows(Net):
    """As the ActNorm of a flow."""

    def begin(self):
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("done", torch.zeros(()))

    def inside(self, hidden):
        hidden = torch.vmap(torch.sin)(self.middle(hidden))
        if not self.done:
            self.done, self.scale.data = torch.ones(()), 1 / (1 + hidden.detach().std(0))
        return hidden * self.scale


REFUSED = {
    InitialisedByRows: "sets the .data of a parameter [^\n]*\n.* or initialise it in model",
    DrawsInPython: "random",
    Backward: "forward runs a backward of its own",
    Counts: "the model keeps calls from one call to the next, and then computes something else",
    LaterInPython: "the model keeps calls from one call to the next, and then computes",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_effects_that_no_stage_may_have_stay_refused(kind):
    with pytest.raises(CaptureError, match=REFUSED[kind]):
        trace_model(built(kind), inputs, square)


class ByLastGradients(Net):
    """A hook keeps the size of gradients, by which the next forward divides."""

    def begin(self):
        self.register_buffer("size", torch.ones(()))
        self.middle.register_full_backward_hook(
            lambda layer, inner, outer: self.size.copy_(1 + outer[0].abs().sum()) and None
        )

    def inside(self, hidden):
        return self.middle(hidden) / self.size


def test_a_hook_that_writes_a_buffer_in_backward_is_refused():
    """Bug: what it wrote was lost; a large model was trained on the first size for good."""
    with pytest.raises(CaptureError, match="the buffer 'size' is written in backward, by a hook"):
        trace_model(built(ByLastGradients), inputs, square)


STORE = SimpleNamespace(found=1)
CONTEXT = ContextVar("found", default=1)


class LeavesInAGlobal(Leaves):
    def leave(self, number):
        STORE.found = number

    def found(self):
        return STORE.found


class LeavesInContext(Leaves):
    def leave(self, number):
        CONTEXT.set(number)

    def found(self):
        return CONTEXT.get()


class LeavesInAClosure(Leaves):
    def begin(self):
        found = 1

        def leave(number):
            nonlocal found
            found = number

        self.leave, self.found = leave, lambda: found


KINDS = [LeavesInAGlobal, LeavesInContext, LeavesInAClosure]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_for_other_code_takes_that_code_along(kind):
    """Bug: other code had the number of the rows that were measured; of compared models alone it
    was noticed."""
    assert regions_of(kind) == ["inside()"]
    assert unlike(built(kind), traced=traced(kind)) == []


class LeavesForALog(LeavesInAGlobal):
    def found(self):
        return 1


def test_a_number_for_a_log_takes_none_along():
    assert regions_of(LeavesForALog) == ["bent()"]


class Grows(Net):
    """A method puts what it finds into a list that it is given."""

    def inside(self, hidden):
        self.grow(kept := [], hidden)
        return self.middle(hidden) * len(kept)

    def grow(self, kept, hidden):
        kept += [row.sum() for row in hidden[hidden.sum(1) > -9]]


class Replaces(Net):
    """A method puts another tensor in the place of one that it is given."""

    def inside(self, hidden):
        self.replace(kept := [self.middle(hidden)])
        return kept[0]

    def replace(self, kept):
        kept[0] = kept[0] * kept[0][kept[0] > 0.1].sum()


class ByNumber(Net):
    """A method gives a dict whose keys are no text, which no plan can write."""

    def inside(self, hidden):
        return self.middle(hidden) * self.totals(hidden)[0]

    def totals(self, hidden):
        return {0: hidden[hidden > 0.1].sum()}


class SetsTheData(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.doubled(hidden)
        return hidden

    def doubled(self, hidden):
        hidden.data = hidden.data * 2


class CountsInMemory(Net):
    """From another rank its argument would come in the order of its dims."""

    def inside(self, hidden):
        return self.windows(self.middle(hidden).view(-1, 2, 4).transpose(1, 2))

    def windows(self, turned):
        total = turned[turned > 0].sum()
        return turned.as_strided((len(turned), 2, 4), (8, 2, 1)).flatten(1) * total


@pytest.mark.parametrize(
    "kind",
    chosen([Grows, Replaces, ByNumber, SetsTheData, CountsInMemory], now=(ByNumber,)),
)
def test_a_call_that_changes_what_it_is_given_is_widened(kind):
    """Bug: the graph had the list, or the tensor, as it was before; planning's look found it."""
    names = [one.region.name for one in traced(kind).graph.regions.values()]
    assert names == ["inside()"]
    assert unlike(built(kind), traced=traced(kind)) == []


class AddsToIt(Net):
    def forward(self, x):
        hidden = self.up(x).relu()
        found = self.first(hidden)
        found["out"] = self.down(hidden)
        return found["out"] * found["total"]

    def first(self, hidden):
        return {"total": hidden[hidden > 0.1].sum()}


def test_what_a_call_gives_is_what_it_was_when_it_gave_it():
    """Bug: a dict that forward adds to was measured at the end, and each micro-batch had others."""
    assert unlike(built(AddsToIt)) == []


class Caching(nn.Module):
    """As models of transformers: a cache beside the result, unless the configuration says no."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.config = transformers.LlamaConfig(use_cache=True)

    def forward(self, hidden):
        hidden = self.layer(hidden)
        hidden = hidden + hidden[hidden[:, 0] > 0.1].sum(0)
        return {"hidden": hidden, "cache": {self} if self.config.use_cache else None}


class Cached(Net):
    def begin(self):
        self.part = Caching()

    def inside(self, hidden):
        return self.part(hidden)["hidden"]


def test_a_cache_of_transformers_is_off_where_the_call_runs_too():
    """Bug: it was off while the call was measured, and a run ended at the cache that it gave."""
    assert regions_of(Cached) == ["part"]
    assert unlike(built(Cached), traced=traced(Cached)) == []
