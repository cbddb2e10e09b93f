"""Dry-run deep stages by shallow ones, which have two of many equal groups of blocks.

    a stage of seven      | b0 | b1 | b2 | b3 | b4 | b5 | b6 |     B(7) = B(2) + 5 (B(3) - B(2))
    two of its groups     | b0 | b6 |                              B(2)
    and a third one       | b0 | b1 | b6 |                         B(3)

A group is usually one block. B is bytes: a group saves storages of its own. Its inputs look like
those of the group before, so each further group saves what the third one does (`ir.repeats` finds
equal groups; a run of the whole graph tells whether their values look the same).
Stages with equal groups and equal received tensors share the measurement of the third group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values
from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage, partition
from autopipe.ir.repeats import Run, Uneven, leave_out, run_of
from autopipe.ir.stage_classes import Forms, Group, alike
from autopipe.joint.split_backward_layouts import JointDryRun
from autopipe.joint.wanted import Wanted
from autopipe.stages.dry_run import Known, Rehearsal, rehearse
from autopipe.util import shortcuts

KEPT = 2
"""Groups of a run that are kept: the first and the last. A row has at least two others: for fewer,
a separate run with a third one is not worth it."""


def rehearse_deep(
    flow: Dataflow,
    stages: Sequence[Stage],
    blocks: Sequence[Block],
    rows: int,
    *,
    recompute: Collection[str] = (),
    precision: str = "fp32",
    wanted: Wanted | None = None,
    even: bool = True,
    known: Known | None = None,
) -> Rehearsal:
    """The same result as `rehearse` (with `wanted`: as `JointDryRun`), in less time.

    Args:
        stages: a partition of the graph.
        recompute, precision, known: as for `rehearse`.
        wanted: how backwards run that autograd does not; None: autograd runs them.
        even: whether equal groups make values that look the same; if not, all groups are run.

    Raises:
        PlanError: a block to recompute cannot be recomputed with equal results.
    """
    known = {} if known is None else known
    rehearsing = _DeepRehearsing(
        flow, stages, blocks, rows, frozenset(recompute), precision, wanted, known
    )
    deep = rehearsing.deep() if even and shortcuts.on("repeated stages") else []
    try:
        return rehearsing.extended(deep) if deep else rehearsing.shallow(())
    except Uneven:
        return rehearsing.shallow(())


@dataclass(frozen=True)
class _Deep:
    """A run inside a stage.

    Attributes:
        form: a key of its groups' class, equal for another stage's run of equal groups.
        given: the values from outside that the first group reads.
        far: the values that the second group reads from before the first; all groups read them.
    """

    stage: Stage
    run: Run
    form: Hashable
    given: tuple[Ref, ...]
    far: tuple[Ref, ...]


@dataclass(frozen=True)
class _DeepRehearsing:
    """One dry run of stages of any depth."""

    flow: Dataflow
    stages: Sequence[Stage]
    blocks: Sequence[Block]
    rows: int
    recompute: frozenset[str]
    precision: str
    wanted: Wanted | None
    known: Known

    def deep(self) -> list[_Deep]:
        """The runs from which groups can be left out."""
        forms = Forms(self.flow, self.blocks)
        return [
            _Deep(
                stage,
                run,
                (row.form, away),
                self._earlier(row.groups[0], run.first),
                self._earlier(row.groups[1], run.first),
            )
            for (stage, away), blocks in groupby(self.blocks, self._where)
            if stage is not None
            for row in alike(forms, [*blocks], self.recompute)
            if (run := run_of(self.flow, row, KEPT)) is not None
        ]

    def _where(self, block: Block) -> tuple[Stage | None, bool]:
        """The stage that contains a block completely, and whether it offloads what it keeps."""
        stage = self.stages[bisect_right([s.first for s in self.stages], block.first) - 1]
        away = self.wanted is not None and block.path in self.wanted.offload
        return stage if block.stop <= stage.stop else None, away

    def _earlier(self, group: Group, before: int) -> tuple[Ref, ...]:
        """The values that a group reads and that are made before a position."""
        nodes = self.flow.graph.nodes[group[0].first : group[-1].stop]
        refs = dict.fromkeys(v for node in nodes for v in node.values() if isinstance(v, Ref))
        return tuple(ref for ref in refs if self.flow.position(ref) < before)

    def extended(self, deep: Sequence[_Deep]) -> Rehearsal:
        """Dry-run two groups of each run, and add the bytes of all further groups.

        Raises:
            Uneven: the bytes of a third group do not hold for the others.
        """
        rehearsal = least = self.shallow([each.run for each in deep])
        keys = [(each.form, self._circumstances(each, least)) for each in deep]
        firsts: dict[Hashable, _Deep] = {}
        for each, key in zip(deep, keys, strict=True):
            firsts.setdefault(key, each)

        def one_more(longer: _Deep) -> Mapping[str, int]:
            runs = [replace(d.run, kept=KEPT + 1) if d is longer else d.run for d in deep]
            return _difference(self.shallow(runs), least, longer.stage.index)

        of_one_more = {key: one_more(first) for key, first in firsts.items()}
        for each, key in zip(deep, keys, strict=True):
            rehearsal = _with_more(
                rehearsal, each.stage.index, of_one_more[key], each.run.count - KEPT
            )
        return rehearsal

    def _circumstances(self, one: _Deep, rehearsal: Rehearsal) -> Hashable:
        """Everything else that a group's bytes depend on.

        These are the layouts of tensors from other stages and, for joint graphs, whether gradients
        go to other stages: a first half makes only those.
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
        back &= gradient_values(self.flow.graph)
        return tuple(looks.get(ref) for ref in one.far), tuple(ref in back for ref in one.given)

    def shallow(self, runs: Sequence[Run]) -> Rehearsal:
        """Dry-run the stages without the groups that the runs leave out.

        Raises:
            Uneven: without these groups, other tensors cross the cuts.
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
        there = {block.path for block in blocks}.union(flow.graph.index)
        again = self.recompute & there
        joint = None
        if self.wanted is not None:
            how = self.precision, self.wanted, self.known
            joint = JointDryRun(flow.graph, blocks, self.rows, sorted(again), *how)
            if len(stages) == 1 and (alone := joint.alone(stages[0])) is not None:
                return alone
        found = rehearse(
            flow.graph,
            stages,
            blocks,
            self.rows,
            recompute=again,
            precision=self.precision,
            known=self.known,
        )
        return found if joint is None else joint.instead(stages, found)


ADDED = "saved", "stash", "fresh"
"""The byte counts to which one more group adds."""


def _difference(longer: Rehearsal, least: Rehearsal, stage: int) -> dict[str, int]:
    """The bytes that the longer dry run has more in a stage, by field.

    Raises:
        Uneven: the bytes of `made`, or momentary ones, depend on the number of groups.
    """
    if (longer.made, longer.momentary) != (least.made, least.momentary):
        raise Uneven
    return {
        name: getattr(longer, name)[stage] - getattr(least, name)[stage]
        for name in ADDED
        if getattr(least, name)
    }


def _with_more(found: Rehearsal, stage: int, more: Mapping[str, int], times: int) -> Rehearsal:
    """A dry run's result with `times` times the bytes `more` added to a stage."""
    sizes: dict[str, Any] = {}
    for name, added in more.items():
        before = getattr(found, name)
        sizes[name] = (*before[:stage], before[stage] + times * added, *before[stage + 1 :])
    return replace(found, **sizes)
