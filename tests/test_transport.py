"""Both transports tell the same stories; the one in memory shows the rendezvous step by step."""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from autopipe.runtime.launch import spawn
from autopipe.runtime.transport import LocalTransport, Transport, is_dense, local_network
from tests.transport_stories import STAGES, STORIES, B, F, Story

ROOT = Path(__file__).parent.parent


def tell(story: Story, network: list[LocalTransport]) -> None:
    """Run `story` with one thread per stage; a stage that fails wakes up the others."""

    def run(stage: int) -> None:
        try:
            story(network[stage], stage)
            network[stage].close()
        except BaseException as error:
            network[stage].abort(error)
            raise

    with ThreadPoolExecutor(len(network)) as threads:
        stages = [threads.submit(run, stage) for stage in range(len(network))]
    for stage in stages:
        stage.result()


@pytest.fixture(scope="module")
def told_over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stories, told once by three processes: a file per story and stage."""
    folder = tmp_path_factory.mktemp("gloo")
    worker = (sys.executable, str(ROOT / "tests" / "transport_stories.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        (folder / "code").write_text(str(spawn(STAGES, [str(folder)], command=worker)))
    return folder


@pytest.mark.parametrize("story", STORIES)
def test_in_memory(story: Story) -> None:
    tell(story, local_network(STAGES, timeout=10))


@pytest.mark.parametrize("story", STORIES)
def test_over_gloo(story: Story, told_over_gloo: Path) -> None:
    for stage in range(STAGES):
        result = told_over_gloo / f"{story.__name__}.{stage}"
        assert result.exists(), "an earlier story failed"
        assert result.read_text() == ""


def test_gloo_closes(told_over_gloo: Path) -> None:
    assert (told_over_gloo / "code").read_text() == "0"


def test_a_send_completes_only_when_its_receive_is_posted() -> None:
    zero, one = local_network(2, timeout=0.05)
    buffer = torch.zeros(1)
    send = zero.send(torch.ones(1), 1, F, tag=3)
    with pytest.raises(TimeoutError) as late:
        send.wait()
    assert str(late.value) == (
        "send of stage 0 -> stage 1, flow F, tag 3: no receive came within 0.05 s"
    )
    one.post(buffer, 0, F, tag=3).wait()  # meets the send, which is still there
    send.wait()
    assert buffer.item() == 1


def test_a_receive_waits_for_a_send_of_its_own_channel() -> None:
    zero, one = local_network(2, timeout=0.05)
    post = zero.post(torch.zeros(1), 1, B, tag=0)
    for tag, flow in ((1, B), (0, F)):
        one.send(torch.ones(1), 0, flow, tag)
    with pytest.raises(TimeoutError, match="receive of stage 1 -> stage 0, flow B, tag 0: no send"):
        post.wait()


def test_two_stages_that_both_wait_for_their_sends() -> None:
    """The deadlock that posting ahead avoids, found instead of hung."""

    def story(transport: Transport, stage: int) -> None:
        transport.send(torch.ones(1), 1 - stage, F, tag=0).wait()
        transport.post(torch.zeros(1), 1 - stage, F, tag=0).wait()

    with pytest.raises((TimeoutError, RuntimeError), match="no receive came within 0.1 s"):
        tell(story, local_network(2, timeout=0.1))


def test_a_failing_stage_wakes_up_the_others() -> None:
    zero, one, two = local_network(3)
    wait = one.post(torch.zeros(1), 0, F, tag=0).wait
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(wait)
        zero.abort(ZeroDivisionError("in the loss"))
        zero.abort(KeyError("what came of it"))
        with pytest.raises(RuntimeError, match="stage 0 has failed: in the loss") as woken:
            waiting.result(timeout=10)
    assert isinstance(woken.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="stage 0 has failed"):
        two.send(torch.ones(1), 0, F, tag=0)
    one.close()  # what is left over is no news now


def test_a_transfer_that_nobody_met_is_found_at_the_end() -> None:
    zero, one = local_network(2)
    zero.send(torch.ones(1), 1, F, tag=0)
    one.close()
    with pytest.raises(RuntimeError, match="closed before a receive came"):
        zero.close()


def test_a_buffer_of_another_size() -> None:
    zero, one = local_network(2)
    zero.send(torch.ones(3), 1, F, tag=0)
    with pytest.raises(RuntimeError, match="12 bytes are sent, and the buffer takes 16"):
        one.post(torch.ones(4), 0, F, tag=0)


def test_a_buffer_with_gaps() -> None:
    (zero,) = local_network(1)
    with pytest.raises(AssertionError, match=r"a buffer with gaps: .* strides \(2,\)"):
        zero.post(torch.zeros(6)[::2], 0, F, tag=0)


def test_dense_is_every_place_once() -> None:
    """Against brute force: the places of all elements are 0, 1, ... without gap or overlap."""
    for shape, strides in product(product((1, 2, 3), repeat=2), product(range(5), repeat=2)):
        tensor = torch.zeros(20).as_strided(shape, strides)
        places = [i * strides[0] + j * strides[1] for i in range(shape[0]) for j in range(shape[1])]
        assert is_dense(tensor) == (sorted(places) == list(range(len(places)))), (shape, strides)
