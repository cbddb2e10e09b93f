"""Ranks in memory tell the stories too, and show the rendezvous step by step."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from autopipe.runtime.comm.threads import LocalTransport, local_network
from autopipe.runtime.comm.transport import Transport
from tests.support.transport_stories import STAGES, STORIES, B, F, Story, on


def tell(story: Callable[[Transport, int], None], network: list[LocalTransport]) -> None:
    """Run `story` with one thread per rank; a rank that fails wakes up the others."""

    def run(rank: int) -> None:
        try:
            story(network[rank], rank)
            network[rank].close()
        except BaseException as error:
            network[rank].abort(error)
            raise

    with ThreadPoolExecutor(len(network)) as threads:
        ranks = [threads.submit(run, rank) for rank in range(len(network))]
    for rank in ranks:
        rank.result()


@pytest.mark.parametrize("story", STORIES)
def test_story(story: Story) -> None:
    tell(story, local_network(STAGES, timeout=10))


def test_a_transport_for_each_rank() -> None:
    assert len(local_network([0, 1, 2, 2, 1, 0])) == 3
    assert len(local_network([0, 0, 0])) == 1


def test_a_send_completes_only_when_its_receive_is_posted() -> None:
    zero, one = local_network([0, 1], timeout=0.05)
    buffer = torch.zeros(1)
    send = zero.send(torch.ones(1), on(0, 1), 3)
    with pytest.raises(TimeoutError) as late:
        send.wait()
    assert str(late.value) == (
        "send of stage 0 -> stage 1, flow F, slot 3: no receive came within 0.05 s"
    )
    one.post(buffer, on(0, 1), 3).wait()  # meets the send, which is still there
    send.wait()
    assert buffer.item() == 1


def test_a_receive_waits_for_a_send_of_its_own_channel() -> None:
    zero, one = local_network([0, 1, 1], timeout=0.05)
    post = zero.post(torch.zeros(1), on(1, 0, B), 0)
    for channel, slot in ((on(1, 0, B), 1), (on(1, 0, F), 0), (on(2, 0, B), 0)):
        one.send(torch.ones(1), channel, slot)
    with pytest.raises(TimeoutError, match="receive of stage 1 -> stage 0, flow B, slot 0: no"):
        post.wait()


def test_two_ranks_that_both_wait_for_their_sends() -> None:
    """The deadlock that posting ahead avoids, found instead of hung."""

    def story(transport: Transport, rank: int) -> None:
        transport.send(torch.ones(1), on(rank, 1 - rank), 0).wait()
        transport.post(torch.zeros(1), on(1 - rank, rank), 0).wait()

    with pytest.raises((TimeoutError, RuntimeError), match="no receive came within 0.1 s"):
        tell(story, local_network([0, 1], timeout=0.1))


def test_a_failing_rank_wakes_up_the_others() -> None:
    zero, one, two = local_network([0, 1, 2])
    wait = one.post(torch.zeros(1), on(0, 1), 0).wait
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        zero.abort(ZeroDivisionError("in the loss"))
        zero.abort(KeyError("what came of it"))
        with pytest.raises(RuntimeError, match="rank 0 has failed: in the loss") as woken:
            waiting.result(timeout=10)
    assert isinstance(woken.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="rank 0 has failed"):
        two.send(torch.ones(1), on(2, 0), 0)
    one.close()  # what is left over is no news now


def test_a_transfer_that_nobody_met_is_found_at_the_end() -> None:
    zero, one = local_network([0, 1, 1, 0])  # stages 1 and 2 on rank 1, stages 0 and 3 on rank 0
    zero.send(torch.ones(1), on(3, 2, B), 0)
    one.close()
    with pytest.raises(RuntimeError, match="closed before a receive came"):
        zero.close()
    zero, one = local_network([0, 1, 1, 0])
    one.send(torch.ones(1), on(1, 2), 0)
    zero.close()
    with pytest.raises(RuntimeError, match="closed before a receive came"):
        one.close()


def test_a_buffer_of_another_size() -> None:
    zero, one = local_network([0, 1])
    zero.send(torch.ones(3), on(0, 1), 0)
    with pytest.raises(RuntimeError, match="12 bytes are sent, and the buffer takes 16"):
        one.post(torch.ones(4), on(0, 1), 0)
