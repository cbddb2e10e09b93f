"""Checks that all ranks were given the same plan and the same batch, before any posts a receive.

A rank that computes on other rows than its neighbour would end in the middle of gloo, which ends
the process where a buffer is too small. So every step begins with a few bytes from every rank to
every other; the whole contents are compared in the first step only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from autopipe.errors import ModelError, PlanError
from autopipe.frontend import batch, row_length
from autopipe.planfile.contents import BATCH, Plan
from autopipe.planfile.parts import Place
from autopipe.util import codec


def check_same_plan(plan: Plan, world: dist.ProcessGroup | None) -> None:
    """Refuse, on every rank, plans that differ: one cut elsewhere would wait for other tensors.

    Ranks that plan by themselves may find different plans, as each may measure the machine anew.

    Raises:
        PlanError: they differ.
    """
    if world is None:
        return
    digest = hashlib.blake2b(codec.dumps(plan).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "big", signed=True)])
    gathered = list(torch.empty(len(plan.mesh.places), 1, dtype=own.dtype))
    dist.all_gather(gathered, own, group=world)
    for rank, of_rank in enumerate(gathered):
        if not torch.equal(of_rank, gathered[0]):
            raise PlanError(
                f"ranks were given different plans: rank 0 and rank {rank}",
                hint="plan once and plan.save('plan.json'); every rank takes "
                "autopipe.Plan.load('plan.json')",
            )


def check_same(
    plan: Plan,
    place: Place,
    world: dist.ProcessGroup | None,
    leaves: Mapping[str, batch.Leaf],
    *,
    sharded: bool,
    contents: bool,
) -> float:
    """Refuse, on every rank, batches that differ between ranks which must be given the same.

    Args:
        contents: compare every value, and not the number of rows alone.

    Returns:
        The tokens of a row, of all replicas the mean; 0 where rows are no sequences.

    Raises:
        ModelError: they differ, or the batch does not fit the plan on some rank.
    """
    length = row_length.length_in(plan.inputs, leaves) or 0
    if world is None:
        return length
    refusal: ModelError | None = None
    try:
        rows = batch.rows_of(plan.inputs, leaves)
    except ModelError as error:
        rows, refusal = -1, error
    own = torch.tensor([batch.fingerprint(leaves) if contents else 0, rows, length])
    gathered = list(torch.empty(len(plan.mesh.places), 3, dtype=own.dtype))
    dist.all_gather(gathered, own, group=world)
    columns: list[list[int]] = torch.stack(gathered).T.tolist()
    fingerprints, rows_of, lengths = columns
    _check_contents(plan, fingerprints, sharded=sharded)
    if refusal is not None:
        raise refusal
    _check_lengths(plan, place, lengths, sharded=sharded)
    _check_rows(place, rows_of)
    return sum(lengths) / len(lengths)  # over ranks as over replicas, which have as many


def _check_contents(plan: Plan, fingerprints: Sequence[int], *, sharded: bool) -> None:
    """Refuse batches with other values; the fingerprints of them are by rank."""
    for peer in plan.mesh.places:
        first = peer.dp * plan.mesh.tp if sharded else 0
        if fingerprints[peer.rank] != fingerprints[first]:
            whose = f"of data-parallel coordinate {peer.dp} " if sharded else ""
            raise ModelError(
                f"ranks {whose}were given different batches: rank {first} and rank {peer.rank}",
                hint="every rank passes the same batch to step; a rank that passes its own "
                "part says step(batch, sharded=True)",
            )


def _check_lengths(plan: Plan, place: Place, lengths: Sequence[int], *, sharded: bool) -> None:
    """Refuse rows of other lengths than this rank's; `lengths` are in tokens, by rank."""
    for peer in plan.mesh.places:
        # Each replica goes through its own pipeline; a loss over the batch sees all of them.
        independent = sharded and peer.dp != place.dp and plan.loss_over != BATCH
        if lengths[peer.rank] != lengths[place.rank] and not independent:
            raise ModelError(
                f"rank {place.rank} was given rows of {lengths[place.rank]} tokens, rank "
                f"{peer.rank} of {lengths[peer.rank]}: all ranks of a replica must be given the "
                "same",
                hint="nothing of this step was sent; pad to the same length on every rank",
            )


def _check_rows(place: Place, rows: Sequence[int]) -> None:
    """Refuse another number of rows than this rank has; -1: a batch that does not fit the plan."""
    for peer, peer_rows in enumerate(rows):
        if peer_rows != rows[place.rank]:
            what = f"{peer_rows} rows" if peer_rows >= 0 else "a batch that does not fit the plan"
            raise ModelError(
                f"rank {place.rank} was given {rows[place.rank]} rows, rank {peer} {what}: all "
                "ranks, and the parts of all data-parallel coordinates, must have as many",
                hint="nothing of this step was sent; give every rank the same batch",
            )
