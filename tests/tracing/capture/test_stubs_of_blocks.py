"""Blocks that may or may not stand for each other: what they read, write, count and keep.

Each class below is a block; the model is six of them in a row.
"""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.long import chosen
from tests.support.stacked_blocks import Block, Buffered, Stack, assert_same, inputs, mean, traces


class AsksForItsIndex(Block):
    def forward(self, x):
        return super().forward(x) if self.index != 2 else super().forward(x) * 2


class AsksButDoesTheSame(Block):
    """At two rows all compute the same; the sizes of one are another formula of the rows."""

    def forward(self, x):
        rows = x.shape[0] * (self.index + 3) // (self.index + 3)
        return super().forward(x)[:rows]


class Alternates(Block):
    def __init__(self, index):
        super().__init__(index)
        self.kind = ("tanh", "relu")[index % 2]

    def forward(self, x):
        return super().forward(getattr(torch, self.kind)(x))


class LooksInItsDictionary(Block):
    def forward(self, x):
        return super().forward(x) * (1 + vars(self)["index"])


calls = 0


class CountsGlobally(Block):
    def forward(self, x):
        global calls
        calls += 1
        return super().forward(x)


class CountsOnItsClass(Block):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


class Shared:
    def __init__(self):
        self.calls = 0


shared = Shared()


class CountsInAnObject(Block):
    def __init__(self, index):
        super().__init__(index)
        self.shared = shared

    def forward(self, x):
        self.shared.calls += 1
        return super().forward(x)


turns = itertools.cycle(["sin", "cos"])


class TakesTurns(Block):
    """What no look at attributes and globals tells: in a run, every other block does another op."""

    def forward(self, x):
        return super().forward(getattr(torch, next(turns))(x))


class RemembersItsResult(Block):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class KeepsAList(Block):
    def __init__(self, index):
        super().__init__(index)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape[1])
        return super().forward(x)


class WritesABuffer(Block):
    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return super().forward(x)


class WritesItsArgument(Block):
    def forward(self, x):
        return super().forward(x.mul_(2))


class ReadsABuffer(Block):
    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("on", torch.tensor(index % 2 == 0))

    def forward(self, x):
        return super().forward(x) if self.on else x + self.second(self.first(x))


class HasAConstant(Block):
    def forward(self, x):
        return super().forward(x) * torch.tensor(2.0)


class GivesAView(Block):
    def forward(self, x):
        self.second(F.gelu(self.first(x)))
        return x.view(-1, 4)


scale = torch.full((4,), 2.0)


class UsesAGlobalTensor(Block):
    def forward(self, x):
        return super().forward(x) * scale


class OnlyOneIsFrozen(Block):
    def __init__(self, index):
        super().__init__(index)
        self.requires_grad_(index != 1)


class Undecided(Block):
    """Sets gradients and autocast on and off."""

    def forward(self, x):
        with torch.no_grad():
            scale = self.first(x).mean()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.second(F.gelu(self.first(x)))
        return x + y.float() * scale


class HasAnActivationOfItsOwn(Block):
    """Made for each block anew: what it was made of is the same."""

    def __init__(self, index):
        super().__init__(index)
        self.activation = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x):
        return self.activation(super().forward(x))


class HasAnotherActivation(HasAnActivationOfItsOwn):
    def __init__(self, index):
        super().__init__(index)
        if index == 2:
            self.activation = functools.partial(F.gelu, approximate="none")


class CallsANormTwice(Block):
    def __init__(self, index):
        super().__init__(index)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return super().forward(self.norm(F.relu(self.norm(x))))


KINDS = {
    **dict.fromkeys((Block, Undecided, Buffered, CallsANormTwice, HasAnActivationOfItsOwn), 5),
    HasAnotherActivation: 4,
    Alternates: 4,  # three of each kind
    OnlyOneIsFrozen: 4,
    **dict.fromkeys((AsksForItsIndex, AsksButDoesTheSame, LooksInItsDictionary), 0),
    **dict.fromkeys((CountsGlobally, CountsOnItsClass, CountsInAnObject), 0),
    **dict.fromkeys((RemembersItsResult, KeepsAList, WritesABuffer, WritesItsArgument), 0),
    **dict.fromkeys((ReadsABuffer, HasAConstant, GivesAView, UsesAGlobalTensor), 0),
    TakesTurns: 4,
}
"""For how many of six blocks a stand-in stands."""


@pytest.mark.parametrize(
    "kind",
    chosen(KINDS, now=(AsksForItsIndex, GivesAView)),
    ids=lambda kind: kind.__name__,
)
def test_blocks(monkeypatch, kind):
    shared, stood_in, whole = traces(monkeypatch, lambda: Stack(kind), inputs, mean)
    assert_same(shared, whole)
    assert stood_in == KINDS[kind]
