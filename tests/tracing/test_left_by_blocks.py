"""What blocks leave behind for code around them, wherever it lies, is in the graph of each block.

    def forward(self, x):             no argument, no result and no attribute tells of it:
        h = gelu(self.first(x))       one traced block cannot stand for the others
        LOSSES.get().append(h)

These models are only traced, as those that are too large for a comparison with plain PyTorch.
"""

import collections
import contextvars
import ctypes
import types
from functools import partial

import pytest
from torch import nn
from torch.nn import functional as F

from autopipe.errors import CaptureError
from tests.support.stacked_blocks import Block, Stack, assert_same, inputs, mean, traces

CONTEXT = contextvars.ContextVar("context")
STORE = types.SimpleNamespace(left=[])
NESTED = {"of": {"left": []}}
QUEUE = collections.deque()
elsewhere = types.ModuleType("elsewhere")  # the global of another file
elsewhere.left = []


def closed_over():
    left = []
    return left.append, lambda: left


append, everything = closed_over()


def in_context():
    if CONTEXT.get(None) is None:
        CONTEXT.set([])
    return CONTEXT.get()


PLACES = {
    "a context variable": in_context,
    "an attribute of a global": lambda: STORE.left,
    "a dict in a dict": lambda: NESTED["of"]["left"],
    "a queue": lambda: QUEUE,
    "another file": lambda: elsewhere.left,
    "a closure": everything,
}

LEFT = {
    "what it is given": lambda given, inside, result: given,
    "what it makes": lambda given, inside, result: inside,
    "what it returns": lambda given, inside, result: result,
    "a count": lambda given, inside, result: 1,
}


class Collected(nn.Module):
    """Blocks that leave something at a place, and a sum of it (of the last of it) at the end."""

    def __init__(self, place, what, last=False, count=3):
        super().__init__()
        self.place, self.last = place, last

        class Leaves(Block):
            def forward(self, x):
                inside = F.gelu(self.first(x))
                result = x + self.second(inside)
                place().append(LEFT[what](x, inside, result))
                return result

        self.stack = Stack(Leaves, count)

    def forward(self, x):
        self.place().clear()
        x = self.stack(x)
        left = self.place()
        total = sum(item if isinstance(item, int) else item.mean(-1, True) for item in left)
        return x * (left[-1].mean(-1, True) if self.last else total)


def assert_each_is_traced(monkeypatch, place, what, *, last=False, count=3, **options):
    model = partial(Collected, place, what, last, count)
    shared, stood_in, whole = traces(monkeypatch, model, inputs, mean, **options)
    assert_same(shared, whole)
    assert stood_in == 0


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_lies(monkeypatch, place):
    assert_each_is_traced(monkeypatch, PLACES[place], "what it makes")


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("what", LEFT)
def test_whatever_it_is(monkeypatch, what):
    assert_each_is_traced(monkeypatch, PLACES["an attribute of a global"], what)


def test_the_last_of_it_is_that_of_the_last_block(monkeypatch):
    """As many calls are made then, of tensors of the same shapes."""
    assert_each_is_traced(monkeypatch, PLACES["a queue"], "what it makes", last=True)


def test_a_count_of_blocks_that_a_later_run_skips(monkeypatch):
    """Bug: it was refused, since the second of two runs skips more blocks than the first."""
    assert_each_is_traced(monkeypatch, PLACES["another file"], "a count", count=6)


def test_a_rank_finds_it_too(monkeypatch):
    assert_each_is_traced(monkeypatch, PLACES["a queue"], "what it makes", reads=())


def test_what_nobody_reads_changes_nothing(monkeypatch):
    """Blocks that leave a tensor for a log, say: one of them still stands for the others."""

    class Shows(Block):
        def forward(self, x):
            STORE.shown = x
            return super().forward(x)

    shared, stood_in, whole = traces(monkeypatch, lambda: Stack(Shows), inputs, mean)
    assert_same(shared, whole)
    assert stood_in == 5


def test_a_number_of_c_beside_blocks_is_refused(monkeypatch):
    """It is another one in each run, whether blocks are skipped in it or not; nothing puts it back.

    Bug: a run without skipping found the same as the one before it, and was taken.
    """
    calls = ctypes.c_int(0)

    class Moody(Stack):
        def forward(self, x):
            calls.value = min(calls.value + 1, 255)
            h = super().forward(x)
            return 2 * h if calls.value > 1 else h

    with pytest.raises(CaptureError, match="computes something else here in a second call"):
        traces(monkeypatch, lambda: Moody(Block), inputs, mean)
