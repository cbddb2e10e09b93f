"""Stories of transfers between three stages, for whichever transport; a program that runs them all.

Each story is one function that all three stages run, each with its own number. Started as a program
(by `launch.spawn`, once per stage) it tells them over gloo, and what came of each goes into a file:

    python transport_stories.py FOLDER        FOLDER/order_is_kept.0: empty, or a traceback
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from autopipe.runtime.launch import start, world_from
from autopipe.runtime.transport import GlooTransport, Transport, make_groups
from autopipe.schedule import Flow

STAGES = 3
F, B = Flow.ACTIVATION, Flow.GRADIENT

Story = Callable[[Transport, int], None]


def order_is_kept(transport: Transport, stage: int) -> None:
    """0 --1, 2, 3, 4--> 1 under one tag."""
    if stage == 0:
        sends = [transport.send(torch.tensor([i]), 1, F, tag=0) for i in range(1, 5)]
        for send in sends:
            send.wait()
    if stage == 1:
        for expected in range(1, 5):
            buffer = torch.tensor([0])
            transport.post(buffer, 0, F, tag=0).wait()
            assert buffer.item() == expected


def tags_do_not_mix(transport: Transport, stage: int) -> None:
    """0 sends under tags 5, 6, 7; 1 takes them as 7, 6, 5."""
    if stage == 0:
        sends = [transport.send(torch.tensor([tag]), 1, F, tag) for tag in (5, 6, 7)]
        for send in sends:
            send.wait()
    if stage == 1:
        for tag in (7, 6, 5):
            buffer = torch.tensor([0])
            transport.post(buffer, 0, F, tag).wait()
            assert buffer.item() == tag


def posted_ahead_in_both_directions(transport: Transport, stage: int) -> None:
    """Activations go 0 -> 1 -> 2 and gradients 2 -> 1 -> 0; all receives are posted before."""
    micro_batches = range(4)
    buffers = {flow: torch.zeros(len(micro_batches), 8) for flow in Flow}
    posts, sends = {}, []
    for k in micro_batches:
        if stage > 0:
            posts[F, k] = transport.post(buffers[F][k], stage - 1, F, k)
        if stage < STAGES - 1:
            posts[B, k] = transport.post(buffers[B][k], stage + 1, B, k)
    for k in micro_batches:
        value = torch.full((8,), float(k))
        if stage > 0:
            posts[F, k].wait()
            value = buffers[F][k] + 10
        if stage < STAGES - 1:
            sends.append(transport.send(value, stage + 1, F, k))
            posts[B, k].wait()
            value = buffers[B][k] + 100
        if stage > 0:
            sends.append(transport.send(value, stage - 1, B, k))
        else:
            assert value.tolist() == [k + 10 + 10 + 100 + 100] * 8
    for send in sends:
        send.wait()


def a_skip_over_a_stage(transport: Transport, stage: int) -> None:
    """0 -> 1 -> 2, and 0 -> 2 with the same tag."""
    long, near = torch.tensor([1.0]), torch.tensor([2.0])
    if stage == 0:
        sends = transport.send(long, 2, F, tag=0), transport.send(near, 1, F, tag=0)
        for send in sends:
            send.wait()
    if stage == 1:
        buffer = torch.zeros(1)
        transport.post(buffer, 0, F, tag=0).wait()
        transport.send(buffer * 10, 2, F, tag=0).wait()
    if stage == 2:
        far, next_door = torch.zeros(1), torch.zeros(1)
        posts = transport.post(next_door, 1, F, tag=0), transport.post(far, 0, F, tag=0)
        for post in posts:
            post.wait()
        assert (far.item(), next_door.item()) == (1.0, 20.0)


def _carry(transport: Transport, stage: int, tensor: Tensor) -> None:
    """0 --tensor--> 2, which finds it in a buffer of the tensor's own layout."""
    if stage == 0:
        transport.send(tensor, 2, F, tag=0).wait()
    if stage == 2:
        buffer = torch.empty_like(tensor).fill_(0)
        transport.post(buffer, 0, F, tag=0).wait()
        assert torch.equal(buffer, tensor), (buffer, tensor)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def every_dtype(transport: Transport, stage: int) -> None:
    """Bytes have no dtype; on a machine with a GPU they start and end there as well."""
    values = torch.tensor([[0.0, 1.0, -2.0], [0.5, 3.0, 0.0]])
    for device in DEVICES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            _carry(transport, stage, values.to(device, dtype))
        _carry(transport, stage, torch.tensor(3.0, device=device))  # without dimensions


def a_transposed_layout(transport: Transport, stage: int) -> None:
    """Dense in another order than the dimensions': it goes as it lies."""
    values = torch.arange(24.0)
    _carry(transport, stage, values.view(4, 6).t())
    _carry(transport, stage, values.view(2, 3, 4).permute(1, 2, 0))
    _carry(transport, stage, values.view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    _carry(transport, stage, values[6:18].view(3, 4))  # somewhere inside its storage


def layouts_with_gaps(transport: Transport, stage: int) -> None:
    """Not dense, or bytes that mean something else: cloned into the layout of `empty_like`."""
    values = torch.arange(24.0).view(4, 6)
    _carry(transport, stage, values[:, ::2])
    _carry(transport, stage, values[:, ::2].t())
    _carry(transport, stage, values[:, :1].expand(4, 5))
    _carry(transport, stage, torch.complex(values, values + 1).conj())
    _carry(transport, stage, torch.complex(values, values + 1).conj().imag)


def no_elements_no_message(transport: Transport, stage: int) -> None:
    """A receive of nothing needs no send, and a send of nothing no receive."""
    if stage == 1:
        transport.post(torch.empty(0, 4), 0, F, tag=0).wait()
        transport.send(torch.empty(3, 0), 2, F, tag=0).wait()


def outside_autograd(transport: Transport, stage: int) -> None:
    """An output with a graph behind it can be sent, and a leaf that wants a gradient filled."""
    weight = torch.tensor([2.0], requires_grad=True)
    if stage == 0:
        transport.send(weight * 3, 1, F, tag=0).wait()
    if stage == 1:
        leaf = torch.zeros(1, requires_grad=True)
        transport.post(leaf, 0, F, tag=0).wait()
        assert leaf.item() == 6.0 and leaf.is_leaf and leaf.requires_grad


def waiting_twice(transport: Transport, stage: int) -> None:
    """The second wait has nothing to wait for."""
    handle = None
    if stage == 0:
        handle = transport.send(torch.ones(1), 1, B, tag=0)
    if stage == 1:
        handle = transport.post(torch.zeros(1), 0, B, tag=0)
    if handle is not None:
        handle.wait()
        handle.wait()


STORIES: tuple[Story, ...] = (
    order_is_kept,
    tags_do_not_mix,
    posted_ahead_in_both_directions,
    a_skip_over_a_stage,
    every_dtype,
    a_transposed_layout,
    layouts_with_gaps,
    no_elements_no_message,
    outside_autograd,
    waiting_twice,
)


def main(folder: Path) -> None:
    world = world_from(os.environ)
    assert world is not None
    with start(world, timeout=30):
        transport = GlooTransport(range(world.size), make_groups(world.size, timeout=30))
        for story in STORIES:
            result = folder / f"{story.__name__}.{world.rank}"
            try:
                story(transport, world.rank)
            except Exception:
                result.write_text(traceback.format_exc())
                raise
            result.touch()
        transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
