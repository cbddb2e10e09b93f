"""Stories of ZeRO-1: an optimizer's state is sharded, and the step is that of one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from autopipe.runtime.parameters import buckets
from autopipe.runtime.parameters.row_shards import deal, in_pieces
from autopipe.runtime.parameters.zero1 import OptimizerShards
from tests.support.world_stories import story
from tests.support.zero_toy import (
    USES,
    Parameters,
    close,
    everywhere,
    stays_with_one_process,
    step,
    toy,
)


def shards(p: Parameters, groups: Mapping[str, dist.ProcessGroup]) -> OptimizerShards:
    return OptimizerShards(p, groups, USES)


@story("zero", 2, 3)
def three_steps_of_sharded_optimizers() -> None:
    stays_with_one_process(shards)


@story("zero", 2, 3)
def many_small_buckets() -> None:
    """More gathers and sums than are under way at once."""
    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 8
    stays_with_one_process(shards)
    buckets.BUCKET_BYTES = before


@story("zero", 2, 3)
def optimizer_state_is_dealt_out() -> None:
    """Bytes of AdamW's two moments: of the rows that are this rank's, and no others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = toy()
    sums = shards(p, everywhere(p))
    optimizer = torch.optim.AdamW(list(sums.shards().values()))
    step(p, sums, 0, 1)
    optimizer.step()
    each = -(-7 // world), -(-5 // world)
    tied = max(0, min(7, (rank + 1) * each[0]) - rank * each[0])
    wide = max(0, min(5, (rank + 1) * each[1]) - rank * each[1])
    expected = 2 * 8 * (6 * tied + tied + (rank == 0)) + 2 * 4 * 7 * wide
    states = [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    assert sum(t.nbytes for t in states) == expected
    assert all(p[name].grad is None for name in p), "whole gradients were let go"
    for name in ("tied", "wide"):
        shard = sums.shards()[name]
        assert shard.untyped_storage().data_ptr() == p[name].untyped_storage().data_ptr()
        assert shard.ndim == p[name].ndim


@story("zero", 3)
def fewer_rows_than_ranks() -> None:
    """The last rank has nothing of a parameter of two rows and two columns, none of a scalar but
    the first. Of two rows of three columns each has a column."""
    p = {
        "two": nn.Parameter(torch.ones(2, 2)),
        "wide": nn.Parameter(torch.ones(2, 3)),
        "scalar": nn.Parameter(torch.tensor(1.0)),
        "none": nn.Parameter(torch.ones(0, 3)),
    }
    sums = OptimizerShards(p, everywhere(p), {0: list(p)})
    rank = dist.get_rank()
    assert [sums.rows[name] for name in p] == [
        [(0, 0, 1), (1, 0, 1), (0, 0, 1), (1, 0, 1)],
        [(0, 1, 2), (1, 1, 2), (0, 1, 1), (1, 1, 2)],
        [(0, 2, 2), (1, 2, 3), (0, 1, 1), (1, 2, 3)],
    ][rank]
    optimizer = torch.optim.SGD(list(sums.shards().values()), lr=1.0)
    sum((parameter.sum() for parameter in p.values()), torch.tensor(0.0)).backward()
    sums.finish()
    optimizer.step()
    sums.gather()
    assert p["two"].tolist() == [[-2.0] * 2] * 2 and p["scalar"].item() == -2.0
    assert p["wide"].tolist() == [[-2.0] * 3] * 2


@story("zero", 2)
def a_parameter_of_another_layout() -> None:
    """Channels last: rows of a shard are a view all the same, and come back to their places, also
    from a fused optimizer, which takes entries by their places in memory."""
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    p = {"conv": nn.Parameter(weight.contiguous(memory_format=torch.channels_last))}
    groups = everywhere(p)
    sums = OptimizerShards(p, groups, {0: ["conv"]})
    optimizer = torch.optim.SGD(list(sums.shards().values()), lr=1.0, fused=True)
    (p["conv"] * weight).sum().backward()
    sums.finish()
    optimizer.step()
    sums.gather()
    close(p["conv"], weight - 2 * weight, "conv")
    assert p["conv"].is_contiguous(memory_format=torch.channels_last)
    group = groups["conv"]
    assert not in_pieces(p["conv"], group) and in_pieces(weight.transpose(0, 1), group)


@story("zero", 2)
def weights_that_a_script_exchanges() -> None:
    """A mean of weights takes their place by `.data` while the model is evaluated, and goes again:
    what is fetched meanwhile leaves the weights that wait as they are."""
    p = {"weight": nn.Parameter(torch.arange(4.0))}
    sums = OptimizerShards(p, everywhere(p), {0: ["weight"]})
    shard = sums.shards()["weight"]
    for _ in range(2):
        waiting, shard.data = shard.data, torch.full((2,), 9.0)
        sums.gather()
        assert p["weight"].tolist() == [9.0] * 4
        shard.data = waiting
        sums.gather()
        assert p["weight"].tolist() == [0.0, 1.0, 2.0, 3.0]


@story("zero", 2, 3)
def masters_are_dealt_out() -> None:
    """Forward reads bf16, whole; gradients are added and summed in fp32; each rank updates its rows
    of the fp32 masters. Odd rows, a scalar, channels last, a weight that is used twice."""
    rank, world, low = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    drawn, wide = torch.Generator().manual_seed(0), torch.float32
    whole = {
        "odd": torch.randn(5, 3, generator=drawn),
        "scalar": torch.tensor(0.7),
        "conv": torch.randn(4, 3, 2, 2, generator=drawn).to(memory_format=torch.channels_last),
    }
    groups = everywhere({name: nn.Parameter(tensor) for name, tensor in whole.items()})
    dealt = {n: deal(nn.Parameter(t.clone()), groups[n], low, wide) for n, t in whole.items()}
    p, rows = ({name: pair[k] for name, pair in dealt.items()} for k in (0, 1))
    sums = OptimizerShards(p, groups, {0: list(p)}, rows)
    assert all(q.dtype == low and s.dtype == torch.float32 for q, s in dealt.values())
    optimizer = torch.optim.SGD(list(sums.shards().values()), lr=0.5)
    added = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for k, x in enumerate(torch.randn(2 * world, generator=drawn).to(low)):
        made = {n: q.detach().clone().requires_grad_() for n, q in p.items()}
        sum((q * q * x).sum() for q in made.values()).backward()
        for name, q in made.items():
            assert q.grad is not None
            added[name] += q.grad.float()
        if k // 2 == rank:
            sums.arm(0)
            views = {name: q.view_as(q) for name, q in p.items()}  # as `precision.arithmetic`
            sum((q * q * x).sum() for q in views.values()).backward()
    sums.finish()
    optimizer.step()
    sums.gather()
    for name, gradient in added.items():
        master = sums.master(name)
        assert master is not None and master.dtype == torch.float32
        close(master, whole[name] - 0.5 * gradient, name)
        assert torch.equal(p[name], master.to(low)) and p[name].stride() == master.stride()
    assert sum(s.nbytes for s in sums.shards().values()) < sum(t.nbytes for t in whole.values())


@story("zero", 2)
def an_update_that_leaves_no_trace() -> None:
    """By `.data`, which no version counts, and between two evaluations."""
    p = toy()
    sums = shards(p, everywhere(p))
    for _ in range(2):
        before = p["tied"].detach().clone()
        sums.gather()
        for shard in sums.shards().values():
            shard.data.add_(1.0)
        sums.gather()
        close(p["tied"], before + 1.0, "tied")


@story("zero", 2)
def a_parameter_of_this_rank_alone() -> None:
    """It is its own shard, whole."""
    p = toy()
    groups = everywhere(p)
    del groups["wide"]
    sums = shards(p, groups)
    assert sums.shards()["wide"] is p["wide"] and "wide" not in sums.rows
    step(p, sums, 0, 1)
    assert p["wide"].grad is not None
