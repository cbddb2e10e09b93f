"""Transfers between processes over gloo: one process group per flow and direction of ranks.

    ranks      0           1            stages 0 and 3 on rank 0, 1 and 2 on rank 1 (a V)
    F, up      0 --------> 1
    F, down    3 <-------- 2            a receive posted ahead on the group that also carries the
    B, up      3 --------> 2            other direction makes gloo slower, not faster
    B, down    0 <-------- 1

Slower by 1.3 to 1.5 times against receives posted at the last moment (measured on 2 cores, torch
2.13, 2026-11). A send holds its pair's lock while it writes, and data that comes in on the same
socket keeps gloo's thread spinning on that lock, on the core that the computation wants. With
sockets and a thread for each direction this does not occur.

Within a group a transfer is told apart by its tag, channel and slot in one number of 31 bits: with
256 stages there is room for 32,768 tensors on a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.runtime.comm.transport import DONE, Handle, Mailbox, incoming, outgoing
from autopipe.runtime.launch.world import TIMEOUT
from autopipe.schedules.instructions import Channel, Flow


class Way(NamedTuple):
    """What a group carries: one flow, from lower to higher ranks (`up`) or back."""

    flow: Flow
    up: bool


Groups = dict[Way, dist.ProcessGroup]


def ways(stages: Sequence[int]) -> list[Way]:
    """The ways that tensors can take between stages, in the same order on every rank.

    If stage i is on rank i: F up and B down. Interleaved stages and V shapes have all four.

    Args:
        stages: the rank of each stage.
    """
    used = set()
    for source, here in enumerate(stages):
        for there in stages[source + 1 :]:
            if here != there:
                used |= {Way(Flow.ACTIVATION, here < there), Way(Flow.GRADIENT, there < here)}
    return sorted(used, key=lambda way: (way.flow.value, way.up))


def make_groups(pipelines: Sequence[Sequence[int]], timeout: float = TIMEOUT) -> Groups:
    """A gloo group of all ranks for every way that some pipeline uses.

    Every rank of the world calls it, with the same arguments, at the same point of its program.

    Args:
        pipelines: for each pipeline (a data-parallel coordinate) the global rank of each stage.
        timeout: seconds that a transfer waits for its other side.
    """
    limit = timedelta(seconds=timeout)
    used = dict.fromkeys(way for stages in pipelines for way in ways(stages))
    return {way: dist.new_group(timeout=limit, backend="gloo") for way in used}


def in_one_group(stages: Sequence[int], group: dist.ProcessGroup) -> Groups:
    """Use one group of all ranks for every way: slower, but without further sockets."""
    return dict.fromkeys(ways(stages), group)


class GlooTransport:
    """One rank's end of one pipeline; tensors on a GPU pass through host memory.

    Args:
        stages: the global rank of each stage of this pipeline.
        rank: this process's global rank.
        groups: as `make_groups` or `in_one_group` makes them.
        owned: whether `close` closes the groups.
    """

    def __init__(
        self, stages: Sequence[int], rank: int, groups: Groups, *, owned: bool = True
    ) -> None:
        self._stages = tuple(stages)
        self._owned = owned
        self._rank = rank
        self._groups = dict(groups)
        self._own = Mailbox()
        self._routes: dict[Channel, _Route] = {}

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.post`; a buffer on a GPU is filled by `wait`, on the current stream."""
        if buffer.numel() == 0:
            return DONE
        route = self._routes.get(channel) or self._route(channel)
        if route.group is None:
            return self._own.post(buffer, channel, slot)
        data, landing = incoming(buffer), None
        if data.is_cuda:
            data, landing = torch.empty_like(data, device="cpu", pin_memory=True), data
        work = route.group.recv([data], route.peer, route.tag + slot * route.stride)
        return _GlooHandle(work, data, landing)

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.send`; for a tensor on a GPU it first waits for the current stream."""
        if tensor.numel() == 0:
            return DONE
        route = self._routes.get(channel) or self._route(channel)
        if route.group is None:
            return self._own.send(tensor, channel, slot)
        data = outgoing(tensor)
        if data.is_cuda:
            data = torch.empty_like(data, device="cpu", pin_memory=True).copy_(data)
        work = route.group.send([data], route.peer, route.tag + slot * route.stride)
        return _GlooHandle(work, data, None)

    def close(self) -> None:
        """As `Transport.close`; also closes the groups of all ways if the transport owns them."""
        self._own.close()
        while self._owned and self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])

    def _route(self, channel: Channel) -> _Route:
        count = len(self._stages)
        source, target = self._stages[channel.source], self._stages[channel.target]
        group = None if source == target else self._groups[Way(channel.flow, source < target)]
        peer = target if source == self._rank else source
        tag = channel.source * count + channel.target
        self._routes[channel] = route = _Route(group, peer, tag, count * count)
        return route


class _Route(NamedTuple):
    """Where the transfers of a channel go; slot s has the tag `tag + s * stride`."""

    group: dist.ProcessGroup | None  # None: this rank's own mailbox
    peer: int
    tag: int
    stride: int


@dataclass(slots=True)
class _GlooHandle:
    work: dist.Work | None
    data: Tensor  # kept alive for gloo, which writes from another thread
    landing: Tensor | None  # the buffer on the GPU into which `wait` copies the arrived `data`

    def wait(self) -> None:
        if self.work is None:
            return
        self.work.wait()
        self.work = None
        if self.landing is not None:
            self.landing.copy_(self.data, non_blocking=True)
