"""The bytes a rank holds while its program runs, instruction by instruction, before it ever runs.

A program's order is fixed, so its fullest moment is too; it is found by walking it:

    POST   + the buffer (transfers)            F    + what is kept, + what leaves (transfers)
    WAIT   the buffer becomes an activation    B    - what was kept and had arrived
    FREE   - what left, once all its sends are through

If B is split, I frees the tensors that only I needs, and W frees the rest, received tensors and
gradients included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autopipe.schedules.instructions import Flow, Instruction, Kind, Program


@dataclass(frozen=True)
class Sizes:
    """Bytes of one micro-batch in one stage.

    Attributes:
        kept: bytes saved for backward, without received tensors.
        arriving: for each flow and source stage, the bytes of each tensor that comes from there.
        leaving: for each flow and target stage, the bytes of each tensor that goes there.
        stash: bytes held from I to W if backward is split.
        fresh: the bytes of the stash that I has made; the rest was kept from F.
        made: the most bytes that a backward, or one half of it, makes beyond those that it has
            freed by then.
        momentary: further bytes at the fullest moment of a forward, freed within it.
    """

    kept: int
    arriving: Mapping[tuple[Flow, int], Mapping[Hashable, int]]
    leaving: Mapping[tuple[Flow, int], Mapping[Hashable, int]]
    stash: int = 0
    fresh: int = 0
    made: int = 0
    momentary: int = 0


Held = Counter[tuple[int, str]]
"""Bytes by stage and what they are for, "activations" or "transfers"."""


class Moment(NamedTuple):
    """The instruction at which a rank holds most, and what; `at` is None if it never holds any."""

    at: Instruction | None
    held: Held


def fullest_moment(program: Program, sizes: Mapping[int, Sizes]) -> Moment:
    """The first instruction at which a rank holds most, all its stages together."""
    peak, most = Moment(None, Counter()), 0
    for instruction, now, held in walk(program, sizes):
        if now > most:
            most, peak = now, Moment(instruction, held.copy())
    return peak


def walk(program: Program, sizes: Mapping[int, Sizes]) -> Iterator[tuple[Instruction, int, Held]]:
    """Yield each instruction with the most bytes that the rank holds while it runs: their sum, and
    a counter by stage and purpose, which the next step changes in place."""
    walks = {stage: _Walk(stage, of, program) for stage, of in sizes.items()}
    held: Held = Counter()
    now = 0
    for instruction in program:
        if instruction.stage not in walks:
            continue
        begins, ends = walks[instruction.stage].step(instruction)
        for kind, size in begins.items():
            held[instruction.stage, kind] += size
            now += size
        yield instruction, now, held
        for kind, size in ends.items():
            held[instruction.stage, kind] -= size
            now -= size


class _Walk:
    """One stage's part of the walk: the bytes that each instruction allocates and frees."""

    def __init__(self, stage: int, sizes: Sizes, program: Program) -> None:
        self.sizes = sizes
        kinds = {i.kind for i in program if i.stage == stage}
        self.split = Kind.BACKWARD_WEIGHT in kinds
        self.waited: dict[int, set[Hashable]] = defaultdict(set)
        self.unsent: Counter[tuple[Flow, int]] = Counter()
        self.targets = Counter(
            (flow, k) for kind, s, k, flow, _ in program if s == stage and kind is Kind.SEND
        )
        self.outgoing = {flow: sum(_distinct(sizes.leaving, flow).values()) for flow in Flow}
        self.arrived = sum(_distinct(sizes.arriving, Flow.ACTIVATION).values())
        self.gradients = _distinct(sizes.arriving, Flow.GRADIENT)

    def step(self, instruction: Instruction) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes that an instruction allocates, and bytes that are free when it has ended."""
        kind, _, k, flow, peer = instruction
        sizes = self.sizes
        if flow is None or peer is None:
            if kind is Kind.FORWARD:
                self.unsent[Flow.ACTIVATION, k] = self.targets[Flow.ACTIVATION, k]
                begins = {
                    "activations": sizes.kept + sizes.momentary,
                    "transfers": self.outgoing[Flow.ACTIVATION],
                }
                return begins, {"activations": sizes.momentary}
            if kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
                self.unsent[Flow.GRADIENT, k] = self.targets[Flow.GRADIENT, k]
                begins = {
                    "activations": sizes.fresh + sizes.made,
                    "transfers": self.outgoing[Flow.GRADIENT],
                }
                over = sizes.kept + sizes.made
                if self.split:
                    return begins, {"activations": over - (sizes.stash - sizes.fresh)}
                return begins, self._last(k, over)
            if kind is Kind.BACKWARD_WEIGHT:
                made = sizes.made if sizes.stash else 0
                return {"activations": made}, self._last(k, sizes.stash + made)
            return {}, {}
        if kind is Kind.POST:
            return {"transfers": sum(sizes.arriving[flow, peer].values())}, {}
        if kind is Kind.WAIT and flow is Flow.ACTIVATION:
            size = sum(sizes.arriving[flow, peer].values())
            return {"transfers": -size, "activations": size}, {}
        if kind is Kind.WAIT:
            again = 0
            for ref, size in sizes.arriving[flow, peer].items():
                if ref in self.waited[k]:  # added to the gradient that is there already
                    again += size
                self.waited[k].add(ref)
            return {"transfers": -again}, {}
        if kind is Kind.FREE:
            self.unsent[flow, k] -= 1
            if self.unsent[flow, k] == 0:
                return {}, {"transfers": self.outgoing[flow]}
        return {}, {}

    def _last(self, k: int, activations: int) -> dict[str, int]:
        """The bytes that the last part of a micro-batch's backward frees."""
        gradients = sum(self.gradients[ref] for ref in self.waited.pop(k, ()))
        return {"activations": activations + self.arrived, "transfers": gradients}


def _distinct(
    channels: Mapping[tuple[Flow, int], Mapping[Hashable, int]], flow: Flow
) -> dict[Hashable, int]:
    """The bytes of each tensor of a flow, once even if it goes to several stages."""
    return {
        ref: size for (f, _), refs in channels.items() if f is flow for ref, size in refs.items()
    }
