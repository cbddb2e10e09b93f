"""Stories of ZeRO-3: a stage in shards trains as one process does, and holds its rows alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.ir.torch_private import TorchDispatchMode
from autopipe.planfile.placements import own_rows
from autopipe.runtime.parameters.gradient_sum import total_norm
from autopipe.sharding.collectives import in_rows
from autopipe.stages.gathering import most_bytes, stays
from tests.support.long import sampled
from tests.support.sharded_stage import (
    Beginning,
    Block,
    Evaluated,
    Sharded,
    Stage,
    data_parallel,
    graphs,
    in_flight,
    whole_of,
)
from tests.support.world_stories import story
from tests.support.zero_toy import OPTIMIZERS, close

aten = torch.ops.aten


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
        close(found, in_rows(gradient, own_rows(gradient.shape, world, rank)), name)


@story("fully_sharded", 2, 3)
def what_a_rank_holds() -> None:
    """Between steps: its rows of parameters, gradients and AdamW's moments."""
    world = dist.get_world_size()
    stage = Stage(6 * world)
    named = dict(stage.named_parameters())
    total = sum(p.nbytes for p in named.values())  # those of one row are shared by columns
    sharded = Sharded(stage, data_parallel())
    sums = sharded.sums
    assert sum(shard.nbytes for shard in sums.shards().values()) == total // world
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
        sum(
            4 * own_rows(p.shape, 2, 0).elements(p.shape)
            for p in (gathered.parameters[n] for n in unit)
        )
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
                own = own_rows(parameter.shape, 2, dist.get_rank())
                close(grad, in_rows(parameter.grad, own), name, 1e-5)


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
    rows = own_rows(reference.head.shape, 2, rank % 2)
    close(head, in_rows(reference.head.grad, rows), "head", 1e-5)
    owned = [tuple(g.shape) for g in sums.owned_gradients().values()]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, owned)
    assert len(everyone[0]) == len(everyone[2]) + 1, "head counts on its first stage"
