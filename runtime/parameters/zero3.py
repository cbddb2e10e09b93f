"""ZeRO-3: each rank has its own rows of parameters, gradients and optimizer state, and parameters
are gathered where a stage's code reads them (`stages.gathering`).

    F   ready 0  begin 1  |block 0|  let go 0  ready 1  begin 2  |block 1|  ...
    B   the same from the last block on; gradients are scattered as under ZeRO-2

Between its uses a parameter is a tensor with an empty storage. So graphs, compiled code and hooks
can keep one tensor, whose values come and go.

Bytes of a rank, with P, O and n as under ZeRO-1, G and b as under ZeRO-2, U those of the largest
unit as it is read, T of the units that a stage reads at both ends, such as tied weights:

    parameters    P/n               always
    gradients     G/n               from the first backward to the next step
                  2 b + b/n         beside them in a backward
    optimizer     O P/n
    gathered      T + 2 U + U/n     at most: a unit that is read and the table of the next one, or
                                    a unit and the table that it comes out of
    on the link   2 P gathered and G scattered, in every micro-batch

Where parameters are fp32 masters of 16-bit ones, rows are cast before they are gathered: U and what
is gathered on the link are half as large, and no rank ever has a whole master. Under offload P/n,
G/n and O P/n are the host's.

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al.,
2020, arXiv:1910.02054), section 5.3; one unit is fetched ahead as in "PyTorch FSDP" (Zhao et al.,
2023, arXiv:2304.11277), section 3.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopipe.runtime.parameters.buckets import Bucket
from autopipe.runtime.parameters.row_shards import RowShards, own_rows_of, share_bytes
from autopipe.runtime.parameters.zero2 import GradientShards
from autopipe.stages import gathering
from autopipe.stages.gathering import Unit


def in_shards(
    whole: nn.Parameter,
    group: dist.ProcessGroup,
    read: torch.dtype,
    summed: torch.dtype,
    *,
    offload: bool = False,
) -> tuple[nn.Parameter, nn.Parameter]:
    """Replace a whole parameter by a tensor without memory and a rank's own rows.

    Args:
        whole: the parameter; its memory is freed once nothing else holds it.
        group: the ranks over which it is sharded.
        read: the dtype that forward reads.
        summed: the dtype of gradients, until the optimizer gets them in the parameter's.
        offload: keep the rows in the host's memory.
    """
    learns = whole.requires_grad
    leaf = nn.Parameter(torch.empty_like(whole, dtype=read, requires_grad=False), learns)
    leaf.untyped_storage().resize_(0)
    if learns:
        leaf.grad_dtype = summed
    rows = own_rows_of(whole, group)
    if offload and rows.is_cuda:
        rows = rows.cpu().pin_memory()
    return leaf, nn.Parameter(rows, learns)


class ParameterShards(GradientShards):
    """The gradients of parameters that are in shards themselves: summed as under ZeRO-2."""

    def gather(self) -> None:
        """Nothing: every forward and backward gathers what it reads."""

    def master(self, name: str) -> Tensor | None:
        """A parameter as a DTensor, of which each rank has its rows; None: it is not in shards.

        A scalar is whole: torch shards dims, and it has none.
        """
        if name not in self.rows:
            return None
        whole = self._parameters[name]
        if not whole.ndim:
            return super().master(name)
        return DTensor.from_local(
            self.shards()[name].detach().to(self._mesh.device_type),
            self._mesh,
            [Shard(self.rows[name].dim)],
            run_check=False,
            shape=whole.shape,
            stride=torch.empty(whole.shape, device="meta").stride(),
        )

    @cached_property
    def _mesh(self) -> DeviceMesh:
        # Of ranks that share a GPU the group is gloo's, in which DTensor's own gather of tensors on
        # a GPU ends the process (torch 2.11).
        backend = dist.get_backend(self._replicas)
        return DeviceMesh.from_group(self._replicas, "cpu" if backend == "gloo" else "cuda")


class GatheredStage:
    """The parameters of one stage, whole while its code reads them; see `gathering.Gatherer`.

    Args:
        held: the rows of `parameters`, sharded over `group`.
        units: the gathered units: parameters that are gathered together.

    Attributes:
        most: the most bytes that were gathered at once.
    """

    def __init__(
        self,
        held: RowShards,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        units: Sequence[Unit],
    ) -> None:
        self.units = units
        self.parameters = parameters
        self.most = 0
        self._now = 0
        self._held = held
        self._buckets = [_of_each_dtype(group, [parameters[n] for n in unit]) for unit in units]
        self._arriving: dict[int, list[Callable[[], None]]] = {}

    @torch.no_grad()
    def begin(self, unit: int) -> None:
        """Begin to gather a unit, into tables."""
        self._arriving[unit] = [
            # `.data` has versions of its own: autograd may have saved the parameter.
            self._held.fetch(bucket, [parameter.data for parameter in bucket.parameters])
            for bucket in self._buckets[unit]
        ]
        self._count(self._table_bytes(unit))

    @torch.no_grad()
    def ready(self, unit: int) -> None:
        """Give the unit's parameters memory, and their values."""
        self._count(self._resize(unit, 1))
        for fetch in self._arriving.pop(unit):
            fetch()
        self._count(-self._table_bytes(unit))

    def let_go(self, unit: int) -> None:
        """Free the memory of the unit's parameters."""
        self._count(-self._resize(unit, 0))

    @contextmanager
    def all(self) -> Iterator[None]:
        """Within, all units are whole, for code that does not mark where it reads them."""
        numbers = range(len(self.units))
        staying = [gathering.Stay(0, 0, unit) for unit in numbers]
        with torch.no_grad():
            for event in gathering.events(staying):
                if event.call is not gathering.let_go:
                    event.call(self, event.unit)
        yield
        for unit in numbers:
            self.let_go(unit)

    def _resize(self, unit: int, times: int) -> int:
        """Give the unit's parameters their memory once or not at all; returns their bytes."""
        bytes = 0
        for bucket in self._buckets[unit]:
            for parameter in bucket.parameters:
                parameter.untyped_storage().resize_(times * parameter.nbytes)
                bytes += parameter.nbytes
        return bytes

    def _table_bytes(self, unit: int) -> int:
        """Bytes of the table that the ranks' rows are gathered into, and of this rank's row."""
        return sum(
            (dist.get_world_size(bucket.group) + 1) * share_bytes(bucket)
            for bucket in self._buckets[unit]
        )

    def _count(self, bytes: int) -> None:
        self._now += bytes
        self.most = max(self.most, self._now)


def _of_each_dtype(group: dist.ProcessGroup, unit: Sequence[nn.Parameter]) -> list[Bucket]:
    """The parameters of a unit: those of one dtype are gathered together."""
    alike: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
    for parameter in unit:
        alike[parameter.dtype].append(parameter)
    return [Bucket(group, tuple(parameters)) for parameters in alike.values()]
