"""Phases: heard by whoever shows them, in the order in which they begin and end."""

from autopipe.util.progress import Done, phase, shown


class Heard:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, name: str, of: int | None) -> Done:
        self.lines.append(f"{name} of {of}")
        return lambda parts=1: self.lines.append(f"{name} +{parts}")

    def end(self, name: str) -> None:
        self.lines.append(f"{name} ends")


def test_phases_are_heard_where_they_are_shown() -> None:
    heard = Heard()
    with phase("before", 2) as done:
        done()
    with shown(heard), phase("outer") as outer, phase("inner", of=5) as inner:
        inner(3)
        outer()
    assert heard.lines == [
        "outer of None",
        "inner of 5",
        "inner +3",
        "outer +1",
        "inner ends",
        "outer ends",
    ]
