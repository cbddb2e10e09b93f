"""How the tensors of one step pass through a channel: how far either end of it runs ahead.

    sent      the micro-batches, in the order of the source
    posted    how many receives stand ready when the target waits for its first, its second, ...
    bound     how many sends may be under way

A channel moves its tensors in the order in which the source makes them. Receives are posted in that
order. The target may need the tensors in another order; then all receives up to the next tensor
that it needs are posted. Between stages at which ranks take turns, a channel has only the
micro-batches that both of its ends take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import Channel, Entries, Flow

SENDS_UNDER_WAY = 2
"""How many sends of a channel between neighbours may be under way: one on the wire, one behind."""


def sends_for(depths: Sequence[int]) -> int:
    """How many sends of a channel may be under way in a schedule with these depths.

    If some depth is above 0, a second send keeps the wire busy behind the first. Otherwise a send
    is over long before the next one, and a bound of 1 holds one tensor less of each channel.

    Args:
        depths: one per boundary, or none.
    """
    return SENDS_UNDER_WAY if any(depths) else 1


Side = tuple[int, Flow | None]
"""A stage's forwards (ACTIVATION), its backwards (GRADIENT), or its other instructions (None)."""


def window(channel: Channel, windows: Sequence[int]) -> int:
    """How many receives of `channel` are posted ahead: the widest window of those it spans."""
    low, high = sorted((channel.source, channel.target))
    return max(windows[low:high])


def sends_under_way(channel: Channel, sends_ahead: int = SENDS_UNDER_WAY) -> int:
    """How many sends of `channel` may at least be under way: one more for each boundary it skips.

    A pipeline runs that much further ahead of the far end of a skip connection.
    """
    return sends_ahead + abs(channel.target - channel.source) - 1


class WireLane(NamedTuple):
    """A channel and how the tensors of one step pass through it.

    Attributes:
        sent: micro-batches, in the order of the source and so of the channel.
        posted: how many receives have been posted when the target waits for its first tensor, its
            second, ... and when it has them all.
        bound: how many sends may be under way.
        ready: when each receive has been posted, in the order of the channel, in a run of compute
            alone (`_starts`).
        leaves, comes: of its micro-batches, the number of each in the source's order and in the
            target's; None: it has all of theirs.
    """

    channel: Channel
    sent: Sequence[int]
    posted: list[int]
    bound: int
    ready: list[int]
    leaves: Mapping[int, int] | None = None
    comes: Mapping[int, int] | None = None


def lane_of(
    channel: Channel,
    orders: dict[Side, list[int]],
    starts: dict[Side, list[int]],
    windows: Sequence[int],
    sends_ahead: int,
    entries: Entries,
) -> WireLane:
    """Decide how far either end of a channel runs ahead of the other.

    Receives are ahead by the window, or by all tensors that come before the next one needed.

    A bound of sends stops a source that runs ahead; too small a bound stops it for good, if the
    source is to make something that the target needs before it takes more. So take a run of compute
    alone (`_starts`), count the sends that no receive awaits at a moment, and allow one more. Each
    wait that the bound makes is then for a receive that this run has posted by that time. So the
    transfers keep the order of a run that exists and cannot lock it up, whatever the schedule, the
    skip connections and the windows.
    """
    source, target = (channel.source, channel.flow), (channel.target, channel.flow)
    sent = entries.taken(channel.target, orders[source])
    received = entries.taken(channel.source, orders[target])
    place = {k: number for number, k in enumerate(sent)}
    for k in {*sent} ^ {*received}:
        runner, absent = channel[:2] if k in place else channel[1::-1]
        raise ScheduleError(
            f"stage {runner} runs {channel.flow.value}{k}, and stage {absent}, with which it "
            "exchanges tensors, never does"
        )
    send_starts = _starts_of(sent, source, orders, starts)
    use_starts = _starts_of(received, target, orders, starts)
    between_stages = channel._replace(
        source=entries.stages[channel.source], target=entries.stages[channel.target]
    )
    ahead = window(between_stages, windows)
    counts = (max(number + ahead, place[k] + 1) for number, k in enumerate(received))
    posted = [min(len(sent), count) for count in accumulate(counts, max)] + [len(sent)]

    bound, waits = sends_under_way(between_stages, sends_ahead), 0
    for number, start in enumerate(send_starts):
        while waits < len(use_starts) and use_starts[waits] <= start:
            waits += 1
        bound = max(bound, number - posted[waits] + 1)
    ready = [-1] * posted[0]
    for number, start in enumerate(use_starts):
        ready += [start] * (posted[number + 1] - posted[number])
    return WireLane(
        channel,
        sent,
        posted,
        bound,
        ready,
        None if sent is orders[source] else place,
        None if received is orders[target] else {k: number for number, k in enumerate(received)},
    )


def _starts_of(
    some: Sequence[int],
    side: Side,
    orders: dict[Side, list[int]],
    starts: dict[Side, list[int]],
) -> list[int]:
    """The starts of some of a side's micro-batches, as far as they are known."""
    if some is orders[side]:
        return starts[side]
    those = set(some)
    return [start for k, start in zip(orders[side], starts[side], strict=False) if k in those]
