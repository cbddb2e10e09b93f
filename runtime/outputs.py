"""What a model itself gives in evaluation, put together on every rank.

replica 0, last stage    micro-batches 0, 1  --cat-->  rows 0..3  --+
replica 1, last stage    micro-batches 2, 3  --cat-->  rows 4..7  --+--> rows 0..7, everywhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.binding import Split
from autopipe.graph import BATCH, Input, Ref, State
from autopipe.plan import Plan
from autopipe.schedule import Programs, holders


def gathered(
    split: Split,
    results: Sequence[Sequence[Tensor]],
    plan: Plan,
    compute: Programs,
    world: dist.ProcessGroup | None,
) -> Any:
    """The outputs of all micro-batches of all replicas; every rank calls it.

    Args:
        split: traced with outputs.
        results: this rank's, of each micro-batch, if it has the last stage.
        world: all ranks of the run; None: this one is alone.

    Returns:
        A tensor, or a dict of tensors by their paths, in host memory.
    """
    paths = split.trace.outputs
    dims = [_rows_dim(split, output) for output in split.graph.outputs[-len(paths) :]]
    of_each: list[list[Tensor]] = []
    for dp in range(plan.mesh.dp):
        source = plan.mesh.rank(holders(compute)[-1], dp)
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
