"""Formulas as data: folded, and evaluated."""

from autopipe.scaling.expressions import largest, product, total, value


def test_numbers_are_folded() -> None:
    assert total(1.0, "b", 2.0) == ("+", 3.0, "b")
    assert total(total("b", 1.0), -1.0) == "b"
    assert product(2.0, product(3.0, "b")) == ("*", 6.0, "b")
    assert product(0.0, "b") == 0.0 and total() == 0.0
    assert largest(1.0, "b", 2.0) == ("max", "b", 2.0)
    assert largest(1.0, 2.0) == 2.0


def test_operators_do_what_they_are_called() -> None:
    at = {"b": 3.0, "s": 5.0}
    assert value(("+", 1.0, ("*", 2.0, "b", ("^", "s", 2.0))), at) == 151.0
    assert value(("max", "b", ("min", "s", 4.0)), at) == 4.0
    assert value(("floor", ("*", "s", 0.5)), at) == 2.0
