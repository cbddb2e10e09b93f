"""The results of the last stages' micro-batches, put together on every rank: loss and outputs.

replica 0, last stage    micro-batches 0, 1  --cat-->  rows 0..3  --+
replica 1, last stage    micro-batches 2, 3  --cat-->  rows 4..7  --+--> rows 0..7, everywhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.ir.graph import BATCH, Input, Ref, State
from autopipe.planfile.contents import Plan
from autopipe.stages.bind import Split


def mean_loss(
    results: Sequence[Sequence[Tensor]],
    counted: bool,
    tp: int,
    world: dist.ProcessGroup | None,
) -> tuple[Tensor, float]:
    """The mean loss of the whole batch, a tensor of no dims on the CPU, and its count.

    Every rank calls it, and every rank gets both.

    Args:
        results: of each micro-batch, if this rank has the last stage: the loss first, and its
            count where `counted`.
        counted: each loss is a sum, over its count; otherwise a mean, and each replica counts 1.
        tp: how many tensor-parallel ranks give the same micro-batches.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    dtype = torch.float32
    if results:
        dtype = results[0][0].dtype
        total = results[0][0].cpu()
        for result in results[1:]:
            total = total + result[0].cpu()
        if counted:
            sums[0], sums[1] = total.double(), sum(float(result[1]) for result in results)
        else:
            sums[0], sums[1] = (total / len(results)).double(), 1.0
    if world is not None:
        dist.all_reduce(sums, group=world)
    # Each tensor-parallel rank has told of the same micro-batches.
    return (sums[0] / sums[1]).to(dtype), float(sums[1]) / tp


def gathered(
    split: Split,
    results: Sequence[Sequence[Tensor]],
    plan: Plan,
    last: int,
    world: dist.ProcessGroup | None,
) -> Any:
    """The outputs of all micro-batches of all replicas; every rank calls it.

    Args:
        split: traced with outputs.
        last: the pipeline rank that has the last stage.
        results: this rank's, of each micro-batch, if it has the last stage.
        world: all ranks of the run; None: this one is alone.

    Returns:
        A tensor, or a dict of tensors by their paths, in host memory.
    """
    paths = split.trace.outputs
    dims = [_rows_dim(split, output) for output in split.graph.outputs[-len(paths) :]]
    of_each: list[list[Tensor]] = []
    for dp in range(plan.mesh.dp):
        source = plan.mesh.rank(last, dp)
        mine = world is None or dist.get_rank(world) == source
        columns = zip(zip(*results, strict=True), dims, strict=True) if mine else ()
        own = [_joined(parts, dim) for parts, dim in columns]
        of_each.append(own if world is None else _from(source, own, world))
    joined = [
        parts[0] if len(parts) == 1 else torch.cat(parts, dim or 0)
        for parts, dim in zip(zip(*of_each, strict=True), dims, strict=True)
    ]
    return joined[0] if paths == ("0",) else dict(zip(paths, joined, strict=True))


def _joined(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    whole = [part.detach().cpu() for part in parts]
    return torch.stack(whole) if dim is None else torch.cat(whole, dim)


def _rows_dim(split: Split, output: object) -> int | None:
    """The dim that has the rows of a micro-batch, if there is one."""
    assert isinstance(output, Ref | Input | State)
    shape = split.graph.spec(output).shape
    found = (n for n, size in enumerate(shape) if BATCH in getattr(size, "free_symbols", ()))
    return next(found, None)


def _from(source: int, own: list[Tensor], world: dist.ProcessGroup) -> list[Tensor]:
    """One rank's tensors, on every rank."""
    specs: list[Any] = [[(tuple(tensor.shape), tensor.dtype) for tensor in own]]
    dist.broadcast_object_list(specs, source, group=world)
    found = own or [torch.empty(shape, dtype=dtype) for shape, dtype in specs[0]]
    for number, tensor in enumerate(found):
        found[number] = tensor.contiguous()
        if tensor.numel():
            dist.broadcast(found[number].reshape(-1).view(torch.uint8), source, group=world)
    return found
