"""Checks that all ranks were given the same plan and the same batch, before any posts a receive.

A rank that computes on other rows than its neighbour would end in the middle of gloo, which ends
the process where a buffer is too small. So every step begins with a few bytes from every rank to
every other. The whole contents are compared in the first step, some values of them in each later
one: a loader that shuffles by torch's generator gives one rank other batches from the step on in
which that rank alone draws a number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.batch import row_length
from autopipe.batch.description import count_rows
from autopipe.batch.digest import digest
from autopipe.batch.tree import Leaf
from autopipe.errors import LaunchError, ModelError, PlanError
from autopipe.planfile.contents import BATCH, Plan
from autopipe.planfile.parts import Place
from autopipe.runtime.script.updates import NONE, OWN, Since
from autopipe.util import codec

CALLS = "step", "evaluate", "clip_grad_norm_", "save", "load", "state_dict", "load_state_dict"
"""Calls at whose door ranks exchange which one it is: they would wait for each other's messages."""

END = len(CALLS)
"""In the place of a call: this rank has no further batch."""

SINCE = Since()
"""Of a call that is no step."""

SOME = 1024
"""Values of each tensor that are compared in steps after the first: a hash of all takes long."""


def check_same_plan(plan: Plan, world: dist.ProcessGroup | None) -> None:
    """Refuse, on every rank, plans that differ: one cut elsewhere would wait for other tensors.

    Ranks that plan by themselves may find different plans, as each may measure the machine anew.

    Raises:
        PlanError: they differ.
    """
    if world is None:
        return
    digest = hashlib.blake2b(codec.dumps(plan).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "big", signed=True)], device="cpu")
    gathered = list(own.new_empty(len(plan.mesh.places), 1))
    dist.all_gather(gathered, own, group=world)
    for rank, of_rank in enumerate(gathered):
        if not torch.equal(of_rank, gathered[0]):
            raise PlanError(
                f"ranks were given different plans: rank 0 and rank {rank}",
                hint="plan once and plan.save('plan.json'); every rank takes "
                "autopipe.Plan.load('plan.json')",
            )


def check_same_call(call: str, plan: Plan, world: dist.ProcessGroup | None) -> None:
    """Refuse, on every rank, ranks that are at different calls, as after `if rank == 0:`.

    Args:
        call: the name of this one, among `CALLS`.

    Raises:
        LaunchError: names two of them.
    """
    if world is not None:
        _heard(plan, world, _without_batch(CALLS.index(call)))


def check_all_ended(plan: Plan, world: dist.ProcessGroup | None) -> None:
    """Refuse, on every rank, batches that end on one rank before those of another.

    Raises:
        ModelError: names two ranks.
    """
    if world is not None:
        _heard(plan, world, _without_batch(END))


def _without_batch(call: int) -> Tensor:
    """What a rank says of a call that has no batch, as long as what it says of a step."""
    return torch.tensor([call, *(0,) * (3 + len(SINCE.numbers))], device="cpu")


def _heard(plan: Plan, world: dist.ProcessGroup, own: Tensor) -> list[Tensor]:
    """What all ranks say at the door of a call, whose number comes first.

    Raises:
        LaunchError: as `check_same_call`.
        ModelError: as `check_all_ended`.
    """
    gathered = list(own.new_empty(len(plan.mesh.places), len(own)))
    dist.all_gather(gathered, own, group=world)
    numbers = [int(of_rank[0]) for of_rank in gathered]
    if END in numbers:
        going = next((rank for rank, number in enumerate(numbers) if number != END), None)
        if going is not None:
            raise ModelError(
                f"the batches of rank {numbers.index(END)} have ended, and rank {going} has "
                "another one: all ranks must be given the same",
                hint="batches() gives each rank as many, whatever RANK is; with the arguments "
                "shard and num_shards it gives each replica its own",
            )
        return gathered
    calls = [CALLS[number] for number in numbers]
    other = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if other is not None:
        raise LaunchError(
            f"rank 0 has called pipe.{calls[0]}, and rank {other} pipe.{calls[other]}",
            hint="each rank makes all of these calls, in one order: none under `if rank == 0:`",
        )
    return gathered


def check_same(
    plan: Plan,
    place: Place,
    world: dist.ProcessGroup | None,
    leaves: Mapping[str, Leaf],
    *,
    sharded: bool,
    contents: bool,
    call: str = "step",
    updates: Since = SINCE,
) -> float:
    """Refuse, on every rank, batches that differ between ranks which must be given the same.

    Args:
        contents: compare every value first, and not some of them after the number of rows.
        call: as of `check_same_call`.
        updates: what the rank has done since the last step.

    Returns:
        The tokens of a row, of all replicas the mean; 0 where rows are no sequences.

    Raises:
        ModelError: they differ, or the batch does not fit the plan on some rank; or ranks have made
            other updates, or scaled by numbers of their own.
        LaunchError: as `check_same_call`.
    """
    length = row_length.length_in(plan.inputs, leaves) or 0
    refusal = _computed(leaves) if call == "step" else None
    if world is None:
        if refusal is not None:
            raise refusal
        return length
    try:
        rows = count_rows(plan.inputs, leaves)
    except ModelError as error:
        rows, refusal = -1, error
    mark = digest(leaves, None if contents else SOME)
    numbers = CALLS.index(call), mark, rows, length, *updates.numbers
    gathered = _heard(plan, world, torch.tensor(numbers, device="cpu"))
    columns: list[list[int]] = torch.stack(gathered).T.tolist()
    _, marks, rows_of, lengths, began, options, *scaled = columns
    _check_updates(plan, began, options)
    updates.check([*zip(*scaled, strict=True)])
    if contents:
        _check_marks(plan, marks, sharded=sharded, first_time=True)
    if refusal is not None:
        raise refusal
    _check_lengths(plan, place, lengths, sharded=sharded)
    _check_rows(place, rows_of)
    if not contents:
        _check_marks(plan, marks, sharded=sharded, first_time=False)
    return sum(lengths) / len(lengths)  # over ranks as over replicas, which have as many


def _computed(leaves: Mapping[str, Leaf]) -> ModelError | None:
    """The refusal of a batch that plain PyTorch would give a gradient to, for what has made it."""
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            return ModelError(
                f"batch[{path!r}] was computed from tensors that require a gradient, and pipe.step "
                "gives none to what has made a batch",
                hint="give it detached: x.detach(); what is to be trained with the model is a part "
                "of it, which forward calls",
            )
    return None


def _check_updates(plan: Plan, began: Sequence[int], options: Sequence[int]) -> None:
    """Refuse ranks that have made other updates since the last step; both are by rank."""
    if NONE in began and OWN in began:
        raise ModelError(
            f"rank {began.index(OWN)} has called an optimizer's step since the last pipe.step, and "
            f"rank {began.index(NONE)} has not",
            hint="each rank makes each update: none under `if rank == 0:`, nor by a norm of its "
            "own gradients; pipe.clip_grad_norm_(inf) gives every rank the norm of all",
        )
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for peer in plan.mesh.places:
        mark = options[peer.rank]
        rank, known = first.setdefault((peer.pp, mark >> 32), (peer.rank, mark))
        if mark != known:
            raise ModelError(
                f"ranks {rank} and {peer.rank} have the same parameters, or parts of them, and "
                "have updated them by optimizers of other classes or options",
                hint="each rank makes the same optimizer, and sets the same learning rate, by what "
                "all ranks know: the loss that pipe.step returns, or pipe.clip_grad_norm_(inf)",
            )


def _check_marks(plan: Plan, marks: Sequence[int], *, sharded: bool, first_time: bool) -> None:
    """Refuse batches with other values; the fingerprints of them are by rank."""
    for peer in plan.mesh.places:
        first = peer.dp * plan.mesh.tp if sharded else 0
        if marks[peer.rank] != marks[first]:
            whose = f"of data-parallel coordinate {peer.dp} " if sharded else ""
            again = "" if first_time else ", after batches that were the same"
            raise ModelError(
                f"ranks {whose}were given different batches{again}: rank {first} and rank "
                f"{peer.rank}",
                hint="every rank passes the same batch to step; a rank that passes its own "
                "part says step(batch, sharded=True)"
                if first_time
                else "has one rank drawn random numbers that the others have not, as in an "
                "evaluation of its own? Give the loader a generator with a seed of its own",
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
