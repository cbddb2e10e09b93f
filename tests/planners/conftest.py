"""What files of tests may ask for that plan the same models again and again."""

from collections.abc import Iterator

import pytest

from tests.support import remembered


@pytest.fixture(scope="module")
def traces_remembered() -> Iterator[None]:
    with remembered.traces_remembered():
        yield
