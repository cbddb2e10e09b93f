"""One traced block in the place of many gives the graph that tracing all of them gives.

Every test traces a model twice: with stand-ins wherever modules are proved alike, and in full. The
two graphs must be equal, node by node and name by name, whatever the blocks are up to; `stood_in`
tells for how many of them a stand-in stood, so that nothing passes by falling back.
"""

import functools
import itertools
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.errors import CaptureError
from autopipe.frontend.construct import fake_copy
from autopipe.ir.fingerprint import fingerprint
from autopipe.tracing import trace as tracing
from autopipe.tracing.low_precision import SixteenBits
from autopipe.tracing.module_calls import ModuleCall
from autopipe.tracing.same_modules import Likeness
from autopipe.tracing.stubs import STAND_IN, BlocksDiffer
from tests.support.long import chosen
from tests.support.staged import trace_model
from tests.support.zoo import ZOO


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


STOOD_IN = {
    **dict.fromkeys(("gpt", "dropout", "gpt2", "llama", "counted", "mask"), (3, 3)),
    **dict.fromkeys(("dict", "dataclass", "keywords"), (2, 2)),
    "whisper": (2, 2),
    "resnet": (0, 3),
}
"""Training and evaluation; batch norm changes its buffers only in the first."""


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(monkeypatch, name, training):
    case = ZOO[name]
    shared, stood_in, whole = traces(
        monkeypatch, case.model, case.inputs, case.loss, training=training
    )
    assert_same(shared, whole)
    assert stood_in == STOOD_IN.get(name, (0, 0))[not training]


# Blocks of all kinds. Each class below is a block; the model is six of them in a row.


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


def failing(error):
    """A capture that fails wherever a stand-in is to stand."""
    capture = tracing.capture

    def fails(*args, alike, **kwargs):
        if alike:
            raise error
        return capture(*args, alike=alike, **kwargs)

    return fails


@pytest.mark.parametrize(
    "error",
    [
        BlocksDiffer("blocks.1 is called again"),
        pytest.param(CaptureError("no\nmore"), marks=pytest.mark.long),
    ],
)
def test_where_stand_ins_are_refused_one_is_told(monkeypatch, error):
    whole = trace_model(Stack(), lambda rows: (torch.ones(rows, 4),), summed, reads=())
    monkeypatch.setattr(tracing, "capture", failing(error))
    lines = []
    found = trace_model(
        Stack(), lambda rows: (torch.ones(rows, 4),), summed, reads=(), say=lines.append
    )
    assert_same(found.graph, whole.graph)
    why = str(error).partition("\n")[0]
    assert lines == [f"trace: repeated modules are traced one by one, not once for all: {why}"]


def test_a_bug_of_stand_ins_is_no_slower_trace(monkeypatch):
    monkeypatch.setattr(tracing, "capture", failing(KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        trace_model(Stack(), lambda rows: (torch.ones(rows, 4),), summed, reads=())


def summed(outputs, batch):
    return outputs.sum()


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


class Buffered(Block):
    """A buffer of its own, whose values nobody in Python reads, and tied weights inside."""

    def __init__(self, index):
        super().__init__(index)
        self.register_buffer("scale", torch.full((4,), float(index)))
        self.again = nn.Linear(4, 8, bias=False)
        self.again.weight = self.first.weight

    def forward(self, x):
        return super().forward(x * self.scale) + self.second(self.again(x))


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


def inputs(rows):
    return {"x": torch.arange(4.0 * rows).view(rows, 4) / 10}


def mean(outputs, batch):
    return outputs.square().mean()


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


# Models that do something with their blocks


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


@pytest.mark.long
@pytest.mark.parametrize("options", [{"symbolic": False}, {"reads": ()}], ids=str)
def test_at_fixed_rows_and_from_a_record(monkeypatch, options):
    shared, stood_in, whole = traces(monkeypatch, lambda: Stack(Block), inputs, mean, **options)
    assert_same(shared, whole)
    assert stood_in == 5


def test_where_buffers_are_read_in_16_bits(monkeypatch):
    """They are cast before the first block, outside of all of them: no stand-in stood for any."""
    names = tuple(f"blocks.{index}.scale" for index in range(6))
    kept = SixteenBits(torch.bfloat16, buffers=names)
    blocks = functools.partial(Stack, Buffered)
    shared, stood_in, whole = traces(monkeypatch, blocks, inputs, mean, kept=kept)
    assert_same(shared, whole)
    assert stood_in == 5


@pytest.mark.long
def test_of_a_long_row_only_some_run_before_the_trace(monkeypatch):
    told = []
    take_over = ModuleCall.take_over
    monkeypatch.setattr(ModuleCall, "take_over", lambda *args: told.append(1) or take_over(*args))
    shared, stood_in, whole = traces(monkeypatch, lambda: Stack(count=20), inputs, mean)
    assert_same(shared, whole)
    assert stood_in == 19
    first, later = [0, 1, 2, 4, 8, 16, 19], [0, 1, 19]
    assert len(told) == 2 * (40 - len(first + later)), "each of two traces runs it twice"


def test_a_block_that_errs_voids_what_was_told_of_others():
    """By the first three the fourth one is told; the fifth one runs, and does otherwise."""
    turn = iter(["sin"] * 3 + ["cos"] * 3)

    class AsksTheTurn(Block):
        def forward(self, x):
            return super().forward(getattr(torch, next(turn))(x))

    likeness = Likeness(model := fake_copy(Stack(AsksTheTurn)))
    with likeness.watching():
        model(torch.ones(2, 4))
    assert likeness.misled


def test_a_refusal_is_that_of_the_full_trace():
    class Divides(Block):
        def forward(self, x):
            return super().forward(x).view(2, -1, 4).flatten(0, 1)  # not for every number of rows

    with pytest.raises(CaptureError, match="the number of rows is fixed here"):
        trace_model(Stack(Divides), inputs, mean, real=None)  # nothing runs as it is


def test_the_model_is_left_as_it_was():
    model = Stack(Block)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    trace_model(model, inputs, mean)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert "__getattribute__" not in vars(nn.Module)
