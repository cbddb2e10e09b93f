"""What cannot be captured is refused in a sentence that names the user's own line."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from autopipe import batches
from autopipe.capture import Program
from autopipe.errors import CaptureError
from tests.staged import trace_model
from tests.test_reads import Double
from tests.zoo import ZOO


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = 0

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
    def body(self, x, hidden):
        self.calls += 1
        if self.calls > 1 and x.sum() > 0:  # here
            return hidden * 2
        return hidden


class FewRows(Model):
    def body(self, x, hidden):
        return hidden if x.shape[0] > 2 else hidden.square()


class Divides(Model):
    def body(self, x, hidden):
        return hidden.view(2, -1, 3)  # here


def inputs(rows):
    return {"x": torch.ones(rows, 3)}


SENTENCES = {
    Numpy: "the model cannot be captured: ",
    Mistake: "the model cannot be captured: NameError: name 'undefined' is not defined",
    Shapes: "the model cannot be captured: RuntimeError: ",
    Moody: "Python reads a tensor here (__bool__), where the record of the model's reads has no",
}


@pytest.mark.parametrize("kind", SENTENCES, ids=lambda kind: kind.__name__)
def test_the_users_own_line_is_named(kind):
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "here" in text)
    with pytest.raises(CaptureError) as error:
        trace_model(kind(), inputs, real=None)
    assert str(error.value).startswith(f"{__file__}:{line}"), str(error.value)
    assert SENTENCES[kind] in str(error.value)
    assert error.value.hint


@pytest.mark.parametrize("kind", [FewRows, Divides], ids=lambda kind: kind.__name__)
def test_a_batch_that_export_fixes_to_some_rows_is_refused(kind):
    with pytest.raises(CaptureError, match=r"cannot be captured for every number of rows: .*rows"):
        trace_model(kind(), inputs)


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
    program = Program(model, small, None, batches.describe(small, large, 2, 3))
    program(*(value for value in small.values() if isinstance(value, torch.Tensor)))
    assert (made[0] is not None) == bool(asked)
    assert model.config.use_cache is True
