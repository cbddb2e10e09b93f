"""Measure the most bytes of a GPU in a run, and write what its memory held in one step.

    run1/snapshot-rank00003.pickle       to be dropped onto https://pytorch.org/memory_viz

It uses two private names of torch that torch's own documentation tells people to call
("Understanding CUDA Memory Usage", torch_cuda_memory.html).
`torch.cuda.memory_snapshot`, which is public, has the blocks of one moment, not when they came and
went, and not in that viewer's form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopipe.planfile.parts import Place
from autopipe.runtime.telemetry.destinations import MemorySnapshot
from autopipe.util import atomic_file


class GpuBytes(NamedTuple):
    """The most that tensors held of a GPU, and that torch's allocator had of it."""

    allocated: int
    reserved: int


def most_bytes(device: torch.device, world: dist.ProcessGroup | None) -> GpuBytes | None:
    """The fullest GPU's, of this process's life; None on CPUs. Every rank calls it.

    Args:
        world: of gloo, all ranks of the run; None for a rank that is alone.
    """
    if device.type != "cuda":
        return None
    own = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    most = torch.tensor(own, dtype=torch.int64, device="cpu")
    if world is not None:
        dist.all_reduce(most, dist.ReduceOp.MAX, group=world)
    return GpuBytes(*most.tolist())


@contextmanager
def recorded(asked: MemorySnapshot | None, step: int, place: Place) -> Iterator[None]:
    """Record what the allocator does within the block, and write it, if the step is asked for.

    A step that fails is written too: where memory ran out, nothing tells more.

    Raises:
        AutopipeError: the file cannot be written.
    """
    if asked is None or step != asked.step or place.device == "cpu":
        yield
        return
    asked.folder.mkdir(parents=True, exist_ok=True)  # of another node than the one that made it
    torch.cuda.memory._record_memory_history(stacks="python", clear_history=True)
    try:
        yield
    finally:
        try:
            with atomic_file.writing(asked.file(place.rank)) as file:
                torch.cuda.memory._dump_snapshot(file.name)  # type: ignore[no-untyped-call]
        finally:
            torch.cuda.memory._record_memory_history(None)
