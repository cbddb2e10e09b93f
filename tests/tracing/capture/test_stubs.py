"""One traced block in the place of many gives the graph that tracing all of them gives.

The two graphs must be equal, node by node and name by name: of the zoo, at fixed rows, from a
record, with buffers in 16 bits. Where no stand-in can stand, the model is traced in full.
"""

import functools

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from autopipe.frontend.construct import fake_copy
from autopipe.tracing import tracer as tracing
from autopipe.tracing.capture.low_precision import SixteenBits
from autopipe.tracing.capture.stubs import BlocksDiffer
from autopipe.tracing.module_calls import ModuleCall
from autopipe.tracing.same_modules import Likeness
from tests.support.stacked_blocks import Block, Buffered, Stack, assert_same, inputs, mean, traces
from tests.support.staged import trace_model
from tests.support.zoo import ZOO

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
    once_more = 19  # as it is to be exported
    each = 40 - len(first + later) + once_more
    assert len(told) == 2 * each, "each of two traces runs it three times"


def test_a_block_that_errs_voids_what_was_told_of_others():
    """By the first three the fourth one is told; the fifth one runs, and does otherwise."""
    turn = iter(["sin"] * 3 + ["cos"] * 3)

    class AsksTheTurn(Block):
        def forward(self, x):
            return super().forward(getattr(torch, next(turn))(x))

    likeness = Likeness(model := fake_copy(Stack(AsksTheTurn)))
    with likeness.watching():
        model(torch.ones(2, 4))
    assert likeness.wrongly_skipped


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
