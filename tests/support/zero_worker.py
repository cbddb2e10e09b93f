"""Stories of gradients summed and states sharded, in real processes; a program that tells them.

Each story is a function that every rank of its world runs. Started by `warm.spawn`, once per
rank, the program tells those of one file in turn; what came of each goes into a file:

    python zero_worker.py FOLDER zero          FOLDER/three_steps.0: empty, or a traceback

The toy is two stages on every rank, so that pipelines need no transfers here:

    stage 0   h = tanh(x tied^T scale + bias)        tied stands in both stages
    stage 1   loss of h wide^T and h tied            wide is float32, the rest float64
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from autopipe.errors import LaunchError
from autopipe.ir.torch_private import TorchDispatchMode
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.runtime.launch.world import start, world_from
from autopipe.runtime.parameters import buckets
from autopipe.runtime.parameters.gradient_sum import (
    Bucket,
    Gradients,
    GradientSum,
    all_reduce,
    total_norm,
)
from autopipe.runtime.parameters.row_shards import RowShards, deal, own_rows
from autopipe.runtime.parameters.zero1 import OptimizerShards
from autopipe.runtime.parameters.zero2 import GradientShards
from autopipe.runtime.parameters.zero3 import GatheredStage, ParameterShards, in_shards
from autopipe.runtime.step.engine import AutogradEngine, Engine, GatheredEngine, JointEngine
from autopipe.stages.gathering import most_bytes, stays, units_of, with_gathers
from autopipe.stages.lower import Lowered
from autopipe.stages.recompute import Recomputed
from tests.support import warm
from tests.support.long import sampled

aten = torch.ops.aten

Story = Callable[[], None]
Parameters = dict[str, nn.Parameter]
STORIES: dict[str, dict[int, list[Story]]] = {}


def story(file: str, *worlds: int) -> Callable[[Story], Story]:
    """Enter a story under the file whose tests tell it and the numbers of processes it is for."""

    def enter(told: Story) -> Story:
        for world in worlds:
            STORIES.setdefault(file, {}).setdefault(world, []).append(told)
        return told

    return enter


def told(file: str, world: int, folder: Path) -> Path:
    """Tell the stories of a file by so many processes; `code` is what came of the processes."""
    (folder / "code").write_text(str(warm.spawn(world, [__file__, str(folder), file])))
    return folder


# The toy

USES = {0: ("tied", "bias", "scale"), 1: ("tied", "wide")}


def toy() -> Parameters:
    """The same values at every call."""
    torch.manual_seed(0)
    double = torch.float64
    return {
        "tied": nn.Parameter(torch.randn(7, 6, dtype=double)),
        "bias": nn.Parameter(torch.randn(7, dtype=double)),
        "scale": nn.Parameter(torch.tensor(0.5, dtype=double)),
        "frozen": nn.Parameter(torch.randn(4, dtype=double), requires_grad=False),
        "unused": nn.Parameter(torch.randn(3, 2, dtype=double)),
        "wide": nn.Parameter(torch.randn(5, 7)),
    }


def stage_0(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["tied"].T * p["scale"] + p["bias"])


def stage_1(p: Mapping[str, Tensor], h: Tensor) -> Tensor:
    return (h.float() @ p["wide"].T).square().mean().double() + (h @ p["tied"]).tanh().mean()


def batch(number: int, micro_batches: int) -> Sequence[Tensor]:
    """The micro-batches of all ranks."""
    drawn = torch.Generator().manual_seed(number)
    whole = torch.randn(2 * micro_batches, 6, dtype=torch.float64, generator=drawn)
    return whole.chunk(micro_batches)


def whole_step(p: Parameters, number: int, micro_batches: int) -> None:
    """One process, all micro-batches."""
    for parameter in p.values():
        parameter.grad = None
    for x in batch(number, micro_batches):
        (stage_1(p, stage_0(p, x)) / micro_batches).backward()


def step(p: Parameters, sums: Gradients, number: int, micro_batches: int) -> None:
    """This rank's micro-batches, all forwards first, as a program with both stages runs them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter in sums.shards().values():
        parameter.grad = None
    sums.gather()
    total = world * micro_batches
    mine = batch(number, total)[rank * micro_batches :][:micro_batches]
    made = [stage_0(p, x) for x in mine]
    cut = [h.detach().requires_grad_() for h in made]
    losses = [stage_1(p, h) / total for h in cut]
    for k in range(micro_batches):
        if k == micro_batches - 1:
            sums.arm(1)
        sums.begin(1)
        losses[k].backward()
    for k in range(micro_batches):
        if k == micro_batches - 1:
            sums.arm(0)
        sums.begin(0)
        made[k].backward(cut[k].grad)
    sums.finish()


def everywhere(p: Parameters) -> dict[str, dist.ProcessGroup]:
    """Each parameter stands on all ranks."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    return dict.fromkeys(p, group)


def close(found: Tensor, expected: Tensor, said: str, to: float = 1e-6) -> None:
    """Equal to a part of the largest entry."""
    if found.numel() or expected.numel():
        off = float((found.detach() - expected.detach()).abs().max())
        most = to * float(expected.detach().abs().max())
        assert off <= most, f"{said}: off by {off:.2e}, allowed {most:.2e}"


OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
]


def stays_with_one_process(
    make: Callable[[Parameters, Mapping[str, dist.ProcessGroup]], Gradients],
) -> None:
    """Three steps: what the optimizer makes of the parameters, and the norm of the gradients."""
    for micro_batches in (1, 4):
        for optimizer in OPTIMIZERS:
            p, reference = toy(), toy()
            sums = make(p, everywhere(p))
            ours = optimizer(list(sums.shards().values()))
            theirs = optimizer(list(reference.values()))
            for number in range(3):
                step(p, sums, number, micro_batches)
                whole_step(reference, number, dist.get_world_size() * micro_batches)
                found = [q.grad for q in reference.values() if q.grad is not None]
                owned = list(sums.owned_gradients().values())
                norm = total_norm(owned, dist.group.WORLD, torch.device("cpu"))
                close(norm, torch.nn.utils.get_total_norm(found), f"norm {number}")
                ours.step()
                theirs.step()
            sums.gather()
            for name, parameter in p.items():
                close(parameter, reference[name], name)
            assert sums.shards()["unused"].grad is None


# Gradients


@story("gradients", 2, 3)
def three_steps_of_whole_gradients() -> None:
    stays_with_one_process(lambda p, groups: GradientSum(p, groups, USES))


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
            rows = slice(*getattr(sums, "rows", {}).get("half", (0, 9)))
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


# ZeRO-1


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
    """The last rank has nothing of a parameter of two rows, none of a scalar but the first."""
    p = {
        "two": nn.Parameter(torch.ones(2, 3)),
        "scalar": nn.Parameter(torch.tensor(1.0)),
        "none": nn.Parameter(torch.ones(0, 3)),
    }
    sums = OptimizerShards(p, everywhere(p), {0: list(p)})
    rank = dist.get_rank()
    assert [sums.rows[name] for name in p] == [
        [(0, 1), (0, 1), (0, 0)],
        [(1, 2), (1, 1), (0, 0)],
        [(2, 2), (1, 1), (0, 0)],
    ][rank]
    optimizer = torch.optim.SGD(list(sums.shards().values()), lr=1.0)
    sum((parameter.sum() for parameter in p.values()), torch.tensor(0.0)).backward()
    sums.finish()
    optimizer.step()
    sums.gather()
    assert p["two"].tolist() == [[-2.0] * 3] * 2 and p["scalar"].item() == -2.0


@story("zero", 2)
def a_parameter_of_another_layout() -> None:
    """Channels last: rows of a shard are a view all the same, and come back to their places."""
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    p = {"conv": nn.Parameter(weight.contiguous(memory_format=torch.channels_last))}
    sums = OptimizerShards(p, everywhere(p), {0: ["conv"]})
    optimizer = torch.optim.SGD(list(sums.shards().values()), lr=1.0)
    (p["conv"] * weight).sum().backward()
    sums.finish()
    optimizer.step()
    sums.gather()
    close(p["conv"], weight - 2 * weight, "conv")
    assert p["conv"].is_contiguous(memory_format=torch.channels_last)


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


# ZeRO-2


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


# ZeRO-3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) / width)
        self.b = nn.Parameter(torch.randn(1, width))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(width))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.seen.add_(1)
        return (aten.tanh.default(self.affine(x)),)

    def affine(self, x: Tensor) -> Tensor:
        shift = aten.mul.Tensor(self.b, self.frozen)
        return aten.add.Tensor(aten.mm.default(x, self.w), shift)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Calls block a twice, and reads a parameter of b outside of it."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Parameter(torch.randn(width, width) / width)
        self.a, self.b, self.c = Block(width), Block(width), Block(width)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.a(aten.mm.default(x, self.head))[0]
        x = self.c(self.a(self.b(x)[0])[0])[0]
        return (aten.mm.default(aten.mm.default(x, self.b.w), self.head),)


class Evaluated(Stage):
    """Other blocks than in training: a's parameters are read outside of it."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = aten.tanh.default(self.a.affine(aten.mm.default(x, self.head)))
        x = self.c(self.a(self.b(x)[0])[0])[0]
        return (aten.mm.default(aten.mm.default(x, self.b.w), self.head),)


class _Outer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


def graphs(stage: nn.Module, *, recompute: bool = False) -> fx.GraphModule:
    """A stage as `lower` makes it: a graph that calls a graph for each block."""
    module = fx.GraphModule(stage, _Outer().trace(stage))
    taken: set[str] = set()
    for node in module.graph.find_nodes(op="call_module"):
        block = fx.symbolic_trace(stage.get_submodule(node.target))
        while node.target in taken:
            node.target += "_again"
        taken.add(node.target)
        module.add_submodule(node.target, Recomputed(block) if recompute else block)
    module.recompile()
    return module


def data_parallel() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))  # type: ignore[no-any-return]


class Sharded:
    """A stage in shards, as `hold` makes it; its parameters have no memory from now on.

    Args:
        read: the dtype in which parameters are read; those that are trained are fp32 masters.
    """

    def __init__(
        self,
        stage: nn.Module,
        group: dist.ProcessGroup,
        *,
        number: int = 0,
        read: torch.dtype | None = None,
        offload: bool = False,
        copies: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        rows, parameters = {}, dict[str, nn.Parameter]()
        for name, whole in list(stage.named_parameters()):
            dtype = read or whole.dtype
            parameters[name], rows[name] = in_shards(
                whole, group, dtype, whole.dtype, offload=offload
            )
            place, _, leaf = name.rpartition(".")
            setattr(stage.get_submodule(place), leaf, parameters[name])
        held = RowShards(parameters, dict.fromkeys(parameters, group), rows)
        self.stage = stage
        self.sums = ParameterShards(held, parameters, group, {number: parameters}, copies or {})
        units = units_of(graphs(stage), parameters)
        self.gathered = GatheredStage(held, parameters, group, units)

    def with_gathers(self, module: fx.GraphModule) -> fx.GraphModule:
        return with_gathers(module, self.gathered.units, self.gathered.parameters, self.gathered)

    def by_autograd(self, *, recompute: bool = False) -> Engine:
        engine = AutogradEngine(graphs(self.stage, recompute=recompute))
        return GatheredEngine(engine, self.gathered)

    def by_graphs(self, x: Tensor, *, recompute: bool = False) -> Engine:
        """For micro-batches that look like x."""
        module = graphs(self.stage, recompute=recompute)
        lowered = Lowered(cast(Any, None), module, len(x))
        layout = Layout.of(x)
        joint = split(lowered, [replace(layout, gradient=True)], [layout], wanted=Wanted(False))
        return JointEngine(self.with_gathers(module), joint.mapped(self.with_gathers))

    def has_no_memory(self) -> None:
        for name, parameter in self.gathered.parameters.items():
            assert parameter.untyped_storage().nbytes() == 0, name


def in_flight(engine: Engine, micro_batches: Sequence[Tensor], seed: float) -> None:
    """F0 F1 F2 B0 F3 B1 B2 B3: the first of three stages under 1f1b. The loss is a sum of
    squares."""
    made: dict[int, Tensor] = {}

    def forward(k: int) -> None:
        made[k] = engine.forward(k, [micro_batches[k].clone().requires_grad_()])[0].detach()

    def backward(k: int) -> None:
        engine.backward_input(k, [seed * 2 * made.pop(k)])

    ahead = 3
    for k in range(min(ahead, len(micro_batches))):
        forward(k)
    for k in range(len(micro_batches)):
        backward(k)
        if k + ahead < len(micro_batches):
            forward(k + ahead)


def whole_of(sums: Gradients, name: str) -> Tensor:
    found = sums.master(name)
    assert isinstance(found, DTensor)
    return found.full_tensor()


@story("fully_sharded", 2, 3)
def three_steps_of_a_sharded_stage() -> None:
    """A block called twice, frozen, unused and shared parameters, uneven rows, odd layouts.

    Sixteen ways, six by default, in which every two choices meet.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ways = [*product((1, 4), OPTIMIZERS, ((False, False), (True, True)), (False, True))]
    for micro_batches, optimizer, (offload, recompute), autograd in sampled(ways, of=3):
        reference, stage = Stage(), Stage()
        stage.c.w.data = stage.c.w.data.t().contiguous().t()
        sharded = Sharded(stage, data_parallel(), offload=offload)
        unused = ("a.unused", "b.unused", "c.unused")
        assert sharded.gathered.units == (
            unused,
            ("head",),
            ("a.w", "a.b", "a.frozen"),
            ("b.b", "b.frozen"),
            ("b.w",),
            ("c.w", "c.b", "c.frozen"),
        )
        sums = sharded.sums
        if autograd:
            engine = sharded.by_autograd(recompute=recompute)
        else:
            engine = sharded.by_graphs(torch.empty(2, 5), recompute=recompute)
        named = dict(reference.named_parameters())
        ours = optimizer(list(sums.shards().values()))
        theirs = optimizer([named[name] for name in sums.shards()])
        memory = {n: shard.data_ptr() for n, shard in sums.shards().items()}
        for number in range(3):
            drawn = torch.Generator().manual_seed(number)
            rows = torch.randn(2 * world * micro_batches, 5, generator=drawn)
            ours.zero_grad()
            theirs.zero_grad()
            reference(rows)[0].square().sum().mul(0.01).backward()
            mine = rows.chunk(world)[rank]
            in_flight(Beginning(engine, sums), mine.chunk(micro_batches), 0.01)
            sums.finish()
            for name, shard in sums.shards().items():
                assert (shard.grad is None) == (named[name].grad is None), name
            found = [q.grad for q in named.values() if q.grad is not None]
            norm = total_norm(sums.owned_gradients().values(), dist.group.WORLD, rows.device)
            close(norm, torch.nn.utils.get_total_norm(found), "norm", 1e-5)
            ours.step()
            theirs.step()
        for name, parameter in named.items():
            close(whole_of(sums, name), parameter, name, 1e-5)
        assert memory == {n: shard.data_ptr() for n, shard in sums.shards().items()}
        sharded.has_no_memory()


class Beginning:
    """An engine as the executor runs it: backwards are told to the sums."""

    def __init__(self, engine: Engine, sums: Gradients, number: int = 0) -> None:
        self.forward = engine.forward
        self.backward_weight = engine.backward_weight
        self._engine, self._sums, self._number = engine, sums, number

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        self._sums.begin(self._number)
        return self._engine.backward_input(microbatch, gradients)


class _Sent(TorchDispatchMode):
    """The collectives that are begun within, with the dtypes of what they send."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = next((k for k in ("allgather", "reduce_scatter") if k in func.name()), None)
        if kind is not None:
            self.seen.add((kind, args[1].dtype))
        return func(*args, **(kwargs or {}))


@story("fully_sharded", 2, 3)
def masters_are_gathered_in_sixteen_bits() -> None:
    """Gradients of each micro-batch in bf16, summed in fp32."""
    rank, world, low = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    reference = Stage().to(low)
    sharded = Sharded(Stage(), data_parallel(), read=low)
    sums = sharded.sums
    rows = torch.randn(2 * world, 2, 5, generator=torch.Generator().manual_seed(0)).to(low)
    expected: dict[str, Tensor] = {}
    for x in rows:
        made = reference(x)[0]
        made.backward(2 * made.detach())
        for name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected.get(name, torch.zeros(())) + parameter.grad.float()
                parameter.grad = None
    with _Sent() as sent:
        engine = Beginning(sharded.by_graphs(rows[0]), sums)
        in_flight(engine, rows.chunk(world)[rank], 1.0)
        sums.finish()
    assert {*sent.seen} - {("allgather", torch.uint8)} == {
        ("allgather", low),
        ("reduce_scatter", torch.float32),
    }, sent.seen
    for name, gradient in expected.items():
        found = sums.shards()[name].grad
        assert found is not None and found.dtype == sums.shards()[name].dtype == torch.float32
        first, last = own_rows(len(gradient), world, rank)
        close(found, gradient[first:last], name)


@story("fully_sharded", 2, 3)
def what_a_rank_holds() -> None:
    """Between steps: its rows of parameters, gradients and AdamW's moments."""
    world = dist.get_world_size()
    stage = Stage(6 * world)
    named = dict(stage.named_parameters())
    total = sum(p.nbytes for n, p in named.items() if not n.endswith(".b"))
    rows = sum(p.nbytes for n, p in named.items() if n.endswith(".b"))  # one row: the first rank's
    sharded = Sharded(stage, data_parallel())
    sums = sharded.sums
    expected = total // world + (rows if dist.get_rank() == 0 else 0)
    assert sum(shard.nbytes for shard in sums.shards().values()) == expected
    optimizer = torch.optim.AdamW(list(sums.shards().values()))
    x = torch.ones(2, 6 * world)
    in_flight(Beginning(sharded.by_graphs(x), sums), [x] * 4, 0.01)
    sums.finish()
    sharded.has_no_memory()
    optimizer.step()
    moments = sum(s[k].nbytes for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))
    trained = [shard for shard in sums.shards().values() if shard.grad is not None]
    assert moments == 2 * sum(shard.nbytes for shard in trained)
    assert all(shard.grad is not None and shard.grad.nbytes == shard.nbytes for shard in trained)


@story("fully_sharded", 2)
def what_is_gathered_at_once() -> None:
    """As `most_bytes` predicts it of forward: head and b.w stay; a and then c come beside them."""
    sharded, x = Sharded(Stage(8), data_parallel()), torch.ones(2, 8)
    gathered = sharded.gathered
    sharded.by_graphs(x).forward(0, [x])
    sizes = [sum(gathered.parameters[n].nbytes for n in unit) for unit in gathered.units]
    shares = [
        sum(-(-len(p := gathered.parameters[n]) // 2) * (p.nbytes // len(p)) for n in unit)
        for unit in gathered.units
    ]
    staying = stays(graphs(sharded.stage), gathered.units, gathered.parameters)
    assert gathered.most == most_bytes(staying, sizes, shares, 2)


@story("fully_sharded", 2)
def another_lowering_over_the_same_shards() -> None:
    """Evaluation runs other graphs, of other blocks; then training goes on."""
    reference = Stage()
    sharded = Sharded(Stage(), data_parallel())
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    train = sharded.by_graphs(x)
    evaluated = Evaluated()
    for name, parameter in sharded.gathered.parameters.items():
        place, _, leaf = name.rpartition(".")
        setattr(evaluated.get_submodule(place), leaf, parameter)
    evaluate = sharded.with_gathers(graphs(evaluated))
    for _ in range(2):
        with torch.no_grad():
            close(evaluate(x)[0], reference(x)[0], "evaluation")
            close(train.forward(0, [x])[0], reference(x)[0], "the training graph, no gradients")
        close(train.forward(1, [x])[0], reference(x)[0], "training")
    sharded.has_no_memory()


class Writes(Stage):
    """b writes to what a has made; c writes to memory of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.b(self.a(aten.mm.default(x, self.head))[0])[0]
        return (aten.mm.default(self.c(aten.view.default(x, [-1, 5]))[0], self.head),)


class Affine(Block):
    """Autograd keeps its result for nothing: it may be written to."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (aten.view.default(self.affine(x), [-1]),)


class WritesToItsInput(Block):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = aten.mul_.Tensor(x, 2.0)
        return (aten.relu_.default(self.affine(aten.view.default(x, [-1, 5]))),)


@story("fully_sharded", 2)
def blocks_that_write_to_each_others_tensors() -> None:
    """They are gathered as others are: no hook stands on the tensors between them."""

    def build() -> Stage:
        stage = Writes()
        torch.manual_seed(1)
        stage.a, stage.b = Affine(5), WritesToItsInput(5)
        return stage

    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    for autograd in (False, True):
        reference, sharded = build(), Sharded(build(), data_parallel())
        reference(rows)[0].square().sum().backward()
        mine = rows.chunk(2)[dist.get_rank()].chunk(2)
        engine = sharded.by_autograd() if autograd else sharded.by_graphs(mine[0])
        in_flight(Beginning(engine, sharded.sums), mine, 1.0)
        sharded.sums.finish()
        for name, parameter in reference.named_parameters():
            grad = sharded.sums.shards()[name].grad
            assert (grad is None) == (parameter.grad is None), name
            if parameter.grad is not None and grad is not None:
                first, last = own_rows(len(parameter), 2, dist.get_rank())
                close(grad, parameter.grad[first:last], name, 1e-5)


@story("fully_sharded", 2)
def scalars_and_several_dtypes() -> None:
    """A scalar is the first rank's; what is gathered in one go may be of several dtypes."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            wide = aten.mm.default(aten.to.dtype(x, torch.float64), self.w)
            return (aten.mul.Tensor(aten.to.dtype(wide, torch.float32), self.scale),)

    reference, sharded = Mixed(), Sharded(Mixed(), data_parallel())
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    reference(rows)[0].square().sum().backward()
    mine = rows.chunk(2)[dist.get_rank()]
    in_flight(Beginning(sharded.by_graphs(mine), sharded.sums), [mine], 1.0)
    sharded.sums.finish()
    grad, scale = sharded.sums.shards()["scale"].grad, reference.scale.grad
    assert grad is not None and scale is not None and grad.shape == (1 - dist.get_rank(),)
    if dist.get_rank() == 0:
        close(grad[0], scale, "scale", 1e-5)
    found = sharded.sums.master("scale")
    assert found is not None and found.item() == 0.5


@story("fully_sharded", 4)
def tied_stages() -> None:
    """Ranks 0 and 1 have one stage, 2 and 3 another; `head` stands in both. Two losses."""
    rank = dist.get_rank()
    pipelines = [dist.new_group([dp, 2 + dp]) for dp in range(2)]
    groups = [dist.new_group([2 * s, 2 * s + 1]) for s in range(2)]
    reference, number = Stage(), rank // 2
    copies = {"head": pipelines[rank % 2]}
    sharded = Sharded(Stage(), groups[number], number=number, copies=copies)
    sums = sharded.sums
    rows = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for shard in sums.shards().values():
            shard.grad = None
        in_flight(Beginning(sharded.by_graphs(rows[rank]), sums, number), [rows[rank]], 1.0)
        sums.finish()
    reference(rows.view(8, 5))[0].square().sum().backward()
    head = sums.shards()["head"].grad
    assert head is not None and reference.head.grad is not None
    first, last = own_rows(5, 2, rank % 2)
    close(head, reference.head.grad[first:last], "head", 1e-5)
    owned = [tuple(g.shape) for g in sums.owned_gradients().values()]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, owned)
    assert len(everyone[0]) == len(everyone[2]) + 1, "head counts on its first stage"


def main(folder: Path, file: str) -> None:
    world = world_from(os.environ)
    assert world is not None
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with start(world, timeout=60):
        for told in STORIES[file][world.size]:
            result = folder / f"{told.__name__}.{world.rank}"
            try:
                told()
            except Exception:
                result.write_text(traceback.format_exc())
                raise
            result.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
