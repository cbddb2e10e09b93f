"""Commands print what a model's author prints or warns of, and nothing from libraries."""

import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from autopipe.frontend.quiet import command_hushed, libraries_hushed
from autopipe.tracing.source import bare
from tests.support.staged import trace_model


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


# --- a whole command


def test_a_command_shows_the_warnings_of_the_users_files_as_they_come():
    shown = []
    with pytest.MonkeyPatch.context() as patch, command_hushed_over(patch, shown.append):
        warnings.warn("mine", UserWarning, stacklevel=1)
        assert shown == [("mine", __file__)]
        for library in (torch.__file__, pytest.__file__, os.__file__, "sys", "<string>"):
            warnings.warn_explicit("of a library", FutureWarning, library, 1)
        assert shown == [("mine", __file__)]


def test_a_model_traced_in_a_command_is_heard_once():
    shown = []
    with pytest.MonkeyPatch.context() as patch, command_hushed_over(patch, shown.append):
        trace_model(Talker(), inputs)
    assert shown == [("an old name", __file__)]


@contextmanager
def command_hushed_over(patch, tell):
    """A command's block in which all warnings are shown: by `tell`, with their file."""

    def show(message, category, filename, lineno, file=None, line=None):
        tell((str(message), filename))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(warnings, "showwarning", show)
        with command_hushed():
            yield


def test_the_libraries_are_told_to_be_quiet_before_they_are_imported(monkeypatch):
    """In the processes of a command as well; what the user has set stays, and all is as before."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    before, shows = dict(os.environ), warnings.showwarning
    with pytest.raises(ValueError, match="no"), command_hushed():
        assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
        raise ValueError("no")
    assert (dict(os.environ), warnings.showwarning) == (before, shows)


def test_whose_a_warning_is_can_be_told_without_the_libraries():
    code = (
        "import sys\n"
        "from autopipe.frontend.quiet import command_hushed\n"
        "from autopipe.frontend.user_lines import is_own_code\n"
        "with command_hushed(): print(is_own_code('/home/me/model.py'))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n[]\n", done.stderr
