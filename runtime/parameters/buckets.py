"""Buckets: gradients of several parameters that are summed over ranks together.

On every rank of a group the sums of its buckets begin in one order, whatever order backward takes
there: a bucket that is ready early waits for those before it ("PyTorch Distributed", Li et al.,
2020, arXiv:2006.15704).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.errors import LaunchError, ScheduleError
from autopipe.planfile.parts import BUCKET_BYTES


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group, dtype and device whose gradients are summed together."""

    group: dist.ProcessGroup
    parameters: tuple[nn.Parameter, ...]


class BucketQueue:
    """The buckets of one group; their sums begin in this order on each of its ranks.

    Args:
        group: the ranks that sum them.
        names: the parameters that get a gradient on any rank, in the order in which they get it.
        parameters: this rank's parameters, by name.
        used: the names that get a gradient on this rank; buckets wait for these.
        begin: begins the sum of a bucket.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        names: Iterable[str],
        parameters: Mapping[str, nn.Parameter],
        used: Collection[str],
        begin: Callable[[Bucket], None],
    ) -> None:
        self._begin = begin
        self._buckets: list[Bucket] = []
        self._awaited: list[set[str]] = []
        self._number: dict[str, int] = {}
        for members in buckets(names, parameters, summed_in):
            self._number |= dict.fromkeys(members, len(self._buckets))
            self._buckets.append(Bucket(group, tuple(parameters[name] for name in members)))
            self._awaited.append({*members} & {*used})
        self._begun = 0
        self._missing = [set(names) for names in self._awaited]

    @property
    def names(self) -> Collection[str]:
        """The parameters in its buckets."""
        return self._number.keys()

    def final(self, name: str) -> None:
        """Note that a gradient is final, and begin the sums of the buckets that are ready.

        Raises:
            ScheduleError: its sum has begun already.
        """
        number = self._number[name]
        if number < self._begun:
            raise ScheduleError(
                f"the gradient of {name} was added to after its sum over ranks had begun",
                hint="REDUCE stands right before the last backward of its stage",
            )
        self._missing[number].discard(name)
        ready = self._begun
        while ready < len(self._buckets) and not self._missing[ready]:
            ready += 1
        self._begin_up_to(ready)

    def end(self) -> None:
        """Begin the remaining sums; gradients that are final from now on are the next step's."""
        self._begin_up_to(len(self._buckets))
        self._begun = 0
        self._missing = [set(names) for names in self._awaited]

    def _begin_up_to(self, stop: int) -> None:
        for number in range(self._begun, stop):
            self._begun = number + 1
            self._begin(self._buckets[number])


def on_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tensor, or a copy of it where a group can send it from: NCCL's sends from GPUs alone, and
    under ZeRO-3 a rank may keep its rows in the host's memory."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return tensor if tensor.device.type in kinds else tensor.to(kinds[0])


def strided_alike(parameters: Iterable[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of a bucket, each in the order of memory of its parameter.

    torch's fused optimizers pair elements by their places in memory (torch 2.13). If one
    has to be copied all are, so that what they are views of is freed.
    """
    parameters = list(parameters)
    if all(parameter.is_contiguous() for parameter in parameters):
        return gradients
    return [
        torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def agreed(
    group: dist.ProcessGroup,
    names: Sequence[str],
    parameters: Mapping[str, nn.Parameter],
    used: Collection[str],
) -> list[str]:
    """The names that are in use on any rank of a group; every rank of it calls this.

    Raises:
        LaunchError: the ranks of the group hold different parameters.
    """
    _check_same(group, names, [parameters[name] for name in names])
    here = torch.tensor([name in used for name in names], dtype=torch.uint8)
    found = on_group(here.to(parameters[names[0]].device), group)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return [name for name, is_used in zip(names, found.tolist(), strict=True) if is_used]


def unexpected(name: str) -> ScheduleError:
    """The error for a gradient that the other ranks do not expect."""
    return ScheduleError(
        f"parameter {name} has got a gradient in this step, and in none before it: "
        "the sums of the other ranks do not expect it"
    )


def _check_same(
    group: dist.ProcessGroup, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> None:
    """Refuse ranks that would add up different parameters."""
    known = [(n, tuple(p.shape), p.dtype) for n, p in zip(names, parameters, strict=True)]
    mine = zlib.crc32(repr(known).encode())
    found = on_group(torch.tensor([mine, -mine], device=parameters[0].device), group)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if found[0] != -found[1]:
        raise LaunchError(
            f"the {dist.get_world_size(group)} ranks that share {names[0]} do not hold the "
            f"same {len(names)} parameters in the same order",
            hint="run the same model and the same plan on every rank",
        )


def by_group(
    names: Iterable[str], groups: Mapping[str, dist.ProcessGroup]
) -> dict[dist.ProcessGroup, list[str]]:
    """The names of each group, in their order; those without a group are left out."""
    found: dict[dist.ProcessGroup, list[str]] = {}
    for name in names:
        if name in groups:
            found.setdefault(groups[name], []).append(name)
    return found


def summed_in(parameter: nn.Parameter) -> torch.dtype:
    """The dtype in which backward adds up the gradients of a parameter."""
    return parameter.grad_dtype or parameter.dtype


def buckets(
    names: Iterable[str],
    parameters: Mapping[str, nn.Parameter],
    sent_in: Callable[[nn.Parameter], torch.dtype],
) -> Iterator[list[str]]:
    """The names, in their order, in buckets of one dtype and at most `BUCKET_BYTES`.

    A parameter larger than that has one for itself.

    Args:
        sent_in: gives the dtype in which a parameter's gradient is sent.
    """
    filling: dict[torch.dtype, tuple[list[str], int]] = {}
    for name in names:
        dtype = sent_in(parameters[name])
        more = parameters[name].numel() * dtype.itemsize
        members, size = filling.get(dtype, ([], 0))
        if members and size + more > BUCKET_BYTES:
            yield members
            members, size = [], 0
        filling[dtype] = [*members, name], size + more
    for members, _ in filling.values():
        yield members
