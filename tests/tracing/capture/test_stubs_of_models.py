"""Models that do more with equal blocks than to call each once: tie, share, hook or freeze them."""

from contextvars import ContextVar

import pytest
import torch
from torch import nn

from tests.support.long import chosen
from tests.support.stacked_blocks import Block, Buffered, Stack, assert_same, inputs, mean, traces


class Twice(Stack):
    def forward(self, x):
        return super().forward(super().forward(x))


class SameBlockAgain(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2] = self.blocks[1]


class TiedWeights(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2].first.weight = self.blocks[1].first.weight


class OneBufferForAll(Stack):
    def __init__(self):
        super().__init__(Buffered)
        for block in self.blocks:
            block.scale = self.blocks[0].scale


class UsesAPart(Stack):
    """A layer of the third block runs outside of it too, before."""

    def forward(self, x):
        return super().forward(x + self.blocks[2].second(self.blocks[2].first(x)))


class Hooked(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[1].first.register_forward_hook(lambda module, args, output: output * 2)


class CollectsByHooks(Stack):
    """Hooks that forward adds collect what its blocks make, as the routers of a mixture are."""

    def forward(self, x):
        found = []
        hooks = [
            block.first.register_forward_hook(lambda module, args, output: found.append(output))
            for block in self.blocks
        ]
        x = super().forward(x)
        for hook in hooks:
            hook.remove()
        return x + torch.stack(found).softmax(-1).mean()


COLLECTED = ContextVar("COLLECTED")


class CollectsFromItsFirstCallOn(Stack):
    """The first call adds hooks, as transformers does for the losses of routers. Bug: what some of
    the blocks gave was missing from the loss, and of a large model nothing told so."""

    def forward(self, x):
        if not hasattr(self, "hooked"):
            self.hooked = True
            for block in self.blocks:
                block.first.register_forward_hook(lambda *call: COLLECTED.get().append(call[-1]))
        before = COLLECTED.set([])
        x = super().forward(x)
        x = x + torch.stack(COLLECTED.get()).softmax(-1).square().mean()
        COLLECTED.reset(before)
        return x


class Frozen(Stack):
    """No gradient comes into the first block: what it gives, and what it takes, looks otherwise."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)


class PartlyWithoutGradients(Stack):
    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            with torch.set_grad_enabled(number > 1):
                x = block(x)
        return x


class Ragged(Stack):
    """Blocks on arguments that lie differently in memory, but for the first two."""

    def forward(self, x):
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = torch.cat([block(x[:, :4]), x[:, 4:], x[:, :number]], dim=1)
        return x.sum(1, keepdim=True)


class Tree(nn.Module):
    """Takes and gives tuples and dicts, and hands on one argument as it is."""

    def __init__(self, index):
        super().__init__()
        self.block = Block(index)

    def forward(self, x, *, extra, flag=True, unused=None):
        y = self.block(x * extra["scale"])
        return {"x": y, "both": (extra["scale"], y.detach().argmax(1)), "flag": flag}


class Trees(Stack):
    def __init__(self):
        super().__init__(Tree)

    def forward(self, x):
        x = self.embed(x)
        scale, unused = x.sigmoid(), x.cumsum(0)
        for block in self.blocks:
            made = block(x, extra={"scale": scale}, unused=unused)
            x, (scale, best) = made["x"], made["both"]
        return x + best[:, None]


MODELS = {
    Trees: 5,
    **dict.fromkeys((Frozen, Hooked, UsesAPart), 4),
    TiedWeights: 3,
    Ragged: 1,
    PartlyWithoutGradients: 2,
    **dict.fromkeys((Twice, SameBlockAgain, OneBufferForAll), 0),
    **dict.fromkeys((CollectsByHooks, CollectsFromItsFirstCallOn), 0),
}


@pytest.mark.parametrize(
    "kind",
    chosen(MODELS, now=(TiedWeights, CollectsFromItsFirstCallOn)),
    ids=lambda kind: kind.__name__,
)
def test_models(monkeypatch, kind):
    shared, stood_in, whole = traces(monkeypatch, kind, inputs, mean)
    assert_same(shared, whole)
    assert stood_in == MODELS[kind]
