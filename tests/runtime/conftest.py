"""A pipe that is trained."""

import sys
from pathlib import Path
from typing import Any

import pytest

import autopipe
from autopipe import Pipe
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from tests.support.inprocess import machine
from tests.support.pipes import traced_once
from tests.support.trained import MODEL, Load


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, Plan]) -> Load:
    """A pipe of one stage for a model file with more functions, in batches of 8 rows."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(more: str = "", **asked: Any) -> tuple[Pipe, ModelFile]:
        (tmp_path / "net.py").write_text(MODEL + more)
        file = model_file.load(str(tmp_path / "net.py"))
        with traced_once("a net that is trained"):
            if str(asked) not in made:
                made[str(asked)] = autopipe.plan(
                    file.model, file.inputs, loss=file.loss, cluster=machine(1), batch_size=8,
                    micro_batches=2, **asked,
                )  # fmt: skip
            return autopipe.parallelize(file.model, made[str(asked)], loss=file.loss), file

    return make


@pytest.fixture(scope="module")
def made() -> dict[str, Plan]:
    """The plans that were made, by what was asked: what more the file says is not planned."""
    return {}
