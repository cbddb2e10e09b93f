"""A torch that is newer than any that autopipe was tried with is named where a command fails."""

import pytest
import torch

from autopipe.cli import entry
from autopipe.errors import PlanError
from autopipe.util.version import untried_torch


@pytest.mark.parametrize("known", ["2.11.0", "2.13.0+cpu", "2.15.2"])
def test_a_torch_that_was_tried(known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", known)
    assert untried_torch() is None


@pytest.mark.parametrize("new", ["2.16.0", "2.20.0a0+git1f2e3d4", "3.0.0"])
def test_a_torch_that_nobody_has_tried(
    new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", new)
    with pytest.raises(SystemExit):
        entry._end(PlanError("no model can be traced", hint="ask somebody"))
    assert capsys.readouterr().err == (
        "error: no model can be traced\n\nhint: ask somebody\n"
        f"note: this is torch {new}; autopipe was tried with 2.15 at the newest\n"
    )
