"""Compare a plan's predictions with measurements: seconds per micro-batch, peak bytes, the step."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.planfile.parts import StagePrediction
from autopipe.report import paper
from autopipe.report.figures import PARTS
from autopipe.util import numbers


def compare(
    planned: Sequence[StagePrediction],
    measured: Sequence[StagePrediction],
    planned_step: float,
    measured_step: float,
    bubbles: Sequence[float] = (),
    columns: int = paper.WIDTH,
) -> str:
    """A table of the stages, then the step, as lines of at most `columns` columns.

    Args:
        planned_step, measured_step: seconds.
        bubbles: for each stage, the measured share of the step in which its device is idle.
    """
    amount = numbers.Amount(max(stage.memory.peak for stage in (*planned, *measured)))
    parts = [PARTS[name] for name in ("peak", "activations", "transfers")]
    rows = []
    for index, (before, after) in enumerate(zip(planned, measured, strict=True)):
        rows.append(
            (
                str(index),
                _both(before.forward_seconds, after.forward_seconds),
                _both(before.backward_seconds, after.backward_seconds),
                *(f"{amount(p(before.memory))} / {amount(p(after.memory))}" for p in parts),
                *(numbers.percent(bubble) for bubble in bubbles[index : index + 1]),
            )
        )
    names = ("stage", "forward", "backward", "peak", "activations", "transfers")
    table = paper.Table((*names, *(["bubble"] if bubbles else [])), tuple(rows), splits=3)
    meanings = {
        "forward, backward": "seconds of one micro-batch",
        f"peak ({amount.unit})": "bytes at the device's fullest moment, of which activations and "
        "transfers are parts",
    }
    if bubbles:
        meanings["bubble"] = "share of a step in which the device did not compute, as measured"
    step = f"a step, before the optimizer's: {_both(planned_step, measured_step)}"
    return (
        f"planned / measured\n\n{paper.table(table, columns)}\n{paper.legend(meanings, columns)}\n"
        f"{step}\n"
    )


def _both(planned: float, measured: float) -> str:
    return f"{numbers.seconds(planned)} / {numbers.seconds(measured)}"
