"""The bytes a stage holds while its program runs, instruction by instruction, before it ever runs.

A program's order is fixed, so its fullest moment is too; it is found by walking it:

    POST   + the buffer (transfers)            F    + what is kept, + what leaves (transfers)
    WAIT   the buffer becomes an activation    B    - what was kept and had arrived
    FREE   - what left, once all its sends are through
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autopipe.schedule import Flow, Kind, Program


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch in one stage.

    Attributes:
        kept: saved for backward, received tensors not counted.
        arriving: of each channel, the bytes of each tensor that comes from that stage.
        leaving: of each channel, the bytes of each tensor that goes to that stage.
    """

    kept: int
    arriving: Mapping[tuple[Flow, int], Mapping[Hashable, int]]
    leaving: Mapping[tuple[Flow, int], Mapping[Hashable, int]]


def footprint(program: Program, sizes: Sizes) -> Counter[str]:
    """Bytes of "activations" and "transfers" at the program's fullest moment."""
    held: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    waited: dict[int, set[Hashable]] = defaultdict(set)
    unsent: Counter[tuple[Flow, int]] = Counter()
    targets = Counter(flow for flow, _ in sizes.leaving)
    outgoing = {flow: sum(_distinct(sizes.leaving, flow).values()) for flow in Flow}
    arrived = sum(_distinct(sizes.arriving, Flow.ACTIVATION).values())
    gradients = _distinct(sizes.arriving, Flow.GRADIENT)

    for kind, _, k, flow, peer in program:
        ended: Counter[str] = Counter()  # held while the instruction runs, gone after it
        if flow is None or peer is None:
            if kind is Kind.FORWARD:
                held["activations"] += sizes.kept
                held["transfers"] += outgoing[Flow.ACTIVATION]
                unsent[Flow.ACTIVATION, k] = targets[Flow.ACTIVATION]
            elif kind is Kind.BACKWARD:
                held["transfers"] += outgoing[Flow.GRADIENT]
                unsent[Flow.GRADIENT, k] = targets[Flow.GRADIENT]
                ended["activations"] = sizes.kept + arrived
                ended["transfers"] = sum(gradients[ref] for ref in waited.pop(k, ()))
        elif kind is Kind.POST:
            held["transfers"] += sum(sizes.arriving[flow, peer].values())
        elif kind is Kind.WAIT and flow is Flow.ACTIVATION:
            held["transfers"] -= sum(sizes.arriving[flow, peer].values())
            held["activations"] += sum(sizes.arriving[flow, peer].values())
        elif kind is Kind.WAIT:
            for ref, size in sizes.arriving[flow, peer].items():
                if ref in waited[k]:  # added to the gradient that is there already
                    held["transfers"] -= size
                waited[k].add(ref)
        elif kind is Kind.FREE:
            unsent[flow, k] -= 1
            if unsent[flow, k] == 0:
                ended["transfers"] = outgoing[flow]
        if held.total() > peak.total():
            peak = held.copy()
        held.subtract(ended)
    return peak


def _distinct(
    channels: Mapping[tuple[Flow, int], Mapping[Hashable, int]], flow: Flow
) -> dict[Hashable, int]:
    """Every tensor of a flow once, whatever number of stages it goes to or comes from."""
    return {
        ref: size for (f, _), refs in channels.items() if f is flow for ref, size in refs.items()
    }
