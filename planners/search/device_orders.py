"""Which groups of devices may hold a pipeline's stages, and in which order.

Groups of one class are alike and are used in rank order, so that an order is a row of classes:

    groups    0 1 2 3        classes  A: 0     B: 1 2     C: 3
    A B C     0 1 3          B B A    1 2 0          C A B    3 0 1 ...
"""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.planners.model.places import chunks_of
from autopipe.planners.model.problem import Config, Problem

Classes = tuple[tuple[int, ...], ...]
"""Numbers of groups, by class."""


def classes(problem: Problem, config: Config) -> Classes:
    """The classes of a config's groups; a single class where only one order is possible.

    That is where devices are alike, and where a device holds several stages.
    """
    machine = problem.machine
    if machine.alike or chunks_of(problem.constraints, config.schedule, config.chunks) > 1:
        return (tuple(range(config.pp)),)
    found: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(machine.groups(config.dp)):
        found.setdefault((group.kind, group.memory), []).append(number)
    return tuple(map(tuple, found.values()))


def orders(problem: Problem, config: Config) -> Iterator[tuple[int, ...]]:
    """Every order of a config's groups."""
    known = classes(problem, config)

    def further(order: tuple[int, ...], used: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == config.pp:
            yield order
            return
        for kind, groups in enumerate(known):
            if used[kind] < len(groups):
                taken = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
                yield from further((*order, groups[used[kind]]), taken)

    return further((), (0,) * len(known))
