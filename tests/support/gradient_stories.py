"""Stories of gradients that ranks sum: when a sum begins, in which order, and of what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autopipe.errors import LaunchError
from autopipe.runtime.parameters import buckets
from autopipe.runtime.parameters.gradient_sum import Bucket, GradientSum, all_reduce
from autopipe.runtime.parameters.zero1 import OptimizerShards
from tests.support.world_stories import story
from tests.support.zero_toy import (
    USES,
    batch,
    close,
    everywhere,
    stage_0,
    stage_1,
    stays_with_one_process,
    step,
    toy,
    whole_step,
)


@story("gradients", 2, 3)
def three_steps_of_whole_gradients() -> None:
    stays_with_one_process(lambda p, groups: GradientSum(p, groups, USES))


@story("gradients", 2)
def what_values_decide_is_agreed_on_in_every_step() -> None:
    """Bug: a gradient after steps without one ended the run, and no gradient was one of zeros."""
    p = {"always": nn.Parameter(torch.ones(2)), "chosen": nn.Parameter(torch.ones(3))}
    sums = GradientSum(p, everywhere(p), {0: p}, varying={"chosen"})
    for users in ([], [0], [0, 1], [], [1]):
        sums.begin(0)
        sums.arm(0)
        loss = p["always"].sum()
        if dist.get_rank() in users:
            loss = loss + p["chosen"].sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sums.finish()
        found = [None if q.grad is None else q.grad.tolist() for q in p.values()]
        assert found == [[2.0, 2.0], 3 * [float(len(users))] if users else None], found
        for q in p.values():
            q.grad = None


@story("gradients", 2)
def a_sum_begins_before_the_last_backward_ends() -> None:
    """Stage 1's last backward makes d(wide), and its sum begins while d(h) is still to come."""
    events: list[str] = []
    p = toy()
    names = {id(parameter): name for name, parameter in p.items()}

    def noted(summed: Bucket) -> Callable[[], object]:
        events.append("sum of " + " ".join(names[id(q)] for q in summed.parameters))
        return all_reduce(summed)

    sums = GradientSum(p, everywhere(p), USES, noted)
    step(p, sums, 0, 2)  # learns
    events.clear()
    x = batch(0, 1)[0]
    h = stage_0(p, x)
    cut = h.detach().requires_grad_()
    cut.register_hook(lambda _: events.append("stage 1 is through"))
    sums.arm(1)
    stage_1(p, cut).backward()
    events.append("stage 0 begins")
    x.requires_grad_().register_hook(lambda _: events.append("stage 0 is through"))
    sums.arm(0)
    stage_0(p, x).backward(cut.grad)
    events.append("STEP")
    sums.finish()
    # tied is final with the second of its stages; it and bias and scale share a bucket.
    assert events[0] == "sum of wide", events
    assert events.index("stage 0 begins") < events.index("sum of scale bias tied"), events
    assert events.index("sum of scale bias tied") < events.index("STEP"), events


@story("gradients", 2, 3)
def one_order_of_buckets() -> None:
    """Each rank's backward takes another way; the sums begin in the same order everywhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    p = {f"p{i}": nn.Parameter(torch.ones(i + 1)) for i in range(6)}
    way = list(p)[rank:] + list(p)[:rank]
    begun: list[int] = []
    arrived: list[str] = []

    def noted(summed: Bucket) -> Callable[[], object]:
        begun.append(summed.parameters[0].numel())
        return all_reduce(summed)

    sums = GradientSum(p, everywhere(p), {0: list(p)}, noted)
    for name, parameter in p.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    before, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 1
    for _ in range(2):
        arrived.clear()
        for parameter in p.values():
            parameter.grad = None
        loss = torch.tensor(0.0)
        for name in way:
            loss = loss + (rank + 1) * p[name].sum()
        sums.arm(0)
        loss.backward()
        sums.finish()
    buckets.BUCKET_BYTES = before
    ways: list[Any] = [None] * world
    dist.all_gather_object(ways, arrived)
    assert len({tuple(other) for other in ways}) == world, "the ranks were to take other ways"
    assert begun == [6, 5, 4, 3, 2, 1] * 2
    for parameter in p.values():
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [world * (world + 1) / 2] * parameter.numel()


@story("gradients", 2)
def split_backward_is_summed_too() -> None:
    """I and W: torch's DDP forgets its all-reduce here, and nobody says so (its replicas drift)."""
    p, reference = toy(), toy()
    begun: list[Bucket] = []

    def noted(summed: Bucket) -> Callable[[], object]:
        begun.append(summed)
        return all_reduce(summed)

    sums = GradientSum(p, everywhere(p), {0: list(p)}, noted)
    own = [parameter for name, parameter in p.items() if name not in ("frozen", "unused")]
    for number in range(2):
        begun.clear()
        for parameter in p.values():
            parameter.grad = None
        mine = batch(number, 8)[dist.get_rank() * 4 :][:4]
        kept = []
        for x in mine:  # 0F0 0I0 0F1 0I1 ...
            x = x.clone().requires_grad_()
            loss = stage_1(p, stage_0(p, x)) / 8
            torch.autograd.grad(loss, x, retain_graph=True)
            assert all(parameter.grad is None for parameter in p.values())
            kept.append(get_gradient_edge(loss))
        for k, edge in enumerate(kept):  # 0W0 0W1 0W2 0REDUCE 0W3 0STEP
            if k == 3:
                sums.arm(0)
            torch.autograd.backward(edge, torch.ones((), dtype=torch.float64), inputs=own)
        assert len(begun) == (2 if number else 0), "in the last W, once it is known what comes"
        sums.finish()
        whole_step(reference, number, 8)
        for name, parameter in p.items():
            expected = reference[name].grad
            assert (parameter.grad is None) == (expected is None), name
            if parameter.grad is not None and expected is not None:
                close(parameter.grad, expected, name)


@story("gradients", 2)
def a_tied_parameter_that_one_stage_does_not_use() -> None:
    """Rank 1's copy gets no gradient of its own: it has rank 0's all the same."""
    tied, neither = (nn.Parameter(torch.ones(3)) for _ in range(2))
    p = {"tied": tied, "neither": neither}
    sums = GradientSum(p, everywhere(p), {dist.get_rank(): list(p)})
    for _ in range(2):
        tied.grad = None
        sums.arm(dist.get_rank())
        if dist.get_rank() == 0:
            (2 * tied.sum()).backward()
        sums.finish()
        assert tied.grad is not None and tied.grad.tolist() == [2, 2, 2]
        assert neither.grad is None
    assert len(sums.owned_gradients()) == (dist.get_rank() == 0)


@story("gradients", 2)
def a_layer_that_is_frozen_later() -> None:
    """It has no gradient from then on, which is not the same as zeros: weight decay, momentum."""
    p = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))}
    sums = GradientSum(p, everywhere(p), {0: list(p)})
    for trainable in (True, False, True):
        p["b"].requires_grad_(trainable)
        for parameter in p.values():
            parameter.grad = None
        sums.arm(0)
        (p["a"] * p["b"]).sum().backward()
        sums.finish()
        assert p["a"].grad is not None and p["a"].grad.tolist() == [2, 2]
        assert (p["b"].grad is not None) == trainable


@story("gradients", 2)
def half_precision() -> None:
    """Two numbers have one sum in bfloat16, whoever adds them."""
    for dtype in (torch.bfloat16, torch.float16):
        p = {"half": nn.Parameter(torch.zeros(9, dtype=dtype)), "full": nn.Parameter(torch.ones(9))}
        made = [torch.randn(9, generator=torch.Generator().manual_seed(k)) for k in range(2)]
        for sums in (GradientSum(p, everywhere(p), {}), OptimizerShards(p, everywhere(p), {})):
            p["half"].grad = made[dist.get_rank()].to(dtype)
            p["full"].grad = made[dist.get_rank()].clone()
            sums.finish()
            rows = slice(*sums.rows["half"][1:]) if "half" in sums.rows else slice(9)
            half, full = (sums.shards()[name].grad for name in p)
            assert half is not None and full is not None and half.dtype == dtype
            assert torch.equal(half, (made[0].to(dtype) + made[1].to(dtype))[rows])
            assert torch.equal(full, (made[0] + made[1])[rows])


@story("gradients", 2)
def ranks_with_different_parameters() -> None:
    """In another order: equal in size, and a sum of apples and pears."""
    names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    p = {name: nn.Parameter(torch.ones(2)) for name in names}
    try:
        GradientSum(p, everywhere(p), {}).finish()
    except LaunchError as error:
        assert "the 2 ranks that share" in str(error)
    else:
        raise AssertionError("was not refused")
