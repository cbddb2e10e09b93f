"""Tensor parallelism in this process: a thread for each rank, and an axis that they meet on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.cluster.cluster import Device, Link
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import State
from autopipe.ir.partition import partition
from autopipe.sharding import collectives
from autopipe.sharding.collectives import own_part, together
from autopipe.sharding.ilp import AxisCosts, Sharding, shard
from autopipe.sharding.local_graph import shard_graph
from autopipe.stages.lower import lower
from autopipe.stages.rng import stream
from autopipe.tracing.traced import Trace

RATES = {"fp32": 1e12, "bf16": 1e12}
DEVICE = Device("made up", 2**30, RATES, 1e12, 1e-6, "made up for tests")


def axis(ranks: int) -> AxisCosts:
    """So many equal ranks."""
    return AxisCosts(ranks, Link(1e-6, 1e11), DEVICE)


class Meeting:
    """An axis whose ranks are threads; each says with `here` which one it is.

    Ranks take turns: one computes, until it waits for the others. What torch has once a process,
    as the level of forward-mode derivatives, is then the same to each rank as in one of its own.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self._here = threading.local()
        self._barrier = threading.Barrier(size)
        self._table: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        return self._here.rank

    def here(self, rank: int) -> None:
        self._here.rank = rank

    def abort(self) -> None:
        self._barrier.abort()

    def _exchange(self, mine: Any) -> list[Any]:
        self._table[self.rank] = mine
        self._wait()
        found = list(self._table)
        self._wait()
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait(60)
        finally:
            self.turn.acquire()

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        stacked = torch.stack(self._exchange(x.clone()))
        return stacked.sum(0) if op == "sum" else stacked.amax(0)

    def begin_all_reduce(self, x: Tensor) -> Any:
        x.copy_(self.all_reduce(x, "sum"))
        return lambda: None

    def all_gather(self, x: Tensor, sizes: Any) -> list[Tensor]:
        found = [y.clone() for y in self._exchange(x)]
        assert [y.numel() for y in found] == list(sizes)
        return found

    def reduce_scatter(self, parts: Any) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._exchange(list(parts))]).sum(0)

    def all_to_all(self, parts: Any, sizes: Any) -> list[Tensor]:
        found = [theirs[self.rank].clone() for theirs in self._exchange(list(parts))]
        assert [y.numel() for y in found] == list(sizes)
        return found


def everywhere(meeting: Meeting, what: Any) -> list[Any]:
    """The results of `what(rank)` on every rank, one thread each."""

    def run(rank: int) -> Any:
        meeting.here(rank)
        try:
            with meeting.turn:
                return what(rank)
        except BaseException:
            meeting.abort()
            raise

    with collectives.bind("tp", meeting), ThreadPoolExecutor(meeting.size) as pool:
        futures = [pool.submit(run, rank) for rank in range(meeting.size)]
    errors = [f.exception() for f in futures if f.exception() is not None]
    first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return [future.result() for future in futures]


def states_of(trace: Trace, model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, buffers and constants of a graph."""
    found: dict[str, Tensor] = {}
    for name, state in trace.graph.states.items():
        if state.kind == "parameter":
            own = model.get_parameter(name)
            found[name] = nn.Parameter(own.detach().clone(), own.requires_grad)
        elif name in trace.graph.constants:
            found[name] = trace.graph.constants[name].clone()
        else:
            found[name] = model.get_buffer(name).clone()
    return found


def dealt(states: dict[str, Tensor], sharding: Sharding, rank: int) -> dict[str, Tensor]:
    """A rank's part of them."""
    found = {}
    for name, tensor in states.items():
        lies = sharding.states.get(name)
        if lies is not None and lies.sharded:
            own = own_part(tensor.detach(), lies, sharding.ranks, rank).clone()
            tensor = nn.Parameter(own, tensor.requires_grad)
        elif isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        else:
            tensor = tensor.clone()
        found[name] = tensor
    return found


def step(
    trace: Trace, model: nn.Module, leaves: dict[str, Any], rows: int, sharding: Sharding
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Loss on every rank and gradients as a whole of one micro-batch."""
    flow = analyse(trace.graph)
    whole = states_of(trace, model)
    ranks = sharding.ranks
    meeting = Meeting(ranks)

    def run(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        own = dealt(whole, sharding, rank)
        graph = shard_graph(flow, sharding, rank)
        (stage,) = partition(analyse(graph), [])
        blocks = find_blocks(graph)
        lowered = lower(graph, stage, blocks, own, trace.reads, rows, last=True)
        with stream(0, 0, 0):
            results = lowered.module(*(leaves[path] for path in stage.inputs))
            results[0].backward()
        return results[0].detach(), {n: p.grad for n, p in own.items() if p.grad is not None}

    outcomes = everywhere(meeting, run)
    gradients = {}
    for name in outcomes[0][1]:
        parts = [gradients[name] for _, gradients in outcomes]
        lies = sharding.states.get(name)
        if lies is None:
            for other in parts[1:]:
                assert torch.allclose(parts[0], other, rtol=1e-5, atol=1e-6), name
            gradients[name] = parts[0]
        elif lies.sharded:
            size = whole[name].shape[lies.dim]
            gradients[name] = together(parts, lies, size)
        else:
            gradients[name] = torch.stack(parts).sum(0)
    return [loss for loss, _ in outcomes], gradients


def one_process(
    trace: Trace, model: nn.Module, leaves: dict[str, Any], rows: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole graph."""
    own = states_of(trace, model)
    (stage,) = partition(analyse(trace.graph), [])
    lowered = lower(trace.graph, stage, find_blocks(trace.graph), own, trace.reads, rows, last=True)
    with stream(0, 0, 0):
        results = lowered.module(*(leaves[path] for path in stage.inputs))
        results[0].backward()
    return results[0].detach(), {n: p.grad for n, p in own.items() if p.grad is not None}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient, relative to its largest element."""
    assert found.keys() == expected.keys()
    return max(
        ((g - expected[n]).abs().max().item() / max(expected[n].abs().max().item(), 1e-3), n)
        for n, g in found.items()
    )


__all__ = ["State", "axis", "everywhere", "one_process", "shard", "step", "worst"]
