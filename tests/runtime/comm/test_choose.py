"""Which transport is chosen, and that a run of one rank needs no process group."""

import pytest
import torch

from autopipe.errors import LaunchError
from autopipe.runtime.comm.choose import choose, transport_for
from tests.support.transport_stories import F, on


@pytest.mark.parametrize(
    ("gpus", "asked", "transport"),
    [
        (["GPU a", "GPU b"], None, "nccl"),
        (["GPU a", "GPU b"], "", "nccl"),
        (["GPU a", "GPU b"], "gloo", "gloo"),  # to find a fault without NCCL
        (["GPU a", None], None, "gloo"),
        ([None, None], None, "direct"),
        ([None, None], "gloo", "gloo"),
        ([None, None], "direct", "direct"),
        (["GPU a", "GPU a"], "nccl", "nccl"),  # NCCL_MULTI_RANK_GPU_ENABLE=1
    ],
)
def test_what_the_devices_allow(gpus: list[str | None], asked: str | None, transport: str) -> None:
    assert choose(gpus, asked) == (transport, None, bool(asked))


def test_a_torch_without_nccl() -> None:
    assert choose(["GPU a", "GPU b"], None, nccl=False).transport == "gloo"
    assert choose([None, None], None, nccl=False).transport == "direct"
    with pytest.raises(LaunchError, match="is 'nccl', but this torch is built without it"):
        choose(["GPU a", "GPU b"], "nccl", nccl=False)


def test_two_ranks_on_one_gpu() -> None:
    choice = choose(["GPU a", "GPU b", "GPU c", "GPU b"], None)
    assert choice.transport == "gloo"
    assert choice.remark == (
        "ranks 1 and 3 share GPU b, which NCCL refuses: tensors go over gloo, through host memory\n"
        "hint: NCCL 2.30 and later allow it with NCCL_MULTI_RANK_GPU_ENABLE=1; then also set "
        "AUTOPIPE_TRANSPORT=nccl"
    )


def test_a_transport_that_cannot_be() -> None:
    with pytest.raises(LaunchError, match="is 'mpi', expected gloo, direct or nccl"):
        choose(["GPU a"], "mpi")
    with pytest.raises(LaunchError, match="is 'nccl', but rank 1 runs on the CPU"):
        choose(["GPU a", None], "nccl")
    with pytest.raises(LaunchError, match="is 'direct', which copies .*, but rank 1 runs on GPU a"):
        choose([None, "GPU a"], "direct")


def test_a_rank_alone() -> None:
    """All stages are its own; no process group is opened for it."""
    transport = transport_for(torch.device("cpu"), [[0, 0, 0]], [])
    buffer = torch.zeros(2)
    post = transport.post(buffer, on(0, 2, F), 0)
    transport.send(torch.ones(2), on(0, 2, F), 0).wait()
    post.wait()
    assert buffer.tolist() == [1, 1]
    transport.close()
