"""The metrics of one training step, for the terminal, a file, TensorBoard and W&B.

pipe, batch, seconds   --of_step-->      Metrics, without figures that need other ranks
this rank's figures    --over_ranks-->   the mean rank's bubble, the fullest rank's bytes
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopipe.batch import row_length
from autopipe.batch.description import count_rows
from autopipe.batch.tree import flatten
from autopipe.planfile.contents import Plan


@dataclass(frozen=True)
class Metrics:
    """One step of all ranks together; None where something is not known.

    Attributes:
        step: its number; the first one is 1.
        loss: the mean over the batch.
        seconds: seconds of the step with its update, without the wait for its batch.
        rows_per_second, tokens_per_second: of all devices together; tokens as the plan counts them.
        mfu: the plan's model FLOPs, for the rows of this step, over what all devices could do at
            their peak in these seconds.
        bubble: the share of the step, before its update, for which the mean rank did not compute.
        peak_bytes: the most bytes of the fullest rank, as counted in the run's first steps
            (`Memory.seen`).
        learning_rate: that of the update, of rank 0's first parameter group.
        grad_norm: the norm of all gradients together before clipping; None if nothing is clipped.
        loss_scale: under fp16, the scale after the step: halved if gradients overflowed.
    """

    step: int
    loss: float
    seconds: float
    rows_per_second: float
    tokens_per_second: float | None = None
    mfu: float | None = None
    bubble: float | None = None
    peak_bytes: int | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None

    def known(self) -> dict[str, int | float]:
        """The figures by name, without those that are not known or no finite numbers."""
        return {name: n for name, n in vars(self).items() if n is not None and math.isfinite(n)}


def rows_of(batch: Any, plan: Plan, *, sharded: bool) -> int:
    """The rows of a step's whole batch; `sharded`: `batch` is one replica's part of it."""
    rows = count_rows(plan.inputs, flatten(batch))
    return rows * plan.mesh.dp if sharded else rows


def length_share(length: float, plan: Plan) -> float:
    """The tokens of a row over those that are planned; 1 where rows are no sequences.

    Args:
        length: as `Pipe.row_length`.
    """
    planned = row_length.length_of(plan.inputs)
    return length / planned if length and planned else 1.0


def of_step(
    plan: Plan, step: int, loss: float, seconds: float, rows: int, length: float = 1.0
) -> Metrics:
    """The metrics that follow from the plan and from a step's seconds and rows.

    Args:
        length: as `length_share` gives it; of shorter rows the operations are not known, nor MFU.
    """
    work, share = plan.work, rows / plan.batch.rows
    if work is None:
        return Metrics(step, loss, seconds, rows / seconds)
    tokens = work.tokens * share * length / seconds if work.tokens else None
    mfu = share * work.mfu(seconds) if length == 1.0 else None
    return Metrics(step, loss, seconds, rows / seconds, tokens, mfu)


def over_ranks(bubble: float, peak: int, world: dist.ProcessGroup | None) -> tuple[float, int]:
    """The mean of the ranks' bubbles and the most of their bytes; every rank calls it.

    Args:
        world: of gloo, all ranks of the run; None for a rank that is alone.
    """
    if world is None:
        return bubble, peak
    # Exact for bytes below 2^53.
    own = torch.tensor([bubble, peak], dtype=torch.float64, device="cpu")
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(world))]
    dist.all_gather(found, own, group=world)
    shares, sizes = torch.stack(found).unbind(1)
    return float(shares.mean()), int(sizes.max())
