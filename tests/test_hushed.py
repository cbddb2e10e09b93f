"""What is heard while a model is built and traced: its author, and no library."""

import warnings

import pytest
import torch
from torch import nn

from autopipe.hushed import libraries_hushed
from autopipe.source import bare
from tests.staged import trace_model


class Talker(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        warnings.warn("an old name", DeprecationWarning, stacklevel=1)
        print("forward")
        self.calls = self.layer(x)  # of which torch.export warns
        return self.calls.mean()


def inputs(rows):
    return {"x": torch.ones(rows, 3)}


def test_the_users_own_warning_is_given_once_and_no_other():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace_model(Talker(), inputs)
    assert [(str(w.message), w.filename) for w in caught] == [("an old name", __file__)]


def test_what_a_model_prints_goes_to_stderr(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace_model(Talker(), inputs)
    out, err = capfd.readouterr()
    assert out == ""
    assert set(err.splitlines()) == {"forward"}


def test_transformers_says_nothing_while_a_model_is_built(capfd):
    def model():
        from transformers.utils import logging

        logging.get_logger("transformers.modeling_utils").warning("unrecognized")
        warnings.warn_explicit("old", UserWarning, torch.__file__, 1)
        return nn.Linear(3, 3)

    bare(model)
    assert capfd.readouterr() == ("", "")


def test_an_error_leaves_everything_as_it_was():
    import logging

    level = logging.getLogger("transformers").level
    with pytest.raises(ValueError, match="no"), libraries_hushed(heard=True):
        raise ValueError("no")
    assert logging.getLogger("transformers").level == level
