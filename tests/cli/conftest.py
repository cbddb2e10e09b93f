"""Fixtures of the tests that type commands."""

import pytest

from autopipe.util import codec
from tests.support.inprocess import machine


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a cluster of four processes on this machine."""
    path = tmp_path_factory.mktemp("cluster") / "four.json"
    codec.save(machine(4), path)
    return str(path)
