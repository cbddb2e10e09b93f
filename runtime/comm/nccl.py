"""Transfers between GPUs over NCCL: one two-rank communicator per lane, for one direction.

    ranks      0           1            stages 0 and 3 on rank 0, 1 and 2 on rank 1 (a V)
    lane       0 -- 0F1 --> 1           a lane is a channel: source stage, target stage, flow
    lane       0 -- 3B2 --> 1           its transfers run in the order in which they are issued,
    lane       0 <- 2F3 --- 1           on a stream of its own; lanes do not wait for each other
    lane       0 <- 1B0 --- 1

Why so many: NCCL runs the operations of a communicator in turn, and a receive that is posted ahead
holds up the operations behind it until its tensor comes. One communicator for both directions is a
deadlock in every schedule; one for activations and gradients, in V shapes; one for all stages that
two ranks hold, in interleaved schedules (`test_deadlock.py` has the table). `schedules.deadlock`
proves programs for a lane for each channel.

    compute   ====made====|                               |====used====
                     send | event        event | wait     | (the stream waits, not the host)
    lane                  '---- bytes move ----'----------'

Streams and events are torch's: an operation of a process group starts on the group's own stream
after the current stream's work so far (for `post`: the last use of the buffer; for `send`: the
computation of the tensor), and `wait` makes the current stream wait for its end. So the current
stream's next work may reuse the memory of a tensor that has been waited for, and the host never
stops.

The first run of a program uses no lane. A GPU loads a kernel at its first use, and may first wait
for all running kernels (CUDA Programming Guide, "Lazy Loading", "Potential Hazards"). NCCL's kernel
of a receive runs until its tensor has come, and the sender may make that tensor only after it has
got one from the GPU that waits: a run that posts ahead hung in its first step on an H200. That run
goes over `loading`, gloo through host memory, which keeps no GPU waiting.

A lane has no tags: tensors are matched by order alone, in slot order within a micro-batch. All
ranks make and warm their communicators at the start, in one global order: a communicator that is
made lazily waits for its peer in the middle of a step, which can be a deadlock. Sums of gradients
go through other groups.

Tests on CPUs run the order of lanes, their matching and the calls, over gloo.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.runtime.comm.transport import (
    DONE,
    Handle,
    Mailbox,
    Transport,
    as_bytes,
    incoming,
    outgoing,
)
from autopipe.runtime.launch.world import TIMEOUT
from autopipe.schedules.instructions import Channel, Flow
from autopipe.schedules.transfers import Edge

MAX_CTAS = 2
"""Thread blocks of one lane. A receive that is posted ahead occupies this many multiprocessors from
the end of the transfer before it until its own tensor has come; NCCL's default, up to 32, would
take them from the computation. Not measured; NCCL_MAX_CTAS in the environment overrides it."""


class Lane(NamedTuple):
    """One communicator: its source rank, its target rank, and the channel that it carries."""

    source: int
    target: int
    channel: Channel


def lanes(stages: Sequence[int], edges: Iterable[Edge]) -> tuple[Lane, ...]:
    """The lanes of one pipeline in the order in which all ranks make them.

    Each rank makes the lanes of which it is an end, in this order, and skips the others. So two
    ranks make the lanes that they share in the same order, and of the lanes not yet made the first
    one always has both its ends ready: no rank waits for ever.

    Args:
        stages: the rank of each stage.
        edges: which stages send to which, in any order.
    """
    used = set()
    for source, target, gradient in edges:
        here, there = stages[source], stages[target]
        if here != there:
            used.add(Lane(here, there, Channel(source, target, Flow.ACTIVATION)))
            if gradient:
                used.add(Lane(there, here, Channel(target, source, Flow.GRADIENT)))
    return tuple(sorted(used, key=lambda lane: (*lane[:2], *lane.channel[:2])))


def make_lanes(
    pipelines: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    device: torch.device,
    backend: str = "nccl",
    timeout: float = TIMEOUT,
) -> dict[Lane, dist.ProcessGroup]:
    """Make and warm the lanes of all pipelines; all ranks call it at the same point.

    Args:
        pipelines: for each pipeline (a data-parallel coordinate) the global rank of each stage.
        edges: those of training and evaluation together.
        device: this rank's device.
        backend: the backend of the lanes' process groups.
        timeout: seconds that a transfer waits for its other side.

    Returns:
        The lanes that this rank is an end of.
    """
    rank = dist.get_rank()
    made: dict[Lane, dist.ProcessGroup] = {}
    for lane in (lane for stages in pipelines for lane in lanes(stages, edges)):
        ends = sorted((lane.source, lane.target))
        group = _group(ends, device, backend, timedelta(seconds=timeout))
        if rank in ends:
            _warm(lane, group, rank, device)
            made[lane] = group
    return made


def _group(
    ends: list[int], device: torch.device, backend: str, limit: timedelta
) -> dist.ProcessGroup:
    if backend != "nccl":
        made: dist.ProcessGroup = dist.new_group(ends, limit, backend)
        return made
    # High priority: a transfer starts between two thread blocks of a kernel, not after them all.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MAX_CTAS
    with warnings.catch_warnings():
        # torch warns that `timeout` overrides the options' limit, which has no public name.
        warnings.filterwarnings("ignore", "backend_options._timeout was specified")
        made = dist.new_group(ends, limit, backend, pg_options=options, device_id=device)
    return made


def _warm(lane: Lane, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Transfer a number, which makes the communicator; returns when the number has arrived."""
    sends = rank == lane.source
    data = torch.full((1,), int(sends), dtype=torch.uint8, device=device)
    transfer = group.send if sends else group.recv
    transfer([data], _other(rank, lane), 0).wait()
    arrived = data.item()  # the host waits for the GPU
    assert arrived == 1, f"{lane} carried {arrived} for 1"


def _other(rank: int, lane: Lane) -> int:
    """The far end of a lane, as its number in the group: 0 is the lower of the two ranks."""
    return int(rank == min(lane.source, lane.target))


def few_queues(lanes: int, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """A warning that the GPU has fewer hardware queues than this rank has streams.

    Streams that share a queue wait for each other: a receive posted ahead would stop the
    computation that its sender waits for.

    Args:
        lanes: the number of this rank's lanes; the computation and collectives need more queues.
        environ: usually `os.environ`.

    Returns:
        The sentence and the hint; None: there are enough queues.
    """
    needed = lanes + 2
    asked = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    queues = int(asked) if asked.isdecimal() else _QUEUES  # CUDA passes over what is no number
    if queues >= needed:
        return None
    return (
        f"this rank has {needed} streams ({lanes} lanes, the computation, collectives), and "
        f"CUDA_DEVICE_MAX_CONNECTIONS gives the GPU {queues} queues: transfers posted ahead can "
        "stop the computation",
        f"export CUDA_DEVICE_MAX_CONNECTIONS={min(needed, _MOST_QUEUES)} before the start",
    )


_QUEUES, _MOST_QUEUES = 8, 32
"""CUDA's default number of hardware queues, and the largest (CUDA C++ Programming Guide)."""


class NcclTransport:
    """One rank's end of one pipeline.

    Args:
        stages: the global rank of each stage of this pipeline.
        rank: this process's global rank.
        groups: as `make_lanes` makes them; `close` closes them.
        loading: a transport for the same stages; the caller uses it in place of this one while the
            GPU may be loading kernels. `close` closes it too.
    """

    def __init__(
        self,
        stages: Sequence[int],
        rank: int,
        groups: Mapping[Lane, dist.ProcessGroup],
        loading: Transport,
    ) -> None:
        self.loading = loading
        self._stages = tuple(stages)
        self._ends = {lane: _End(group, _other(rank, lane)) for lane, group in groups.items()}
        self._own = Mailbox()

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.post`; the buffer is written after the current stream's work so far."""
        end = self._end(channel)
        if end is not None:
            end.follow(channel, slot)
        if buffer.numel() == 0:
            return DONE
        if end is None:
            return self._own.post(buffer, channel, slot)
        data = as_bytes(incoming(buffer))
        return _LaneHandle(end.group.recv([data], end.peer, 0), data)

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Handle:
        """As `Transport.send`; the tensor is read after the current stream's work so far."""
        end = self._end(channel)
        if end is not None:
            end.follow(channel, slot)
        if tensor.numel() == 0:
            return DONE
        if end is None:
            return self._own.send(tensor, channel, slot)
        data = as_bytes(outgoing(tensor))
        return _LaneHandle(end.group.send([data], end.peer, 0), data)

    def close(self) -> None:
        """As `Transport.close`; also closes the groups of all lanes, and `loading`."""
        self._own.close()
        self.loading.close()
        while self._ends:
            dist.destroy_process_group(self._ends.popitem()[1].group)

    def _end(self, channel: Channel) -> _End | None:
        """This rank's end of the lane of a channel; None within the rank."""
        source, target = self._stages[channel.source], self._stages[channel.target]
        return None if source == target else self._ends[Lane(source, target, channel)]


@dataclass
class _End:
    """One end of a lane, and the last tensor that passed it."""

    group: dist.ProcessGroup
    peer: int
    last: tuple[Channel, int] | None = None

    def follow(self, channel: Channel, slot: int) -> None:
        """Check that tensors come in slot order, which both ends of a lane rely on."""
        assert slot == 0 or self.last == (channel, slot - 1), (
            f"{channel}: slot {slot} comes after {self.last}, and a lane has no tags"
        )
        self.last = channel, slot


@dataclass(slots=True)
class _LaneHandle:
    work: dist.Work | None
    data: Tensor  # held until the current stream waits, so that its memory is not reused before

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None
