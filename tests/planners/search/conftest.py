"""Fixtures of the tests that search many problems."""

from __future__ import annotations

import pytest

from autopipe.planners.search.relax import Relaxations


@pytest.fixture
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal looks for no change that would fit, which takes long: `test_relax` is about it."""
    monkeypatch.setattr(Relaxations, "that_help", lambda self: [])
