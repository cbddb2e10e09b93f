"""What cannot be captured is refused in a sentence that names the user's own line."""

import inspect
from ctypes import c_int
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.batch.description import describe
from autopipe.errors import CaptureError
from autopipe.tracing.capture.program import Program
from tests.support.autograd_functions import Double
from tests.support.long import chosen
from tests.support.staged import staged_step, trace_model
from tests.support.zoo import ZOO


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x, self.layer(x)).sum()


class Numpy(Model):
    def body(self, x, hidden):
        return torch.from_numpy(np.asarray(hidden.detach().numpy()))  # here


class Mistake(Model):
    def body(self, x, hidden):
        return hidden + undefined  # noqa: F821 - here


class Shapes(Model):
    def body(self, x, hidden):
        return hidden @ torch.ones(4, 4)  # here


class Moody(Model):
    """Its count is a number of C, which nothing puts back: others are refused by their names."""

    calls = c_int(0)

    def body(self, x, hidden):
        Moody.calls.value = min(Moody.calls.value + 1, 255)
        if Moody.calls.value > 1 and x.sum() > 0:  # here
            return hidden * 2
        return hidden


class FewRows(Model):
    def body(self, x, hidden):
        return hidden if x.shape[0] > 2 else hidden.square()


class Divides(Model):
    def body(self, x, hidden):
        return hidden.view(2, -1, 3)  # here


class OneByOne(Model):
    def body(self, x, hidden):
        return torch.stack([hidden[n] for n in range(len(hidden))])


class Added(Model):
    def body(self, x, hidden):
        return hidden + torch.ones(2, 3)


class FewPoints(Model):
    """Bug: torch's own error about a bound of 25/3 rows was all that was said."""

    def body(self, x, hidden):
        return hidden if x.numel() <= 25 else hidden.square()


class Even(Model):
    def body(self, x, hidden):
        return hidden.view(-1, 6)


def inputs(rows):
    return {"x": torch.ones(rows, 3)}


ITSELF = "\nhint: does model(**inputs(2)) go well by itself?"

SENTENCES = {
    Numpy: " `return torch.from_numpy(np.asarray(hidden.detach().numpy()))  # here`: the model "
    "cannot be captured: RuntimeError: .numpy() is not supported for tensor subclasses.\n"
    "hint: while a model is captured its tensors have shapes and no values: nothing outside torch "
    "can compute with them",
    Mistake: " `return hidden + undefined  # noqa: F821 - here`: the model raises NameError: name "
    f"'undefined' is not defined (it is traced with two rows){ITSELF}",
    Shapes: " `return hidden @ torch.ones(4, 4)  # here`: the model raises RuntimeError: a and b "
    f"must have same reduction dim, but got [2, 3] X [4, 4]. (it is traced with two rows){ITSELF}",
    Moody: ": the model computes something else here in a second call on the same rows: it keeps "
    "something outside of attributes and variables (bytes, a file), or reads a clock; a graph is "
    "that of a first call\n"
    "hint: count in a buffer, register_buffer, and write that in place; draw with torch",
}


@pytest.mark.parametrize("kind", SENTENCES, ids=lambda kind: kind.__name__)
def test_the_users_own_line_is_named(kind):
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "here" in text)
    with pytest.raises(CaptureError) as error:
        trace_model(kind(), inputs, real=None)
    assert str(error.value) == f"{__file__}:{line}{SENTENCES[kind]}"


FIXES_ROWS = {
    FewRows: None,
    FewPoints: None,
    OneByOne: None,
    Divides: "the sizes of what it gives are no line in the rows",
    Added: "it raises RuntimeError on 4 rows",
    Even: "the sizes of what it gives are no line in the rows",
}
"""Why a method that fixes the number of rows cannot run as it is; None: it does."""


@pytest.mark.parametrize(
    "kind",
    chosen(FIXES_ROWS, now=(FewRows, Added)),
    ids=lambda k: k.__name__,
)
def test_rows_that_are_fixed_in_forward_are_refused_with_the_line(kind, capfd):
    class Forward(kind):
        body = staticmethod(partial(kind.body, None))  # forward's own lines: no method of a module

    with pytest.raises(CaptureError) as error:
        trace_model(Forward(), inputs)
    line = kind.body.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f"{__file__}:{line}: the number of rows is fixed here, so what is traced with two rows "
        "does not hold for the rows of every micro-batch\n"
        "hint: take the rows from x.shape[0], not from a number, as in view(2, -1), nor as "
        "int(x.shape[0]); no branch may depend on them; or move these lines to a method, or "
        "to a module, that takes tensors and gives tensors of fixed sizes: it then runs as it is"
    )
    assert capfd.readouterr() == ("", ""), "torch's own log stays silent"


def test_rows_that_are_fixed_in_torchs_own_code_are_refused_with_the_module():
    """Bug: the place was the line of the script that had called autopipe."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Unflatten(0, (2, -1)), nn.Flatten(0, 1))
    with pytest.raises(CaptureError) as error:
        trace_model(model, lambda rows: {"input": torch.ones(rows, 3)}, lambda o, _: o.sum())
    assert str(error.value).startswith("1 (Unflatten): the number of rows is fixed here")


@pytest.mark.parametrize(
    "kind",
    chosen(FIXES_ROWS, now=(OneByOne, Added)),
    ids=lambda k: k.__name__,
)
def test_a_method_that_fixes_rows_runs_as_it_is_where_it_can(kind):
    if FIXES_ROWS[kind] is None:
        model, batch = kind(), inputs(4)
        found = staged_step(model, trace_model(model, inputs), batch, (), 1).losses
        assert torch.equal(found[0], model(**batch))
    else:
        with pytest.raises(CaptureError, match="number of rows is fixed") as error:
            trace_model(kind(), inputs)
        assert f"(body() of the model cannot, for {FIXES_ROWS[kind]})" in error.value.hint


def test_rows_may_be_counted_by_len():
    """Bug story: Python made a number of what `__len__` returns; contrastive losses count so."""

    class Counted(Model):
        def body(self, x, hidden):
            return hidden * torch.arange(len(hidden))[:, None] / len(x)

    model, batch = Counted(), inputs(5)
    found = staged_step(model, trace_model(model, inputs), batch, (), 1).losses
    assert torch.equal(found[0], model(**batch))
    assert len(batch["x"]) == 5, "Python's own, again"


def test_a_mistake_in_the_loss_is_said_to_be_the_losss():
    def loss(outputs, batch):
        return outputs - batch["label"]

    with pytest.raises(CaptureError) as error:
        trace_model(Model2(), inputs, loss)
    line = loss.__code__.co_firstlineno + 1
    assert str(error.value) == (
        f'{__file__}:{line} `return outputs - batch["label"]`: loss(outputs, batch) raises '
        "KeyError: 'label' (it is traced with two rows)\nhint: the batch has the entries x"
    )


def test_an_error_leaves_the_model_and_torch_as_they_were():
    model = Mistake()
    apply = torch.autograd.Function.__dict__.get("apply")
    with pytest.raises(CaptureError):
        trace_model(model, inputs)
    assert "forward" not in model.__dict__ and model.training
    assert torch.autograd.Function.__dict__.get("apply") is apply
    assert Double.apply(torch.ones(1)) == 2


def test_transformers_flags_are_put_back():
    from transformers import masking_utils

    before = {k: v for k, v in vars(masking_utils).items() if k.startswith("is_")}
    assert "is_tracing" in before
    trace_model(Model2(), inputs)
    assert {k: v for k, v in vars(masking_utils).items() if k.startswith("is_")} == before


class Model2(Model):
    def body(self, x, hidden):
        return hidden


@pytest.mark.parametrize("asked", [None, True])
def test_nobody_fills_a_cache_for_decoding_unless_told_to(asked):
    """transformers' models do by default; to a loss it is a copy of all keys and values."""
    model, made = ZOO["llama"].model(), []
    model.register_forward_hook(lambda module, args, outputs: made.append(outputs.past_key_values))
    small, large = ({**ZOO["llama"].inputs(rows)} for rows in (2, 3))
    if asked:
        small["use_cache"] = large["use_cache"] = True
    program = Program(model, small, None, describe(small, large, 2, 3))
    program(*(value for value in small.values() if isinstance(value, torch.Tensor)))
    assert (made[0] is not None) == bool(asked)
    assert model.config.use_cache is True


class Distances(nn.Module):
    """To a table of so few points that their number in a batch chooses how they are computed."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.eye(3))

    def forward(self, x):
        return torch.cdist(x[:, None, :].expand(-1, 6, -1).flatten(0, 1), self.table).sum()


@pytest.mark.parametrize("rows", [4, 8])
def test_the_distances_of_24_points_and_those_of_48_are_computed_as_torch_does(rows):
    """Bug: refused, though a graph has it as one op; from 26 points on it is products."""
    model, batch = Distances(), inputs(rows)
    found = staged_step(model, trace_model(model, inputs), batch, (), 1).losses
    assert torch.equal(found[0], model(**batch))


class WithoutGenerator(Model):
    def body(self, x, hidden):
        how = {"device": x.device, "dtype": x.dtype, "layout": x.layout}
        return hidden * torch.randn(hidden.shape, generator=None, **how)


def test_a_generator_of_none_is_none():
    """Bug: torch has another op where one is given, which takes no symbol for the rows; the sample
    of a variational autoencoder ran as it is, and its whole forward with it."""
    trace = trace_model(WithoutGenerator(), inputs)
    assert not trace.regions and any(node.short == "randn" for node in trace.graph.nodes)
