"""Fixtures of the tests that run a model without a graph."""

import pytest

from autopipe.planners.driver import against_eager


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """A large model is not run while planning."""
    if request.param == "large":
        monkeypatch.setattr(against_eager, "MOST_FLOPS", 0)
