"""Whether all ranks were given the same batch: asked before any of them posts a receive.

A rank that computes on other rows than its neighbour would end in the middle of gloo, which ends
the process where a buffer is too small. So every step begins with a few bytes from every rank to
every other; the whole contents are compared in the first step only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from autopipe import batches
from autopipe.errors import ModelError
from autopipe.plan import Place, Plan


def check_same(
    plan: Plan,
    place: Place,
    world: dist.ProcessGroup | None,
    leaves: Mapping[str, batches.Leaf],
    *,
    sharded: bool,
    contents: bool,
) -> None:
    """Refuse, on every rank, batches that differ between ranks which must be given the same.

    Args:
        contents: compare every value, and not the number of rows alone.

    Raises:
        ModelError: they differ, or the batch does not fit the plan on some rank.
    """
    if world is None:
        return
    refusal: ModelError | None = None
    try:
        rows = batches.rows_of(plan.inputs, leaves)
    except ModelError as error:
        rows, refusal = -1, error
    mine = torch.tensor([batches.fingerprint(leaves) if contents else 0, rows])
    found = list(torch.empty(len(plan.mesh.places), 2, dtype=mine.dtype))
    dist.all_gather(found, mine, group=world)
    for other in plan.mesh.places:
        first = other.dp * plan.mesh.tp if sharded else 0
        if found[other.rank][0] != found[first][0]:
            whose = f"of data-parallel coordinate {other.dp} " if sharded else ""
            raise ModelError(
                f"ranks {whose}were given different batches: rank {first} and rank {other.rank}",
                hint="every rank passes the same batch to step; a rank that passes its own "
                "part says step(batch, sharded=True)",
            )
    if refusal is not None:
        raise refusal
    for other in plan.mesh.places:
        theirs = int(found[other.rank][1])
        if theirs != rows:
            what = f"{theirs} rows" if theirs >= 0 else "a batch that does not fit the plan"
            raise ModelError(
                f"rank {place.rank} was given {rows} rows, rank {other.rank} {what}: all ranks, "
                "and the parts of all data-parallel coordinates, must have as many",
                hint="nothing of this step was sent; give every rank the same batch",
            )
