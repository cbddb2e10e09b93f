"""Fixtures of the tests that plan the same models several times."""

from collections.abc import Iterator

import pytest

from tests.support import remembered


@pytest.fixture(scope="module")
def traces_remembered() -> Iterator[None]:
    with remembered.traces_remembered():
        yield
