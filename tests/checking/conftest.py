"""Fixtures of the tests that type `autopipe check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autopipe.cli import check
from tests.support import warm
from tests.support.shell import Shell


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """In its folder `net.py`; ranks are forks, which are there sooner."""

    def start(ranks: int, argv: Sequence[str]) -> int:
        return warm.spawn(ranks, ["-m", "autopipe", *argv], tmp_path)

    monkeypatch.setattr(check, "started", start)
    return Shell(tmp_path, monkeypatch, capsys)
