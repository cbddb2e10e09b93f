"""The levels of a block: what it keeps for backward and what runs again, from all to least kept.

    kept
      |  * nothing again
      |     * attention                    each level keeps the least for its seconds, and
      |         * attention, up            no mixture of two others keeps less
      |                     *
      +--------------------------- seconds in backward

With a price of p bytes a second on what runs again, the least of bytes kept and prices paid is a
minimum cut (`joint.least_cut`), found exactly. Prices from endless to nothing give all levels on
the lower convex hull of (seconds, bytes). Between two levels, any price that tells them apart is
that of the line through them: a third one lies below the line, or there is none (Eisner and
Severance, JACM 1976). Checkmate (Jain et al., MLSys 2020) solves the problem for a whole model at
once, in hours; here blocks are alike, and a planner mixes their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from autopipe.joint.joint_graph import JointGraph
from autopipe.joint.least_cut import FREE, Network, Price
from autopipe.joint.run_again import is_cheap, networks

CLOSE = 1e-6
"""Two lines that are this close, as a share of the bytes at stake, are the same."""


@dataclass(frozen=True)
class OpLevel:
    """A level of a block: what runs again, and what is then kept.

    Attributes:
        again: the groups of calls that run again in backward.
        seconds: the seconds of these calls.
        kept: bytes that forward keeps, without those that it keeps at every level.
        fixed: the part of `kept` that does not grow with the rows.
    """

    again: frozenset[int]
    seconds: float
    kept: int
    fixed: int


def levels(
    graph: JointGraph,
    needed: Iterable[fx.Node],
    group: Callable[[fx.Node], int | None],
    seconds: Mapping[int, float],
    fixed: Callable[[fx.Node], bool],
    *,
    least: bool,
) -> dict[str, tuple[OpLevel, ...]]:
    """The levels of each block, by path; at the first one nothing with a price runs again.

    Args:
        needed: the values of forward that backward reads.
        group: gives a call's group; None: the call may not run again.
        seconds: the seconds of each group.
        fixed: whether a value's bytes do not grow with the rows.
        least: whether cheap calls run again at no cost, as in a compiled stage.
    """

    def price(call: fx.Node) -> Price:
        return FREE if least and is_cheap(call) else group(call)

    return {
        segment: hull(network, seconds, fixed)
        for segment, network, _ in networks(graph, needed, price)
        if segment is not None
    }


def hull(
    network: Network, seconds: Mapping[int, float], fixed: Callable[[fx.Node], bool]
) -> tuple[OpLevel, ...]:
    """The levels of one block, the one that keeps most first.

    Args:
        seconds, fixed: as `levels` has them.
    """
    seconds_of = {group: seconds[group] for group in network.groups}

    def at(price: float | None) -> OpLevel:
        prices = {} if price is None else {g: price * s for g, s in seconds_of.items()}
        cut = network.least(prices)
        always = sum(size for value, size in cut.sizes.items() if fixed(value))
        return OpLevel(cut.paid, sum(seconds_of[g] for g in cut.paid), cut.bytes, always)

    def between(slow: OpLevel, fast: OpLevel) -> list[OpLevel]:
        """The levels that keep more than `slow` and take longer than `fast`."""
        bytes, time = fast.kept - slow.kept, slow.seconds - fast.seconds
        if bytes <= 0 or time <= 0:
            return []
        price = bytes / time
        middle = at(price)
        below = slow.kept + price * slow.seconds - middle.kept - price * middle.seconds
        if below <= CLOSE * bytes:
            return []
        return [*between(middle, fast), middle, *between(slow, middle)]

    most, least = at(None), at(0.0)
    on_hull = [most]
    # The least cut at price 0 may take longer than another cut that keeps as little.
    for level in sorted((*between(least, most), least), key=lambda level: level.seconds):
        if level.kept < on_hull[-1].kept:
            on_hull.append(level)
    return tuple(on_hull)
