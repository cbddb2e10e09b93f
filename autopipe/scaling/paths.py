"""The step of a plan as the longest of a few paths: sums of multiples of its costs.

    step = max(3 F0 + 3 B0 + sum0,  F0 + 3 F1 + 3 B1 + B0 + 2 latency + ...,  ...)

The walk through a plan's programs (`schedules.event_graph`) adds costs and takes the later of two
times. Here it walks, at a few points, with numbers that remember their summands, and keeps the path
that is the longest at each point. Each of these is a path whatever the costs, so the largest of
them is never more than the step, and equals the step near any of the points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autopipe.scaling.sheet import Form
from autopipe.schedules import deadlock
from autopipe.schedules.event_graph import Delays, EventGraph, walk
from autopipe.schedules.instructions import Channel, Instruction, Kind, Programs

NOTHING: Form = ()

Costed = Mapping[Kind, Sequence[Form]]
"""Of each kind of instruction that takes time, the costs of one of each stage."""


class Remembered(float):
    """Seconds that remember which costs they are the sum of.

    Attributes:
        before: the seconds to which `added` was added; None: there were none.
        added: costs.
    """

    before: Remembered | None
    added: Form

    @staticmethod
    def of(seconds: float, added: Form, before: Remembered | None = None) -> Remembered:
        """The seconds `before` with the costs `added`."""
        found = Remembered(seconds)
        found.before, found.added = before, added
        return found

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Remembered):
            return self if other == 0 else NotImplemented
        assert other.before is None, "what is added is a single cost"
        return Remembered.of(float(self) + float(other), other.added, self)

    __radd__ = __add__

    def form(self) -> Form:
        """The number of times that each cost is in the sum."""
        found: Counter[int] = Counter()
        node: Remembered | None = self
        while node is not None:
            for number, times in node.added:
                found[number] += times  # type: ignore[assignment]  # halves of a backward
            node = node.before
        return tuple(sorted(found.items()))


def paths(
    programs: Programs,
    costed: Costed,
    links: dict[Channel, tuple[Form, Form]],
    points: Iterable[Sequence[float]],
) -> tuple[Form, ...]:
    """The paths that are the longest at some of the points.

    Args:
        programs: with their transfers.
        costed: what instructions take.
        links: of each channel between ranks its latency and how long it occupies the wire.
        points: the values of all costs.

    Raises:
        ScheduleError: the programs cannot run to their end.
    """
    graph = deadlock.graph(programs)
    found: dict[Form, None] = {}
    for values in points:
        walked = walk(graph, _delays(graph, costed, links, values))
        last = max((ends[-1] for ends in walked.ends if ends), default=0.0)
        found[last.form() if isinstance(last, Remembered) else NOTHING] = None
    return tuple(found)


def _delays(
    graph: EventGraph,
    costed: Costed,
    links: dict[Channel, tuple[Form, Form]],
    values: Sequence[float],
) -> Delays:
    def cost(form: Form) -> float:
        return Remembered.of(sum(values[number] * times for number, times in form), form)

    each = {kind: [cost(form) for form in forms] for kind, forms in costed.items()}

    def spent(instruction: Instruction) -> float:
        kind = instruction.kind
        return each[kind][instruction.stage] if kind in each else 0.0

    ends = [links.get(channel, (NOTHING, NOTHING)) for channel in graph.channels]
    return Delays(
        [[spent(instruction) for instruction in program] for program in graph.programs],
        [cost(latency) if latency else 0.0 for latency, _ in ends],
        [cost(carrying) if carrying else 0.0 for _, carrying in ends],
    )
