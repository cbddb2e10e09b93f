"""Traces that are kept for a run of the tests are what tracing gives, whoever made them."""

import os
import pickle
from pathlib import Path

import pytest

from autopipe.batch.description import describe
from autopipe.frontend.construct import build_fake
from autopipe.tracing.trace import trace
from autopipe.tracing.traced import Trace
from tests.support import traces
from tests.support.long import chosen
from tests.support.staged import trace_model, traced
from tests.support.zoo import ZOO


def from_constructor(name: str) -> Trace:
    """As `inprocess` and the pipes trace a model; `staged` does it from the model itself."""
    case = ZOO[name]
    specs = describe(case.inputs(2), case.inputs(3), 2, 3)
    return trace(build_fake(case.model), case.inputs(2), specs, case.loss, real=case.model)


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("name", chosen(ZOO, now=("unet", "mask", "keywords", "dict")))
def test_a_model_and_its_constructor_have_one_trace(name: str) -> None:
    case = ZOO[name]
    assert from_constructor(name) == trace_model(case.model(), case.inputs, case.loss)
    assert from_constructor(name) == traced(name), "nor has what is kept changed"


def test_what_comes_back_from_disk_is_what_was_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made once; a process that finds the file does not trace."""
    monkeypatch.setitem(os.environ, traces.FOLDER, str(tmp_path))
    monkeypatch.setattr(traces, "FOUND", {})
    made = traces.kept("a model", lambda: from_constructor("keywords"))
    assert traces.kept("a model", never) is made
    (file,) = tmp_path.iterdir()
    assert pickle.loads(file.read_bytes()) == made
    monkeypatch.setattr(traces, "FOUND", {})
    assert traces.kept("a model", never) == made


def never() -> Trace:
    raise AssertionError("it was traced before")
