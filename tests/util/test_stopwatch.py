"""Seconds by name."""

from autopipe.util.stopwatch import Stopwatch


def test_a_name_that_comes_again_adds_up_where_it_first_came() -> None:
    watch = Stopwatch()
    watch.add("traced", 1.0)
    watch.add("costs", 0.5)
    watch.add("traced", 2.0)
    assert str(watch) == "traced 3.0 s, costs 0.5 s"


def test_what_fails_has_taken_its_time_too() -> None:
    watch = Stopwatch()
    try:
        with watch("search"):
            raise ValueError
    except ValueError:
        pass
    assert list(watch.seconds) == ["search"]
    assert watch.seconds["search"] >= 0
