"""Find the moments at which a rank may hold most, each as a sum of a micro-batch's sizes.

    stage 0 of two, 1F1B     2 kept + 3 x        x: a tensor that goes to stage 1
                             2 kept + 2 x + ...  whichever is more, by the sizes

A program's order is fixed, so the bytes held at an instruction are a sum of sizes, each a number of
times. These numbers come from walks (`schedules.peak_memory`) with one size larger than the others.
A moment is dropped if another one holds at least as many of every size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.planfile.contents import Plan
from autopipe.scaling.sheet import Moment
from autopipe.schedules.instructions import Flow, Program
from autopipe.schedules.peak_memory import Sizes, walk

OWN = 5
"""Sizes of a stage itself, as `peak_memory.Sizes`: kept, stash, fresh, made, momentary."""


@dataclass(frozen=True)
class Numbering:
    """Numbers for all sizes that a plan's memory depends on, those of its stages first.

    Attributes:
        stages: how many stages there are; each has `OWN` sizes.
        tensors: the number of the size of each tensor that crosses between stages, by name.
    """

    stages: int
    tensors: Mapping[str, int]

    @staticmethod
    def of(plan: Plan) -> Numbering:
        """Number the sizes of a plan."""
        names = dict.fromkeys(sent.name for stage in plan.stages for sent in stage.sends)
        first = OWN * len(plan.stages)
        return Numbering(len(plan.stages), {n: first + at for at, n in enumerate(names)})

    def sizes(self, plan: Plan, stage: int, values: Sequence[int]) -> Sizes:
        """A stage's sizes where all of them have these values."""
        arriving: dict[tuple[Flow, int], dict[Hashable, int]] = defaultdict(dict)
        leaving: dict[tuple[Flow, int], dict[Hashable, int]] = defaultdict(dict)
        for tensors, forth, back in (
            (plan.stages[stage].receives, arriving, leaving),
            (plan.stages[stage].sends, leaving, arriving),
        ):
            for tensor in tensors:
                size = values[self.tensors[tensor.name]]
                forth[Flow.ACTIVATION, tensor.peer][tensor.name] = size
                if tensor.gradient:
                    back[Flow.GRADIENT, tensor.peer][tensor.name] = size
        kept, *rest = values[OWN * stage : OWN * (stage + 1)]
        return Sizes(kept, arriving, leaving, *rest)

    def own(self, plan: Plan, stages: Sequence[int]) -> list[int]:
        """The numbers of the sizes that matter to these stages."""
        found = [OWN * stage + at for stage in stages for at in range(OWN)]
        names = {t.name for s in stages for t in (*plan.stages[s].receives, *plan.stages[s].sends)}
        return found + sorted(self.tensors[name] for name in names)


def moments(
    plan: Plan, program: Program, stages: Sequence[int], numbering: Numbering, zeros: set[int]
) -> tuple[Moment, ...]:
    """The moments of a rank at which it may hold most.

    Args:
        program: the rank's, with its transfers.
        stages: that the rank holds.
        zeros: the numbers of sizes that are 0 whatever the rows.
    """
    total = OWN * numbering.stages + len(numbering.tensors)
    own = [number for number in numbering.own(plan, stages) if number not in zeros]

    def held(larger: int | None) -> NDArray[np.int64]:
        values = [0 if n in zeros else 1 + (n == larger) for n in range(total)]
        sizes = {stage: numbering.sizes(plan, stage, values) for stage in stages}
        rows = [
            [counted[stage, "activations"] + counted[stage, "transfers"] for stage in stages]
            for _, _, counted in walk(program, sizes)
        ]
        return np.array(rows, np.int64).reshape(len(rows), len(stages))

    base = held(None)
    forms = np.stack([held(number) - base for number in own], axis=2)
    kept = _largest(np.unique(forms.reshape(len(forms), -1), axis=0))
    shape = len(stages), len(own)
    return tuple(_moment(form.reshape(shape), stages, own) for form in kept)


def _moment(form: NDArray[np.int64], stages: Sequence[int], own: Sequence[int]) -> Moment:
    return {
        stage: tuple((number, float(n)) for number, n in zip(own, row.tolist(), strict=True) if n)
        for stage, row in zip(stages, form, strict=True)
    }


def _largest(forms: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The sums that no other sum equals or exceeds in every part."""
    for at, form in enumerate(forms):
        others = np.delete(forms, at, axis=0)
        if not (others >= form).all(axis=1).any():
            yield form
