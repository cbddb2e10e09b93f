"""Stories of ZeRO-2: gradients are scattered as they are made, and no rank keeps them whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from autopipe.runtime.parameters import buckets
from autopipe.runtime.parameters.row_shards import RowShards
from autopipe.runtime.parameters.zero2 import GradientShards
from tests.support.world_stories import story
from tests.support.zero_toy import USES, Parameters, close, everywhere, stays_with_one_process


def gradient_shards(p: Parameters, groups: Mapping[str, dist.ProcessGroup]) -> GradientShards:
    return GradientShards(RowShards(p, groups), p, next(iter(groups.values())), USES, {})


@story("zero", 2, 3)
def three_steps_of_sharded_gradients() -> None:
    """Both stages are on each rank, and add to the rows of the parameter that is tied."""
    stays_with_one_process(gradient_shards)
    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 8
    stays_with_one_process(gradient_shards)
    buckets.BUCKET_BYTES = before


@story("zero", 2)
def whole_gradients_are_let_go_of() -> None:
    """Each in a bucket of its own is scattered as soon as it is made, in the first backward too."""
    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 1
    p = {f"p{i}": nn.Parameter(torch.ones(2 * i + 2)) for i in range(4)}
    groups = everywhere(p)
    sums = GradientShards(RowShards(p, groups), p, groups["p0"], {0: list(p)}, {})
    held: list[int] = []
    for parameter in p.values():  # called after the sums' own
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: held.append(sum(q.grad is not None for q in p.values()))
        )
    for _ in range(2):
        sums.begin(0)
        made = torch.ones(())
        for parameter in p.values():
            made = made * parameter.mean()
        made.backward()
    sums.finish()
    assert held == [0] * 8, held
    for name, shard in sums.shards().items():
        count = p[name].numel()
        assert shard.grad is not None and shard.grad.numel() == count // 2
        close(shard.grad, torch.full((count // 2,), 4 / count), name)
    buckets.BUCKET_BYTES = before


@story("zero", 2)
def gradients_of_a_layer_that_is_frozen_later() -> None:
    """And of one that nobody uses: none, which is not the same as zeros."""
    p = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b", "unused")}
    groups = everywhere(p)
    sums = GradientShards(RowShards(p, groups), p, groups["a"], {0: list(p)}, {})
    for trainable in (True, False, True):
        p["b"].requires_grad_(trainable)
        for shard in sums.shards().values():
            shard.grad = None
        for _ in range(2):
            sums.begin(0)
            (p["a"] * p["b"]).sum().backward()
        sums.finish()
        found = {name: shard.grad for name, shard in sums.shards().items()}
        assert found["a"] is not None and found["a"].tolist() == [4]
        assert (found["b"] is not None) == trainable and found["unused"] is None
