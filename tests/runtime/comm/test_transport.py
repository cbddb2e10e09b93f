"""What all transports share: which bytes travel, and the mailbox within a rank."""

from itertools import product

import pytest
import torch

from autopipe.errors import ScheduleError
from autopipe.runtime.comm.transport import Mailbox, incoming, is_dense, outgoing
from tests.support.transport_stories import on


def test_dense_is_every_place_once() -> None:
    """Against brute force: the places of all elements are 0, 1, ... without gap or overlap."""
    for shape, strides in product(product((1, 2, 3), repeat=2), product(range(5), repeat=2)):
        tensor = torch.zeros(20).as_strided(shape, strides)
        places = [i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])]
        assert is_dense(tensor) == (sorted(places) == list(range(len(places)))), (shape, strides)


def test_dense_tensors_travel_without_a_copy() -> None:
    values = torch.arange(24.0, requires_grad=True)
    for tensor in (values, values.view(4, 6), values.view(4, 6).t(), values[6:18].view(3, 4)):
        for row in (outgoing(tensor), incoming(tensor)):
            assert row.data_ptr() == tensor.data_ptr() and row.nbytes == tensor.nbytes
            assert row.is_contiguous() and not row.requires_grad


def test_what_has_gaps_is_copied_and_left_alone() -> None:
    values = torch.arange(24.0).view(4, 6)
    row = outgoing(values[:, ::2])
    assert row.tolist() == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20, 22]]
    row.zero_()
    assert values[0, 2] == 2


def test_a_buffer_with_gaps() -> None:
    with pytest.raises(AssertionError, match=r"a buffer with gaps: .* strides \(2,\)"):
        incoming(torch.zeros(6)[::2])


def test_within_a_rank_both_sides_complete_when_they_meet() -> None:
    box, buffer = Mailbox(), torch.zeros(2)
    send = box.send(torch.ones(2), on(2, 3), 0)
    assert buffer.tolist() == [0, 0]
    post = box.post(buffer, on(2, 3), 0)
    assert buffer.tolist() == [1, 1]
    post.wait()
    send.wait()
    box.close()


def test_within_a_rank_nobody_else_ends_a_wait() -> None:
    """A thread that waits for itself would wait for ever: it is told so at once."""
    box = Mailbox()
    send, post = box.send(torch.ones(1), on(2, 3), 0), box.post(torch.zeros(1), on(2, 3), 1)
    with pytest.raises(ScheduleError) as found:
        send.wait()
    assert str(found.value) == (
        "send of stage 2 -> stage 3, flow F, slot 0: waited for before its receive was issued, "
        "which the same rank would have to do: it would wait for ever\n"
        "hint: in a schedule of your own, put SEND before WAIT and POST before FREE"
    )
    with pytest.raises(ScheduleError, match="before its send was issued"):
        post.wait()
    with pytest.raises(RuntimeError, match="slot 0: closed before a receive came"):
        box.close()


def test_a_mailbox_keeps_the_order_of_a_slot() -> None:
    """Three micro-batches of one slot, two of another, in between."""
    box = Mailbox()
    for slot, value in ((0, 1.0), (1, 10.0), (0, 2.0), (0, 3.0), (1, 20.0)):
        box.send(torch.tensor([value]), on(2, 3), slot)
    buffers = {slot: torch.zeros(3) for slot in (1, 0)}
    for slot, count in ((1, 2), (0, 3)):
        for k in range(count):
            box.post(buffers[slot][k], on(2, 3), slot)
    assert buffers[0].tolist() == [1, 2, 3] and buffers[1].tolist() == [10, 20, 0]


def test_a_mailbox_refuses_another_size() -> None:
    box = Mailbox()
    box.post(torch.zeros(4), on(2, 3), 0)
    with pytest.raises(
        RuntimeError, match="send of .*: 12 bytes are sent, and the buffer takes 16"
    ):
        box.send(torch.ones(3), on(2, 3), 0)
