"""The cases: a model, a mesh and a schedule each; and the row of predicted and measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Memory
from autopipe.runtime.train import Measured
from autopipe.schedules.instructions import holders

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One run: as many processes as the mesh has ranks."""

    model: str
    rows: int
    pp: int = 1
    dp: int = 1
    tp: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: bool = False

    @property
    def processes(self) -> int:
        """Ranks of the mesh."""
        return self.pp * self.dp * self.tp

    @property
    def name(self) -> str:
        """As it is chosen on the command line: gpt/pp2/m4/1f1b."""
        mesh = "".join(
            f"{axis}{getattr(self, axis)}" for axis in ("pp", "dp", "tp") if getattr(self, axis) > 1
        )
        extra = (f"/zero{self.zero}" if self.zero else "") + ("/again" if self.recompute else "")
        return f"{self.model}/{mesh or 'one'}/m{self.micro_batches}/{self.schedule}{extra}"


CASES = (
    Case("gpt", 8, pp=2, micro_batches=4),
    Case("gpt", 8, dp=2, micro_batches=2),
    Case("gpt", 8, tp=2, micro_batches=2),
    Case("gpt", 8, micro_batches=4),
    Case("gpt", 8, pp=2, micro_batches=4, schedule="zb-h1"),
    Case("gpt", 16, pp=2, micro_batches=4, recompute=True),
    Case("gpt", 8, dp=2, micro_batches=1, zero=1),
    Case("gpt-narrow", 16, pp=2, micro_batches=16),
    Case("gpt-narrow", 16, pp=2, micro_batches=4, schedule="gpipe"),
    Case("gpt-wide", 8, pp=2, micro_batches=4),
    Case("gpt-wide", 4, dp=2, micro_batches=1, zero=3),
    Case("gpt-wide", 4, tp=2),
    Case("mini-gpt", 4, pp=2, micro_batches=4),
    Case("conv", 32, pp=2, micro_batches=4),
    Case("conv", 32, dp=2, micro_batches=2),
    Case("mlp", 256, pp=2, micro_batches=8),
    Case("mlp", 64, dp=2),
    Case("lstm", 16, pp=2, micro_batches=4),
    Case("llama", 16, pp=2, micro_batches=8),
    Case("llama", 16, dp=2, micro_batches=2),
    Case("gpt2", 16, pp=2, micro_batches=4, schedule="gpipe"),
    Case("gpt2", 16, micro_batches=2),
)
"""At most two processes: one for each core of the machine of the README."""


def row(case: Case, plan: Plan, measured: Measured, held: Sequence[int]) -> Row:
    """Predicted beside measured; errors are predicted / measured - 1.

    Args:
        held: the allocator's peak bytes of each rank; of a stage's ranks the fullest counts.
    """
    step = plan.prediction.step_seconds
    predicted, counted = (
        peaks(plan, [stage.memory for stage in stages])
        for stages in ([s.predicted for s in plan.stages], measured.stages)
    )
    found = [0] * plan.mesh.pp
    for place in plan.mesh.places:
        found[place.pp] = max(found[place.pp], held[place.rank])
    return {
        "case": case.name,
        "model": case.model,
        "mesh": {"pp": case.pp, "dp": case.dp, "tp": case.tp},
        "rows": case.rows,
        "micro_batches": case.micro_batches,
        "schedule": case.schedule,
        "zero": case.zero,
        "recompute": case.recompute,
        "predicted_seconds": step,
        "measured_seconds": measured.step_seconds,
        "seconds_error": step / measured.step_seconds - 1,
        "predicted_bytes": predicted,
        "measured_bytes": found,
        "counted_bytes": counted,
        "bytes_error": max((p / m - 1 for p, m in zip(predicted, found, strict=True)), key=abs),
        "stages": [
            {
                "predicted": [s.predicted.forward_seconds, s.predicted.backward_seconds],
                "measured": [m.forward_seconds, m.backward_seconds],
            }
            for s, m in zip(plan.stages, measured.stages, strict=True)
        ],
    }


def peaks(plan: Plan, memories: list[Memory]) -> list[int]:
    """Peak bytes of each rank of a pipeline."""
    total = [0] * plan.mesh.pp
    for stage, rank in enumerate(holders(programs.compute(plan))):
        total[rank] += memories[stage].peak
    return total


def summary(rows: list[Row]) -> Row:
    """The last line: how far off the median and the worst prediction are."""
    seconds = [abs(row["seconds_error"]) for row in rows]
    bytes = [abs(row["bytes_error"]) for row in rows]
    return {
        "runs": len(rows),
        "median_seconds_error": median(seconds),
        "worst_seconds_error": max(seconds),
        "median_bytes_error": median(bytes),
        "worst_bytes_error": max(bytes),
    }


def table(rows: Sequence[Row]) -> str:
    """Rows as they stand in the README."""
    lines = [
        "| model | pp x dp x tp | micro-batches | schedule | a step, predicted / measured | off "
        "| the fullest rank, predicted / measured | off | waited, drift, tries |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        predicted, measured = row["predicted_seconds"], row["measured_seconds"]
        # Where a rank is fullest is the measurement's to say.
        held, there = max(zip(row["measured_bytes"], row["predicted_bytes"], strict=True))
        schedule = [row["schedule"]]
        schedule += [f"ZeRO {row['zero']}"] if row["zero"] else []
        schedule += ["blocks again"] if row["recompute"] else []
        lines.append(
            f"| {row['model']} | {' x '.join(str(size) for size in row['mesh'].values())} "
            f"| {row['micro_batches']} | {', '.join(schedule)} "
            f"| {predicted * 1e3:.0f} / {measured * 1e3:.0f} ms | {predicted / measured - 1:+.1%} "
            f"| {there / 2**20:.1f} / {held / 2**20:.1f} MiB | {there / held - 1:+.1%} "
            f"| {row['waited']:.2f}, {row['drift']:+.2f}, {row['tries']} |"
        )
    return "\n".join(lines)
