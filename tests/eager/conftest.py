"""Fixtures of the tests of how a model is run as it is."""

import pytest

from autopipe.planners.driver import against_eager


@pytest.fixture(params=["small", "large"])
def size(request, monkeypatch):
    """A large model is not run while planning."""
    if request.param == "large":
        monkeypatch.setattr(against_eager, "MOST_FLOPS", 0)
