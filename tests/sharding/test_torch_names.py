"""What is asked of torch.distributed, on all versions of torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopipe.sharding.torch_names import group_of


@pytest.mark.parametrize(
    ("backend", "device", "told"),
    [
        ("nccl", "cuda:3", torch.device("cuda:3")),
        ("gloo", "cuda:3", None),  # ranks that share a GPU
        ("gloo", "cpu", None),
    ],
)
def test_nccl_is_told_the_gpu_of_the_rank(
    backend: str, device: str, told: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 on GPU 3, as of a plan that begins on the fast half of a node: since torch 2.15 the
    group would be opened on the GPU of LOCAL_RANK, or on GPU 0, and sums would fail there."""
    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda *args, **more: asked.append((args, more)))
    group_of((0, 2), backend, torch.device(device))
    assert asked == [(([0, 2],), {"backend": backend, "device_id": told})]
