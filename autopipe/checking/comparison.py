"""The result of a check, as a value and as JSON data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from autopipe.checking.compare import TensorRow
from autopipe.planfile.again import offloaded, repeated
from autopipe.planfile.contents import Plan


@dataclass(frozen=True)
class FirstNode:
    """The node at which a difference begins.

    Attributes:
        name: the name of the node in the model's graph.
        place: the user's line, if it is known.
        stage: the stage of the node.
        why: the difference that was seen there.
    """

    name: str
    place: str
    stage: int
    why: str


@dataclass(frozen=True)
class Comparison:
    """The result of a check.

    Attributes:
        plan: the plan that was run.
        reduced: reductions for this machine, one phrase each.
        notes: other facts about the comparison, one sentence each.
        rows: the compared tensors; empty if the split model did not run.
        failure: why it did not run.
        refused: whether ranks have refused the plan or the model, as a user's mistake.
        first: the first differing node, if anything differs and it was found.
    """

    plan: Plan
    reduced: tuple[str, ...]
    notes: tuple[str, ...]
    rows: tuple[TensorRow, ...] = ()
    failure: str = ""
    refused: bool = False
    first: FirstNode | None = None

    @property
    def right(self) -> bool:
        """Whether the split model trains as the unsplit one."""
        return not self.failure and not any(row.wrong for row in self.rows)

    @property
    def again(self) -> tuple[str, ...]:
        """The blocks or ops that ran again in backward: `attention of 16 blocks`."""
        return tuple(map(str, repeated(self.plan, self.plan.stages)))

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        if self.failure:
            return f"differs: {self.failure}"
        if self.right:
            equal, total = (
                sum(row.equal for row in self.rows),
                sum(row.tensors for row in self.rows),
            )
            rest = "" if equal == total else f", the other {total - equal:,} to rounding"
            return f"the same: {equal:,} of {total:,} tensors are equal bit by bit{rest}"
        row = next(row for row in self.rows if row.wrong)
        others = f", and {len(row.wrong) - 1:,} more" if len(row.wrong) > 1 else ""
        where = f"differs: {row.what} of step {row.step}"
        where += f", {row.furthest!r} by {share(row.off)} of its largest entry{others}"
        if self.first is not None:
            place = f" ({self.first.place})" if self.first.place else ""
            where += (
                f"\nfirst differing node: {self.first.name}{place}, stage {self.first.stage}: "
                f"{self.first.why}"
            )
        return where

    def as_data(self) -> dict[str, Any]:
        """For `--json`: `same`, the plan's degrees, what was reduced, and a row for each kind."""
        mesh, first = self.plan.mesh, self.first
        return {
            "same": self.right,
            "sentence": self.sentence,
            "plan": {
                **{"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp},
                "micro_batches": self.plan.batch.micro_batches,
                "rows": self.plan.batch.rows,
                "schedule": self.plan.schedule,
                "precision": self.plan.precision,
                "zero": self.plan.zero,
                "compiled": self.plan.compiled,
                "recompute": list(self.again),
                "offload": list(offloaded(self.plan)),
            },
            "reduced": list(self.reduced),
            "notes": list(self.notes),
            "rows": [
                {
                    **{"step": row.step, "what": row.what, "tensors": row.tensors},
                    **{"equal": row.equal, "furthest": row.furthest, "allowed": row.allowed},
                    "off": row.off if math.isfinite(row.off) else None,
                    "wrong": list(row.wrong),
                }
                for row in self.rows
            ],
            "first": None if first is None else dict(vars(first)),
        }


def share(off: float) -> str:
    """A share of a tensor's largest entry: `0`, `3.2e-07`, `all`."""
    if not math.isfinite(off):
        return "all"
    return "0" if off == 0 else f"{off:.2g}"
