"""Put the results of the last stages' micro-batches together on every rank: loss and outputs.

replica 0, last stage    micro-batches 0, 1  --cat-->  rows 0..3  --+
replica 1, last stage    micro-batches 2, 3  --cat-->  rows 4..7  --+--> rows 0..7, everywhere
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.planfile.contents import Plan
from autopipe.rows.row_dims import joined, outputs_lie, parted
from autopipe.runtime.step.microbatches import LossWeights
from autopipe.stages.bind import Split

_OF_LOSSES = torch.float16, torch.bfloat16, torch.float32, torch.float64
"""The dtypes of losses: of a rank that has one, the others learn in which it is."""


def mean_loss(
    results: Mapping[int, Sequence[Tensor]],
    weights: LossWeights,
    counted: bool,
    tp: int,
    world: dist.ProcessGroup | None,
) -> tuple[Tensor, float]:
    """The mean loss of the whole batch, a tensor of no dims on the CPU, and its divisor.

    Every rank calls it, and every rank gets the same: a script may decide by the loss.

    Args:
        results: the results of each of its micro-batches, by number, if this rank has the last
            stage: the loss, and its count if `counted`.
        counted: whether each loss is a sum, with a count; otherwise it is a mean.
        tp: the number of tensor-parallel ranks that have the same micro-batches.
    """
    size = 2 + len(_OF_LOSSES)
    sums = torch.zeros(size, dtype=torch.float64, device="cpu")  # whatever a script's default is
    if results:
        losses = {k: result[0].cpu() for k, result in results.items()}
        dtype = next(iter(losses.values())).dtype
        # Of no labels the loss is nan, and weighs nothing.
        weighed = sum(losses[k] * weights.loss(k) for k in losses if weights.loss(k))
        counts = sum(float(r[1]) if counted else weights.count(k) for k, r in results.items())
        if counted:
            sums[0] = weighed
        elif counts:
            # Rounded as the mean of this rank's losses. Ranks that take turns at the last stage
            # may have other numbers of micro-batches.
            sums[0] = torch.as_tensor(weighed / counts, dtype=dtype, device="cpu").double() * counts
        sums[1] = counts
        sums[2 + _OF_LOSSES.index(dtype)] = 1.0
    if world is not None:
        dist.all_reduce(sums, group=world)
    # Each tensor-parallel rank has told of the same micro-batches.
    dtype = _OF_LOSSES[int(sums[2:].argmax())]
    total, divisor = float(sums[0]) / tp, weights.divisor(float(sums[1]) / tp)
    return (sums.new_tensor(total) / divisor).to(dtype), divisor


def gathered(
    split: Split,
    results: Sequence[Sequence[Tensor]],
    plan: Plan,
    lasts: Sequence[int],
    micro_batches: int,
    world: dist.ProcessGroup | None,
) -> Any:
    """The outputs of all micro-batches of all replicas; every rank calls it.

    Args:
        split: the cut model, traced with outputs.
        lasts: the pipeline ranks that take turns at the last stage.
        micro_batches: the number of micro-batches of a replica.
        results: this rank's results of each of its micro-batches, if it has the last stage.
        world: all ranks of the run; None: this one is alone.

    Returns:
        A tensor, or a dict of tensors by their paths, in host memory.
    """
    paths, lie_of = split.trace.outputs, split.trace.lie
    if plan.mesh.dp * micro_batches == 1:
        lie_of = outputs_lie(split.trace.graph, len(paths), alone=True)
    of_each: list[list[Tensor]] = []
    for dp in range(plan.mesh.dp):
        by_microbatch = []
        for last in lasts[:micro_batches]:
            source = plan.mesh.rank(last, dp)
            is_source = world is None or dist.get_rank(world) == source
            columns = zip(zip(*results, strict=True), lie_of, strict=True)
            tensors = [_joined(parts, lie) for parts, lie in columns] if is_source else []
            by_microbatch.append(tensors if world is None else _from(source, tensors, world))
        shares = zip(zip(*by_microbatch, strict=True), lie_of, strict=True)
        of_each.append([_in_order(share, lie, micro_batches) for share, lie in shares])
    replicas = zip(zip(*of_each, strict=True), lie_of, strict=True)
    whole = [
        parts[0] if len(parts) == 1 else torch.cat(parts) if lie is None else joined(parts, *lie)
        for parts, lie in replicas
    ]
    return whole[0] if paths == ("0",) else dict(zip(paths, whole, strict=True))


def _joined(parts: Sequence[Tensor], lie: tuple[int, int] | None) -> Tensor:
    whole = [part.detach().cpu() for part in parts]
    return torch.stack(whole) if lie is None else joined(whole, *lie)


def _in_order(shares: Sequence[Tensor], lie: tuple[int, int] | None, micro_batches: int) -> Tensor:
    """The tensors of ranks that take turns, in the order of micro-batches."""
    ranks = len(shares)
    if ranks == 1:
        return shares[0]
    parts: list[Sequence[Tensor]] = []
    for own, share in enumerate(shares):
        count = len(range(own, micro_batches, ranks))
        parts.append(share.unbind() if lie is None else parted(share, *lie, count))
    return _joined([parts[k % ranks][k // ranks] for k in range(micro_batches)], lie)


def _from(source: int, own: list[Tensor], world: dist.ProcessGroup) -> list[Tensor]:
    """Broadcast one rank's tensors; returns them on every rank."""
    specs: list[Any] = [[(tuple(tensor.shape), tensor.dtype) for tensor in own]]
    dist.broadcast_object_list(specs, source, group=world)
    found = own or [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in specs[0]]
    for number, tensor in enumerate(found):
        found[number] = tensor.contiguous()
        if tensor.numel():
            dist.broadcast(found[number].reshape(-1).view(torch.uint8), source, group=world)
    return found
