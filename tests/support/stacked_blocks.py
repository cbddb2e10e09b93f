"""A model of six equal blocks, traced twice: with stand-ins for equal blocks, and in full.

`stood_in` tells for how many blocks a stand-in stood, so that no test passes by falling back.
"""

import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.fingerprint import fingerprint
from autopipe.tracing import tracer as tracing
from autopipe.tracing.capture.stubs import STAND_IN
from tests.support.staged import trace_model


def traces(monkeypatch, model, inputs, loss=None, **options):
    """The graph with stand-ins, how many stood in, and the graph without any."""
    stood_in, fell_back = [], []
    capture = tracing.capture

    def counting(*args, alike, **kwargs):
        exported = capture(*args, alike=alike, **kwargs)
        stood_in.append(sum(str(n.target) == STAND_IN for n in exported.graph.nodes))
        return exported

    def in_full(*args, alike, **kwargs):
        return capture(*args, alike={}, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "capture", counting)
        shared = trace_model(model(), inputs, loss, **options).graph
        fell_back += stood_in[1:]
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "capture", in_full)
        whole = trace_model(model(), inputs, loss, **options).graph
    assert not fell_back, "the converter did not believe the stand-ins"
    return shared, stood_in[0], whole


def assert_same(shared, whole):
    for mine, other in zip(shared.nodes, whole.nodes, strict=False):
        assert mine == other
    assert len(shared.nodes) == len(whole.nodes)
    assert list(shared.states.items()) == list(whole.states.items())
    assert shared == whole
    assert fingerprint(shared) == fingerprint(whole)


class Block(nn.Module):
    def __init__(self, index=0):
        super().__init__()
        self.index = index
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(x)))


class Stack(nn.Module):
    def __init__(self, kind=Block, count=6):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([kind(index) for index in range(count)])

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Buffered(Block):
    """A buffer of its own, whose values nobody in Python reads, and tied weights inside."""

    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("scale", torch.full((4,), float(index)))
        self.again = nn.Linear(4, 8, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return super().forward(x * self.scale) + self.second(self.again(x))


def inputs(rows):
    return {"x": torch.arange(4.0 * rows).view(rows, 4) / 10}


def mean(outputs, batch):
    return outputs.square().mean()
