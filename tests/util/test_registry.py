"""A function enters a table under its names, each of which is free."""

from collections.abc import Callable

import pytest

from autopipe.util.registry import entering


def test_a_function_under_all_its_names() -> None:
    table: dict[str, Callable[[], int]] = {}

    @entering(table)("mm", "bmm")
    def product() -> int:
        return 2

    assert table == {"mm": product, "bmm": product}


def test_a_name_that_is_there() -> None:
    with pytest.raises(AssertionError, match="two rules for mm"):
        entering({"mm": int})("mm")(float)
