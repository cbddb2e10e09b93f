"""What a part that runs as it is leaves for code outside of it, wherever it leaves it.

These models are only traced, as those that are too large for a comparison with plain PyTorch.
"""

import array
import collections
import ctypes
import os
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from tests.support.long import chosen
from tests.support.odd_models import (
    MICRO_BATCHES,
    ROWS,
    Leaves,
    Net,
    built,
    eager,
    inputs,
    regions_of,
    square,
    traced,
    unlike,
)
from tests.support.staged import Step, differences, lowered, micro_batches, trace_model

installed = ModuleType("installed")  # stands for a file of an installed package: nobody looks in
installed.scale = 1.0
hide = [lambda: installed]  # behind a function, so that it is found by nothing


class InAnInstalledFile(Leaves):
    def leave(self, number):
        hide[0]().scale = number

    def found(self):
        return hide[0]().scale


class InTheEnvironment(Leaves):
    def leave(self, number):
        os.environ["AUTOPIPE_TEST_FOUND"] = str(number)

    def found(self):
        return float(os.environ["AUTOPIPE_TEST_FOUND"])


class InAnObjectOfC(Leaves):
    def begin(self):
        self.number = ctypes.c_double(1)

    def leave(self, number):
        self.number.value = number

    def found(self):
        return self.number.value


class InBytes(Leaves):
    def begin(self):
        self.number = bytearray(1)

    def leave(self, number):
        self.number[0] = number

    def found(self):
        return self.number[0]


class InAnArray(InBytes):
    def begin(self):
        self.number = array.array("d", [1.0])


class InAQueue(Leaves):
    """As long as before: its length tells nothing."""

    def begin(self):
        self.number = collections.deque([1], maxlen=1)

    def leave(self, number):
        self.number.append(number)

    def found(self):
        return self.number[-1]


KINDS = [InAnInstalledFile, InTheEnvironment, InAnObjectOfC, InBytes, InAnArray, InAQueue]


@pytest.mark.parametrize("kind", chosen(KINDS, now=(InAnInstalledFile, InAQueue)))
def test_a_number_for_other_code_takes_that_code_along(kind):
    """Bug: other code had the number of the rows that were measured, for good."""
    assert "bent()" not in regions_of(kind)
    assert unlike(built(kind), traced=traced(kind)) == []


class ForALog(InAQueue):
    def found(self):
        return 1


def test_a_number_for_a_log_takes_none_along():
    (name,) = regions_of(ForALog)
    assert name.startswith("bent")  # it, or the lines of it that other tests have made a method


class Scaled(nn.Module):
    """Scales by what the block before has left, in an object that all of them have."""

    def __init__(self, store):
        super().__init__()
        self.layer, self.store = nn.Linear(8, 8), store

    def forward(self, hidden):
        bent = torch.vmap(torch.sin)(self.layer(hidden)) * self.store.number
        self.store.number = 1 + int((bent > 0).sum())
        return bent


class OneForTheNext(Net):
    def begin(self):
        self.store = SimpleNamespace(number=1)
        self.blocks = nn.ModuleList(Scaled(self.store) for _ in range(3))

    def inside(self, hidden):
        self.store.number = 1
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def test_parts_of_which_one_leaves_a_number_for_the_next_are_one_part():
    """Bug: each was a part by itself, and on another stage had the number of other rows."""
    assert len(regions_of(OneForTheNext)) == 1
    assert unlike(built(OneForTheNext), traced=traced(OneForTheNext)) == []


class SetsForAPart(Net):
    """Sets a number that a part reads, and did not have when the model was built."""

    def begin(self):
        self.settings = SimpleNamespace(number=1)

    def inside(self, hidden):
        self.set(2)
        return self.bent(hidden)

    def bent(self, hidden):
        return torch.vmap(torch.sin)(self.middle(hidden)) * self.found()


class InAnObject(SetsForAPart):
    def set(self, number):
        self.settings.number = number

    def found(self):
        return self.settings.number


SETTINGS = {"number": 1}
CONTEXT = ContextVar("number", default=1)


class InAGlobal(SetsForAPart):
    def set(self, number):
        SETTINGS["number"] = number

    def found(self):
        return SETTINGS["number"]


class InContext(SetsForAPart):
    def inside(self, hidden):
        before = CONTEXT.set(2)
        bent = self.bent(hidden)
        CONTEXT.reset(before)
        return bent

    def found(self):
        return CONTEXT.get()


@pytest.mark.parametrize("kind", chosen([InAnObject, InAGlobal, InContext], now=(InAnObject,)))
def test_code_that_sets_a_number_for_a_part_goes_along(kind):
    """Bug: the part read the number that a rank has, on which that code does not run."""
    assert regions_of(kind) == ["inside()"]
    SETTINGS["number"] = 1  # as on a rank
    assert unlike(built(kind), traced=traced(kind)) == []


class Sine(nn.Module):
    """Has the module around it as a plain attribute, which torch does not count as inside."""

    def __init__(self, around):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        vars(self)["around"] = around

    def forward(self, hidden):
        return torch.vmap(torch.sin)(self.layer(hidden))


class ScaledByTheModel(Sine):
    def forward(self, hidden):
        return super().forward(hidden) * self.around.mode


class SetsItsOwn(Net):
    """The part reads an attribute of the model around it."""

    def begin(self):
        self.mode = 1
        self.part = ScaledByTheModel(self)

    def inside(self, hidden):
        self.mode = 3
        return self.part(hidden)


class SetsTheModels(Sine):
    def forward(self, hidden):
        bent = super().forward(hidden)
        self.around.mode = 1 + int((bent > 0).sum())
        return bent


class ReadsItsOwn(Net):
    """The part sets an attribute of the model around it."""

    def begin(self):
        self.mode = 1
        self.part = SetsTheModels(self)

    def inside(self, hidden):
        return self.part(hidden) * self.mode


class Hooked(SetsItsOwn):
    """A hook on the part does."""

    def begin(self):
        super().begin()
        self.part = Sine(self)
        self.part.register_forward_hook(lambda part, given, made: made * self.mode)


class Twice(Sine):
    """Gives a tensor and a view of it."""

    def forward(self, hidden):
        bent = super().forward(hidden)
        return bent, bent[:, :4]


class WritesOneOfTwo(Net):
    def begin(self):
        self.part = Twice(self)

    def inside(self, hidden):
        bent, first = self.part(hidden)
        first.mul_(2)
        return bent


class AsItIs(Sine):
    """Gives what it is given."""

    def forward(self, hidden):
        super().forward(hidden)
        return hidden


class WritesWhatItHasGiven(Net):
    def begin(self):
        self.part = AsItIs(self)

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.part(hidden).mul_(2)
        return hidden


AROUND = [SetsItsOwn, ReadsItsOwn, Hooked, WritesOneOfTwo, WritesWhatItHasGiven]


@pytest.mark.parametrize("kind", chosen(AROUND, now=(SetsItsOwn, WritesOneOfTwo)))
def test_what_passes_a_part_by_takes_that_code_along(kind):
    """Bug: the part read an attribute as the model was built with it; other code read it so, or
    wrote one tensor in place of two that shared memory."""
    assert "part" not in regions_of(kind)
    assert unlike(built(kind), traced=traced(kind)) == []


class AsksForItsClass(Net):
    """An op has plain tensors in the place of parameters."""

    def inside(self, hidden):
        return self.bent(hidden)

    def bent(self, hidden):
        return torch.vmap(torch.sin)(self.middle(hidden)) * (
            2 if isinstance(self.middle.weight, nn.Parameter) else 3
        )


class AsksWhichItIs(Net):
    def begin(self):
        self.scales = {id(self.middle.weight): 2}

    def inside(self, hidden):
        return self.bent(hidden)

    def bent(self, hidden):
        return torch.vmap(torch.sin)(self.middle(hidden)) * self.scales.get(
            id(self.middle.weight), 3
        )


@pytest.mark.parametrize("kind", [AsksForItsClass, AsksWhichItIs])
def test_a_part_that_asks_what_its_parameters_are_is_refused(kind):
    """Bug: it got another answer in each micro-batch than when it was measured."""
    with pytest.raises(CaptureError, match="or with plain tensors in the place of its parameters"):
        trace_model(built(kind), inputs, square)


class Store:
    """What forward keeps in a class, instead of in its context."""

    mean = torch.ones(())


class ByAHook(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        Store.mean = hidden.detach().abs().mean()
        hidden.register_hook(lambda gradient: gradient * Store.mean)
        return hidden


def test_a_hook_that_reads_what_the_last_forward_has_left_is_refused():
    """Bug: in a pipeline, where forward has run on later rows by then, gradients were others."""
    with pytest.raises(CaptureError, match="backward, in a hook [^\n]*computes with what its forw"):
        trace_model(built(ByAHook), inputs, square)


class ByAnAttribute(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.mean = hidden.detach().abs().mean()
        hidden.register_hook(lambda gradient: gradient * self.mean)
        return hidden


def test_a_hook_on_the_result_itself_reads_the_attribute_of_its_own_rows():
    """Bug: it read that of the rows whose forward had run last, as in a pipeline."""
    trace, expected, model = (
        traced(ByAnAttribute),
        eager(built(ByAnAttribute)),
        built(ByAnAttribute),
    )
    parts = micro_batches(trace, inputs(ROWS * MICRO_BATCHES), MICRO_BATCHES)
    (only,) = lowered(trace, model, (), ROWS)
    losses = [only.module(*(leaves[path] for path in only.stage.inputs))[0] for leaves in parts]
    for loss in losses:  # behind all forwards
        (loss / MICRO_BATCHES).backward()
    assert differences(Step.of(losses, model), expected, tolerance=1e-5) == []


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        Store.mean = hidden.detach().abs().mean()
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Divides(torch.autograd.Function):
    """By what another Function has kept."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.mean = Store.mean
        return hidden / ctx.mean

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.mean


class OneFunctionForTheOther(Net):
    def inside(self, hidden):
        kept = Keeps.apply(hidden)
        return Divides.apply(self.middle(kept))


def test_functions_of_which_one_keeps_a_tensor_for_the_other_are_one_part():
    """Bug: each was an op; on another stage the other had the tensor of other rows, or none."""
    assert len(regions_of(OneFunctionForTheOther)) == 1
    assert unlike(built(OneFunctionForTheOther), traced=traced(OneFunctionForTheOther)) == []


def test_tracing_leaves_what_a_class_keeps():
    """Bug: a tensor without values stayed there, and plain PyTorch failed from then on."""
    before = Store.mean
    trace_model(built(OneFunctionForTheOther), inputs, square)
    assert Store.mean is before
