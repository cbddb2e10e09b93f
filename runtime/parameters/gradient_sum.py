"""Sums gradients over the ranks that hold the same parameter, while the last backward runs.

Ranks hold the same parameter when they are the same stage of another data-parallel coordinate, or
another stage that a tied parameter stands in. A parameter's group is all of them, so one sum does
for both. Losses are seeded with their share of the whole batch: sums need no division.

    program         ... 0B2    0REDUCE 0B3---------------------          0STEP
    gradients                          d(last) d(...) ... d(first)
    buckets                              |sum 0----|
                                                |sum 1----|
                                                        |sum 2----|      wait

From REDUCE on, a gradient is final when backward has added to it (the other micro-batches have).
Parameters go into buckets in reverse order, which is about the order in which backward comes to
them; a bucket whose gradients are all final is flattened and its sum begins (`buckets`).

Which parameters get a gradient is learnt in the first step, by one small exchange. A parameter that
one stage uses, and another only shares, gets zeros there; one that no stage uses gets no gradient;
neither holds back a bucket.

In a part that runs as it is (experts by a mask) values decide which parameters get a gradient.
Ranks exchange that in every step, and sum these gradients after the others. A parameter that no
rank has used gets none, as in one process, and the optimizer skips it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.planfile.placements import OwnRows
from autopipe.runtime.parameters.buckets import (
    Bucket,
    BucketQueue,
    agreed,
    by_group,
    on_group,
    strided_alike,
    summed_in,
    unexpected,
)


class Gradients(Protocol):
    """The interface of a step to a rank's gradients: `GradientSum` for whole parameters,
    `zero1.OptimizerShards`, `zero2.GradientShards` and `zero3.ParameterShards` for shards."""

    @property
    def rows(self) -> Mapping[str, OwnRows]:
        """The rows that are this rank's, of each parameter that is sharded."""

    def shards(self) -> Mapping[str, nn.Parameter]:
        """What this rank's optimizer updates, under the model's own names."""

    def begin(self, stage: int) -> None:
        """A backward of `stage` follows, or the half of it that makes its gradients."""

    def arm(self, stage: int) -> None:
        """At REDUCE: the next backward of `stage`, which comes right after, is its last."""

    def finish(self) -> None:
        """At STEP: returns when the `.grad` of every shard is that of the whole batch."""

    def gather(self) -> None:
        """Make the parameters that forward uses whole again, before they are used or saved.

        Every rank calls it at the same place: before each step and each evaluation.
        """

    def master(self, name: str) -> Tensor | None:
        """A parameter as the optimizer updates it, whole or as a DTensor, where forward reads
        another tensor.

        Every rank that shares it calls this, in one order of names.
        """

    def owned_gradients(self) -> dict[str, Tensor]:
        """Gradients by name, or parts of them: all ranks' together are the model's, each once."""


Reduction = Callable[[Bucket], Callable[[], object]]
"""Begins the sum of a bucket's gradients (None: zeros); what it returns waits for its end."""


def all_reduce(bucket: Bucket) -> Callable[[], object]:
    """The whole sum on every rank.

    The gradients become views of the bucket, and their old memory is freed: a bucket's bytes are
    held twice only while it is filled, and at the end if a parameter is not row-major.
    """
    flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket.parameters])
    sizes = [parameter.numel() for parameter in bucket.parameters]
    parts = zip(bucket.parameters, torch.split(flat, sizes), strict=True)
    views = [part.view(parameter.shape) for parameter, part in parts]
    _give(bucket, views)
    summed = on_group(flat, bucket.group)
    work = dist.all_reduce(summed, group=bucket.group, async_op=True)
    assert work is not None

    def end() -> None:
        work.wait()
        if summed is not flat:
            flat.copy_(summed)
        _give(bucket, strided_alike(bucket.parameters, views))

    return end


def _give(bucket: Bucket, gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
        parameter.grad = gradient


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=summed_in(parameter))
    return parameter.grad


@dataclass
class _Learnt:
    """What the first step has learnt; valid as long as the same parameters are trainable."""

    trainable: tuple[bool, ...]
    queues: list[BucketQueue] = field(default_factory=list)
    of: dict[str, BucketQueue] = field(default_factory=dict)


class GradientSum:
    """Sums the gradients of a rank's parameters, each on all ranks that hold it.

    Args:
        parameters: this rank's, by name, in the model's order, which is the same on every rank.
        groups: the process group of each name whose parameter stands on other ranks too.
        stages: the names that each stage of this rank uses.
        reduce: how a bucket is summed, and where the sums go.
        low: the dtype of gradients that are summed in 16 bits, by name; the optimizer gets them in
            the parameter's own dtype.
        varying: names of which one step may have a gradient and another none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, dist.ProcessGroup],
        stages: Mapping[int, Iterable[str]],
        reduce: Reduction = all_reduce,
        low: Mapping[str, torch.dtype] | None = None,
        varying: Collection[str] = (),
    ) -> None:
        self.rows: Mapping[str, OwnRows] = {}
        self._parameters = dict(parameters)
        self._groups = groups
        self._reduce = reduce
        self._low = {parameters[name]: dtype for name, dtype in (low or {}).items()}
        self._shared = [n for n, p in parameters.items() if p.requires_grad and n in groups]
        self._varying = [name for name in self._shared if name in varying]
        self._steady = [name for name in self._shared if name not in varying]
        self._stages = {stage: set(self._shared) & set(names) for stage, names in stages.items()}
        self._to_come = self._holders()
        self._learnt: _Learnt | None = None
        self._pending: list[Callable[[], object]] = []
        for name in self._shared:
            parameters[name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(name)
            )

    def shards(self) -> Mapping[str, nn.Parameter]:
        """The parameters themselves."""
        return self._parameters

    def begin(self, stage: int) -> None:
        """Nothing: micro-batches are added up before they are summed over ranks."""

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last: sum its gradients as they are made."""
        if self._learnt is not None and self._learnt.trainable != self._trainable():
            self._learnt = None
        for name in self._stages[stage]:
            self._to_come[name] -= 1

    @torch.no_grad()
    def finish(self) -> None:
        """Begin the sums that are left, and wait for all of them.

        Raises:
            LaunchError: the ranks of a group hold different parameters.
            ScheduleError: a parameter has got a gradient that it did not get in earlier steps.
        """
        if self._learnt is None:
            self._learnt = self._learn()
        for name in self._steady:
            if self._parameters[name].grad is not None and name not in self._learnt.of:
                raise unexpected(name)
        for queue in (*self._learnt.queues, *self._queues(self._varying, ())):
            queue.end()
        self._pending.reverse()
        while self._pending:
            self._pending.pop()()  # a finished sum is freed before the next is awaited
        self._to_come = self._holders()
        for parameter in self._low:  # one by one: what is cast is let go
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    def gather(self) -> None:
        """Let backward sum in 16 bits where that is asked for; parameters are whole everywhere."""
        for parameter, dtype in self._low.items():
            if parameter.grad is None:
                parameter.grad_dtype = dtype

    def master(self, name: str) -> None:
        """None: what the optimizer updates is the parameter itself."""

    def owned_gradients(self) -> dict[str, Tensor]:
        """The gradients of what stands here only, or here on the first of its group."""
        return {
            name: parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
            and (name not in self._groups or dist.get_rank(self._groups[name]) == 0)
        }

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(self._parameters[name].requires_grad for name in self._shared)

    def _holders(self) -> dict[str, int]:
        """By name, how many stages here hold a parameter: so many last backwards are to come."""
        return {n: sum(n in names for names in self._stages.values()) for n in self._shared}

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            # Right after REDUCE of the last stage that uses it comes the last to add to it.
            if self._to_come[name] == 0 and self._learnt is not None:
                if name in self._learnt.of:  # else `finish` says so, or sums it
                    self._learnt.of[name].final(name)

        return arrived

    def _learn(self) -> _Learnt:
        """Agree, group by group, on what gets a gradient on any rank, and make buckets of that."""
        learnt = _Learnt(self._trainable())
        used = {n for n in self._shared if self._parameters[n].grad is not None}
        for queue in self._queues(self._steady, used):
            learnt.queues.append(queue)
            learnt.of |= dict.fromkeys(queue.names, queue)
        return learnt

    def _queues(self, names: Sequence[str], awaited: Collection[str]) -> Iterator[BucketQueue]:
        """A queue for each group, of the parameters that have a gradient on any of its ranks."""
        used = {name for name in names if self._parameters[name].grad is not None}
        for group, members in by_group(names, self._groups).items():
            expected = agreed(group, members, self._parameters, used)
            yield BucketQueue(group, expected[::-1], self._parameters, awaited, self._begin)

    def _begin(self, bucket: Bucket) -> None:
        self._pending.append(self._reduce(bucket))


def total_norm(
    owned: Iterable[Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """The norm of the whole model's gradients, on every rank: float64, without dims.

    A rank's own norm is that of `get_total_norm`; its square, which ranks add up, may exceed fp32.
    Gradients of fp64 are scaled by the sum's root.

    Args:
        owned: this rank's `owned_gradients()`.
        group: all ranks of the run; None: this one is alone.
        device: where the ranks' sum is made.
    """
    square = torch.nn.utils.get_total_norm(list(owned)).to(device, torch.float64) ** 2
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def multiply(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply gradients in place, leaving out parameters without one."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
