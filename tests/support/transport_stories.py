"""Stories of transfers between three ranks, for whichever transport; a program that runs them all.

    rank 0: stages 0 and 5      rank 1: stages 1 and 4      rank 2: stages 2 and 3      (a V)

Each story is one function that all three ranks run, each with its own number. Started as a program
(by `warm.spawn`, once per rank) it tells them between processes, and what came of each goes into
a file; `told` starts it and gives the folder:

    python transport_stories.py gloo FOLDER      FOLDER/order_is_kept.0: empty, or a traceback
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.runtime.comm.choose import TRANSPORTS, VARIABLE, transport_for
from autopipe.runtime.comm.gloo import GlooTransport, in_one_group
from autopipe.runtime.comm.nccl import NcclTransport, make_lanes
from autopipe.runtime.comm.transport import Handle, Transport
from autopipe.runtime.launch.world import start, world_from
from autopipe.schedules.instructions import Channel, Flow
from autopipe.schedules.transfers import Edge
from tests.support import warm

STAGES = (0, 1, 2, 2, 1, 0)
"""The rank of each stage."""

RANKS = 3
F, B = Flow.ACTIVATION, Flow.GRADIENT

Story = Callable[[Transport, int], None]


def on(source: int, target: int, flow: Flow = F) -> Channel:
    """0 -> 1, flow F; `on(1, 0, B)` is the way back."""
    return Channel(source, target, flow)


def order_is_kept(transport: Transport, rank: int) -> None:
    """Stage 0 --1, 2, 3, 4--> 1 in one slot, micro-batch after micro-batch."""
    if rank == 0:
        sends = [transport.send(torch.tensor([i]), on(0, 1), 0) for i in range(1, 5)]
        for send in sends:
            send.wait()
    if rank == 1:
        for expected in range(1, 5):
            buffer = torch.tensor([0])
            transport.post(buffer, on(0, 1), 0).wait()
            assert buffer.item() == expected


def slots_do_not_mix(transport: Transport, rank: int) -> None:
    """0 sends in slots 0, 1, 2; 1 takes them as 2, 1, 0."""
    if rank == 0:
        sends = [transport.send(torch.tensor([slot]), on(0, 1), slot) for slot in range(3)]
        for send in sends:
            send.wait()
    if rank == 1:
        for slot in (2, 1, 0):
            buffer = torch.tensor([7])
            transport.post(buffer, on(0, 1), slot).wait()
            assert buffer.item() == slot


def pairs_of_stages_do_not_mix(transport: Transport, rank: int) -> None:
    """0 -> 1 and 0 -> 4 both lead from rank 0 to rank 1, which takes them the other way round."""
    sent = {on(0, 1): 10.0, on(0, 4): 20.0}
    if rank == 0:
        sends = [
            transport.send(torch.tensor([value + slot]), channel, slot)
            for slot in range(2)
            for channel, value in sent.items()
        ]
        for send in sends:
            send.wait()
    if rank == 1:
        for channel in reversed(sent):
            for slot in range(2):
                buffer = torch.zeros(1)
                transport.post(buffer, channel, slot).wait()
                assert buffer.item() == sent[channel] + slot


def pairs_of_stages_share_a_lane(transport: Transport, rank: int) -> None:
    """The same two pairs of stages, taken in the order of sending."""
    for channel, value in ((on(0, 1), 1.0), (on(0, 4), 2.0), (on(0, 1), 3.0)):
        if rank == 0:
            transport.send(torch.tensor([value]), channel, 0).wait()
        if rank == 1:
            buffer = torch.zeros(1)
            transport.post(buffer, channel, 0).wait()
            assert buffer.item() == value


def down_the_v_and_back(transport: Transport, rank: int) -> None:
    """F 0 -> 1 -> ... -> 5 and B back, four micro-batches; all receives are posted before.

    Activations and gradients both travel both ways between two ranks, and turn around in rank 2.
    """
    micro_batches, last = range(4), len(STAGES) - 1
    own = [stage for stage, holder in enumerate(STAGES) if holder == rank]
    buffers = {(flow, stage): torch.zeros(4, 8) for flow in Flow for stage in own}
    posts: dict[tuple[Flow, int, int], Handle] = {}
    sends = []
    for k in micro_batches:
        for stage in own:
            if stage > 0:
                forward = on(stage - 1, stage)
                posts[F, stage, k] = transport.post(buffers[F, stage][k], forward, 0)
            if stage < last:
                backward = on(stage + 1, stage, B)
                posts[B, stage, k] = transport.post(buffers[B, stage][k], backward, 0)
    for flow, order in ((F, own), (B, own[::-1])):
        for k in micro_batches:
            for stage in order:
                if (flow, stage, k) in posts:
                    posts[flow, stage, k].wait()
                    value = buffers[flow, stage][k] + 1
                else:  # where the flow begins
                    value = torch.full((8,), 10.0 * k)
                target = stage + 1 if flow is F else stage - 1
                if 0 <= target <= last:
                    sends.append(transport.send(value, on(stage, target, flow), 0))
                else:
                    assert value.tolist() == [10 * k + 5] * 8
    for send in sends:
        send.wait()


def a_skip_over_a_stage(transport: Transport, rank: int) -> None:
    """0 -> 1 -> 2, and 0 -> 2 in the same slot."""
    long, near = torch.tensor([1.0]), torch.tensor([2.0])
    if rank == 0:
        sends = transport.send(long, on(0, 2), 0), transport.send(near, on(0, 1), 0)
        for send in sends:
            send.wait()
    if rank == 1:
        buffer = torch.zeros(1)
        transport.post(buffer, on(0, 1), 0).wait()
        transport.send(buffer * 10, on(1, 2), 0).wait()
    if rank == 2:
        far, next_door = torch.zeros(1), torch.zeros(1)
        posts = transport.post(next_door, on(1, 2), 0), transport.post(far, on(0, 2), 0)
        for post in posts:
            post.wait()
        assert (far.item(), next_door.item()) == (1.0, 20.0)


def within_a_rank(transport: Transport, rank: int) -> None:
    """2 -> 3 and back: whichever side comes first, a channel of one rank is one like any other."""
    if rank == 2:
        for posts_first in (True, False):
            buffer, tensor = torch.zeros(2, 3), torch.arange(6.0).view(2, 3)
            calls: list[Callable[[], Handle]] = [
                lambda buffer=buffer: transport.post(buffer, on(3, 2, B), 0),
                lambda tensor=tensor: transport.send(tensor, on(3, 2, B), 0),
            ]
            for handle in [call() for call in (calls if posts_first else calls[::-1])]:
                handle.wait()
            assert torch.equal(buffer, tensor)


def _carry(transport: Transport, rank: int, tensor: Tensor) -> None:
    """0 --tensor--> 2, which finds it in a buffer of its own layout, and 2 -> 3 within the rank."""
    if rank == 0:
        transport.send(tensor, on(0, 2), 0).wait()
    if rank == 2:
        near, far = (torch.empty_like(tensor).fill_(0) for _ in range(2))
        transport.post(near, on(0, 2), 0).wait()
        transport.post(far, on(2, 3), 0)
        transport.send(tensor, on(2, 3), 0).wait()
        assert torch.equal(near, tensor) and torch.equal(far, tensor), (near, far, tensor)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
)


def every_dtype(transport: Transport, rank: int) -> None:
    """Bytes have no dtype; on a machine with a GPU they start and end there as well."""
    values = torch.tensor([[0.0, 1.0, 2.0], [0.5, 3.0, 0.0]])
    for device in DEVICES:
        for dtype in DTYPES:
            _carry(transport, rank, values.to(device, dtype))
        _carry(transport, rank, torch.tensor(3.0, device=device))  # without dimensions


def a_transposed_layout(transport: Transport, rank: int) -> None:
    """Dense in another order than the dimensions': it goes as it lies."""
    values = torch.arange(24.0)
    _carry(transport, rank, values.view(4, 6).t())
    _carry(transport, rank, values.view(2, 3, 4).permute(1, 2, 0))
    _carry(transport, rank, values.view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    _carry(transport, rank, values[6:18].view(3, 4))  # somewhere inside its storage


def layouts_with_gaps(transport: Transport, rank: int) -> None:
    """Not dense, or bytes that mean something else: cloned into the layout of `empty_like`."""
    values = torch.arange(24.0).view(4, 6)
    _carry(transport, rank, values[:, ::2])
    _carry(transport, rank, values[:, ::2].t())
    _carry(transport, rank, values[:, :1].expand(4, 5))
    _carry(transport, rank, torch.complex(values, values + 1).conj())
    _carry(transport, rank, torch.complex(values, values + 1).conj().imag)


def no_elements_no_message(transport: Transport, rank: int) -> None:
    """A receive of nothing needs no send, a send of nothing no receive; the next slot is apart."""
    if rank == 1:
        transport.post(torch.empty(0, 4), on(0, 1), 0).wait()
        transport.send(torch.empty(3, 0), on(1, 2), 0).wait()
        transport.send(torch.ones(1), on(1, 2), 1).wait()
    if rank == 2:
        buffer = torch.zeros(1)
        transport.post(torch.empty(3, 0), on(1, 2), 0).wait()
        transport.post(buffer, on(1, 2), 1).wait()
        transport.post(torch.empty(0), on(2, 3), 0).wait()
        assert buffer.item() == 1


def outside_autograd(transport: Transport, rank: int) -> None:
    """An output with a graph behind it can be sent, and a leaf that wants a gradient filled."""
    weight = torch.tensor([2.0], requires_grad=True)
    if rank == 0:
        transport.send(weight * 3, on(0, 1), 0).wait()
    if rank == 1:
        leaf = torch.zeros(1, requires_grad=True)
        transport.post(leaf, on(0, 1), 0).wait()
        assert leaf.item() == 6.0 and leaf.is_leaf and leaf.requires_grad


def waiting_twice(transport: Transport, rank: int) -> None:
    """The second wait has nothing to wait for."""
    handle = None
    if rank == 0:
        handle = transport.send(torch.ones(1), on(5, 4, B), 0)
    if rank == 1:
        handle = transport.post(torch.zeros(1), on(5, 4, B), 0)
    if handle is not None:
        handle.wait()
        handle.wait()


def both_send_before_either_receives(transport: Transport, rank: int) -> None:
    """0 and 1 each have a send under way when they post, and wait for what they get first."""
    if rank < 2:
        own, other = ((0, 1), (5, 4)), ((1, 0), (4, 5))
        ways = (own, other) if rank == 0 else (other, own)
        tensors = [torch.full((1 << 16,), 10.0 * rank + k) for k in range(4)]
        sends = [transport.send(x, on(*ways[0][k % 2], B), k) for k, x in enumerate(tensors)]
        for k in range(4):
            buffer = torch.zeros(1 << 16)
            transport.post(buffer, on(*ways[1][k % 2], B), k).wait()
            assert torch.equal(buffer, tensors[k] + 10 * (1 - 2 * rank))
        for send in sends:
            send.wait()


def many_small_ones(transport: Transport, rank: int) -> None:
    """More of them under way, in both directions, than any socket has room for."""
    many, slots = 3000, 4
    numbers = torch.arange(many).view(many, 1)
    if rank < 2:
        sent, taken = (on(0, 1), on(1, 0, B)) if rank == 0 else (on(1, 0, B), on(0, 1))
        found = torch.zeros(many, 1, dtype=torch.int64)
        posts = [transport.post(found[k], taken, k % slots) for k in range(many)]
        sends = [transport.send(numbers[k], sent, k % slots) for k in range(many)]
        for handle in (*posts, *sends):
            handle.wait()
        assert torch.equal(found, numbers)


def a_large_one(transport: Transport, rank: int) -> None:
    """100 MB, posted late and posted ahead."""
    large = torch.arange(25 * 10**6, dtype=torch.int32)
    for ahead in (False, True):
        go, found = torch.zeros(1), torch.zeros_like(large)
        if rank == 0:
            if ahead:
                transport.post(go, on(2, 0, B), 0).wait()
            send = transport.send(large, on(0, 2), 0)
            if not ahead:
                transport.send(go, on(0, 2), 1).wait()
            send.wait()
        if rank == 2:
            if not ahead:
                transport.post(go, on(0, 2), 1).wait()
            post = transport.post(found, on(0, 2), 0)
            if ahead:
                transport.send(go, on(2, 0, B), 0).wait()
            post.wait()
            assert torch.equal(found, large)


IN_ORDER: tuple[Story, ...] = (
    order_is_kept,
    pairs_of_stages_share_a_lane,
    down_the_v_and_back,
    a_skip_over_a_stage,
    within_a_rank,
    every_dtype,
    a_transposed_layout,
    layouts_with_gaps,
    no_elements_no_message,
    outside_autograd,
    waiting_twice,
)
"""Both ends of a pair of ranks take the tensors of a flow in one order: a lane asks for that."""

STORIES: tuple[Story, ...] = (
    *IN_ORDER,
    slots_do_not_mix,
    pairs_of_stages_do_not_mix,
    both_send_before_either_receives,
    many_small_ones,
    a_large_one,
)


def told(transport: str, folder: Path) -> Path:
    """All stories over "gloo", "shared" (gloo in one group), "direct" or "lanes", told once by a
    process per rank."""
    (folder / "code").write_text(str(warm.spawn(RANKS, [__file__, transport, str(folder)])))
    return folder


def check(story: Story, folder: Path) -> None:
    """Fail with the traceback of the first rank for which the story did not end well."""
    for rank in range(RANKS):
        result = folder / f"{story.__name__}.{rank}"
        assert result.exists(), "an earlier story failed"
        assert result.read_text() == ""


EDGES = [Edge(source, target, True) for target in range(len(STAGES)) for source in range(target)]
"""Every stage sends to all that follow."""


def main(transport: str, folder: Path) -> None:
    world = world_from(os.environ)
    assert world is not None
    with start(world, timeout=30):
        made: Transport
        cpu = torch.device("cpu")
        assert dist.group.WORLD is not None
        one = in_one_group(STAGES, dist.group.WORLD)
        shared = GlooTransport(STAGES, world.rank, one, owned=False)
        if transport in TRANSPORTS:
            os.environ[VARIABLE] = transport
            made = transport_for(cpu, [STAGES], EDGES, timeout=30)
        elif transport == "shared":
            made = shared
        else:  # one-way lanes as on NCCL, with gloo underneath
            groups = make_lanes([STAGES], EDGES, cpu, backend="gloo", timeout=30)
            made = NcclTransport(STAGES, world.rank, groups, shared)
        for story in IN_ORDER if transport == "lanes" else STORIES:
            result = folder / f"{story.__name__}.{world.rank}"
            try:
                story(made, world.rank)
            except Exception:
                result.write_text(traceback.format_exc())
                raise
            result.touch()
        made.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
