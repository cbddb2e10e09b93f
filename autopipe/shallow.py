"""A rehearsal of deep stages by shallow ones: of many groups of blocks alike two are run.

    a stage of seven      | b0 | b1 | b2 | b3 | b4 | b5 | b6 |     B(7) = B(2) + 5 (B(3) - B(2))
    two of its groups     | b0 | b6 |                              B(2)
    and a third one       | b0 | b1 | b6 |                         B(3)

A group is most often one block. B are bytes: what a group keeps are its own storages. It is given
by the group before what that one was given, so one more keeps what the third does
(`autopipe.shorten` says when groups do the same, and a run of the whole graph whether what they
make looks the same).
Stages with the same groups, to which the same arrives, share what a third one keeps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from autopipe import cost
from autopipe.aside import half_aside
from autopipe.blocks import Block
from autopipe.dataflow import Dataflow, analyse
from autopipe.graph import Ref
from autopipe.halves import rehearse_halves
from autopipe.partition import Stage, partition
from autopipe.rehearsal import Known, Rehearsal, rehearse
from autopipe.shorten import Forms, Group, Run, Uneven, alike, leave_out, run_of

KEPT = 2
"""Groups of a run that stay: the first and the last. A row has two others or more: for fewer it is
not worth running a third one apart."""

SECONDS_A_NODE = {False: 1.3e-3, True: 3.5e-3}
"""That `rehearse` takes, without and with `rehearse_halves` (Llama and T5; 2-core VM, 2026-11)."""


def rehearse_deep(
    flow: Dataflow,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    *,
    recompute: Collection[str] = (),
    precision: str = "fp32",
    halves: bool = False,
    even: bool = True,
    known: Known | None = None,
) -> Rehearsal:
    """What `rehearse` and, with `halves`, `rehearse_halves` say of these stages, in less time.

    Args:
        stages: a partition of the graph.
        recompute, precision, known: as they have them.
        even: whether groups that do the same make what looks the same; if not, all of them are run.

    Raises:
        PlanError: a block to recompute would not do the same again.
    """
    known = {} if known is None else known
    rehearsing = _Rehearsing(
        flow, stages, blocks, rows, frozenset(recompute), precision, halves, known
    )
    deep = rehearsing.deep() if even else []
    try:
        return rehearsing.extended(deep) if deep else rehearsing.shallow(())
    except Uneven:
        return rehearsing.shallow(())


@dataclass(frozen=True)
class _Deep:
    """A run inside a stage.

    Attributes:
        form: what its groups do; equal for another stage's run of the same groups.
        given: what the first of them reads that it has not made.
        far: what the second reads from further away than the first; all of them do.
    """

    stage: Stage
    run: Run
    form: Hashable
    given: tuple[Ref, ...]
    far: tuple[Ref, ...]


@dataclass(frozen=True)
class _Rehearsing:
    """One rehearsal, of stages as deep as one likes."""

    flow: Dataflow
    stages: Sequence[Stage]
    blocks: Sequence[Block]
    rows: int
    recompute: frozenset[str]
    precision: str
    halves: bool
    known: Known

    def deep(self) -> list[_Deep]:
        """The runs of which groups can be left out."""
        forms = Forms(self.flow, self.blocks)
        return [
            _Deep(
                stage,
                run,
                row.form,
                self._earlier(row.groups[0], run.first),
                self._earlier(row.groups[1], run.first),
            )
            for stage, blocks in groupby(self.blocks, self._stage)
            if stage is not None
            for row in alike(forms, [*blocks], self.recompute)
            if (run := run_of(self.flow, row, KEPT)) is not None
        ]

    def _stage(self, block: Block) -> Stage | None:
        """The stage that a block is whole in."""
        stage = self.stages[bisect_right([s.first for s in self.stages], block.first) - 1]
        return stage if block.stop <= stage.stop else None

    def _earlier(self, group: Group, before: int) -> tuple[Ref, ...]:
        """What a group reads that is made before a position."""
        nodes = self.flow.graph.nodes[group[0].first : group[-1].stop]
        refs = dict.fromkeys(v for node in nodes for v in node.values() if isinstance(v, Ref))
        return tuple(ref for ref in refs if self.flow.position(ref) < before)

    def extended(self, deep: Sequence[_Deep]) -> Rehearsal:
        """The rehearsal with two groups of each run, and so many more of each as there are.

        Raises:
            Uneven: a third group does not tell what the others hold.
        """
        found = least = self.shallow([one.run for one in deep])
        keys = [(one.form, self._circumstances(one, least)) for one in deep]
        firsts: dict[Hashable, _Deep] = {}
        for one, key in zip(deep, keys, strict=True):
            firsts.setdefault(key, one)

        def one_more(longer: _Deep) -> Mapping[str, int]:
            runs = [replace(d.run, kept=KEPT + 1) if d is longer else d.run for d in deep]
            return _difference(self.shallow(runs), least, longer.stage.index)

        seconds = SECONDS_A_NODE[self.halves] * (KEPT + 1) * max(one.run.length for one in deep)
        more = dict(zip(firsts, half_aside(one_more, [*firsts.values()], seconds), strict=True))
        for one, key in zip(deep, keys, strict=True):
            found = _with_more(found, one.stage.index, more[key], one.run.count - KEPT)
        return found

    def _circumstances(self, one: _Deep, rehearsal: Rehearsal) -> Hashable:
        """All else that a group's bytes depend on.

        That is how what comes from other stages looks and, for halves, whether gradients go on to
        other stages: the first half makes only those.
        """
        stage, boundaries = one.stage, rehearsal.boundaries
        looks = {
            ref: (b.shape, b.strides, b.dtype, stage.index in b.gradients)
            for ref, b in ((ref, boundaries[ref]) for ref, _ in stage.receives)
        }
        back = {ref for ref, look in looks.items() if look[-1]}
        for node in (self.flow.graph.nodes[position] for position in stage.nodes):
            if any(value in back for value in node.values()):
                back.update(Ref(node.name, number) for number in range(len(node.outputs)))
        back &= cost.gradient_values(self.flow.graph)
        return tuple(looks.get(ref) for ref in one.far), tuple(ref in back for ref in one.given)

    def shallow(self, runs: Sequence[Run]) -> Rehearsal:
        """The rehearsal without the groups that the runs leave out.

        Raises:
            Uneven: then other tensors cross the cuts.
        """
        flow, stages, blocks = self.flow, self.stages, self.blocks
        if runs:
            short = leave_out(flow.graph, sorted(runs, key=lambda run: run.first))
            flow = analyse(short.graph)
            place = {position: number for number, position in enumerate(short.kept)}
            blocks = [
                replace(b, first=place[b.first], stop=place[b.first] + b.stop - b.first)
                for b in blocks
                if b.first in place
            ]
            cuts = [bisect_left(short.kept, stage.first) for stage in stages[1:]]
            stages = partition(flow, cuts)
            if any(
                (one.sends, one.receives) != (other.sends, other.receives)
                for one, other in zip(stages, self.stages, strict=True)
            ):
                raise Uneven
        again = self.recompute.intersection(block.path for block in blocks)
        given = (flow.graph, stages, blocks)
        found = rehearse(
            *given, self.rows, recompute=again, precision=self.precision, known=self.known
        )
        if not self.halves:
            return found
        return rehearse_halves(*given, found, self.rows, sorted(again), self.precision, self.known)


ADDED = "saved", "low", "stash", "fresh"
"""What one more group adds to."""


def _difference(longer: Rehearsal, least: Rehearsal, stage: int) -> dict[str, int]:
    """What the longer one holds more in a stage.

    Raises:
        Uneven: what is made again in backward depends on how many groups there are.
    """
    if longer.recomputed != least.recomputed:
        raise Uneven
    return {
        name: getattr(longer, name)[stage] - getattr(least, name)[stage]
        for name in ADDED
        if getattr(least, name)
    }


def _with_more(found: Rehearsal, stage: int, more: Mapping[str, int], times: int) -> Rehearsal:
    """A rehearsal in which a stage holds so much more so many times."""
    sizes: dict[str, Any] = {}
    for name, added in more.items():
        before = getattr(found, name)
        sizes[name] = (*before[:stage], before[stage] + times * added, *before[stage + 1 :])
    return replace(found, **sizes)
