"""A whole pipeline in this process: one thread per rank, the real executor, the real programs.

    cut("gpt", pp=2)  ->  Cut: stages, boundaries, blocks of a model of the zoo, traced once
    run(cut, batch, micro_batches=4, schedule="1f1b")  ->  Outcome: losses, gradients, buffers

Nothing is simulated but the network (`transport.local_network`) and the sum of tied gradients,
which processes do with an all-reduce and this harness by adding.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.description import describe
from autopipe.batch.tree import flatten, rebuild
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.cluster.measured import DTYPES, KERNELS, Found
from autopipe.frontend.construct import build_fake
from autopipe.ir.blocks import Block, find_blocks
from autopipe.ir.dataflow import Dataflow, analyse
from autopipe.ir.graph import Graph
from autopipe.ir.partition import Stage, legal_cuts, partition
from autopipe.joint.split_backward_layouts import JointDryRun, joint_for
from autopipe.joint.wanted import wanted
from autopipe.planfile.parts import InputSpec
from autopipe.planners.costs.asked_ops import meant
from autopipe.runtime.comm.threads import LocalTransport, local_network
from autopipe.runtime.step.engine import AutogradEngine, Engine, JointEngine
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.stage import Pool, StageRun, StepInput
from autopipe.schedules.instructions import Programs, holders, splits
from autopipe.schedules.lanes import sends_for
from autopipe.schedules.registry import make
from autopipe.stages import step_programs
from autopipe.stages.dry_run import Rehearsal, rehearse
from autopipe.stages.lower import lower
from autopipe.stages.precision import arithmetic
from autopipe.stages.recompute import blocks_meant, within
from autopipe.tracing.trace import trace
from autopipe.tracing.traced import Trace
from tests.support.traces import kept
from tests.support.zoo import ZOO, Batch

ROWS = 2
"""Rows of a micro-batch."""

WINDOW = 2
"""Receives posted ahead."""


def machine(processes: int, memory: int = 2**30) -> Cluster:
    """So many processes on this machine, with round rates: nothing is probed."""
    rates = {"fp32": 1e10, "fp64": 5e9, "bf16": 2e10, "fp16": 2e10}
    cpu = Device("cpu", memory, rates, 1e10, 1e-6, "made up for tests")
    link = Link(1e-4, 1e9)
    return Cluster(f"local:{processes}", (NodeGroup(1, (Group(processes, cpu),)),), link, link)


def close_together(processes: int) -> Cluster:
    """So many slow processes with links so fast that nothing is done twice: where tensors are
    sharded, tokens are too, and norms get partial gradients."""
    rates = {"fp32": 1e9, "fp64": 1e9, "bf16": 1e9, "fp16": 1e9}
    cpu = Device("cpu", 2**30, rates, 1e7, 1e-6, "made up for tests")
    link = Link(1e-9, 1e13)
    return Cluster(f"local:{processes}", (NodeGroup(1, (Group(processes, cpu),)),), link, link)


def measured(names: Iterable[str]) -> dict[str, Found]:
    """What measuring this machine could find, in round figures."""
    values = {"memory": (1e10,), "launch": (1e-6, 1e-6), "messages": (1e-4, 1e9)}
    values |= {"fp32": (1e10, 16.0), "collectives": (0.05, 0.04)}
    values |= dict.fromkeys(DTYPES[1:], (5e9,)) | dict.fromkeys(KERNELS, (1e-5, 1e9, 2e-5, 1e9))
    return {name: Found(values[name]) for name in names}


@cache
def traced(name: str) -> tuple[Trace, Dataflow, tuple[Block, ...]]:
    """A model of the zoo as a graph."""
    case = ZOO[name]
    specs = describe(case.inputs(2), case.inputs(3), 2, 3)
    found = kept(
        name,
        lambda: trace(build_fake(case.model), case.inputs(2), specs, case.loss, real=case.model),
    )
    return found, analyse(found.graph), find_blocks(found.graph)


@dataclass(frozen=True)
class Cut:
    """A model of the zoo in stages, for micro-batches of `rows` rows."""

    name: str
    trace: Trace
    flow: Dataflow
    blocks: tuple[Block, ...]
    stages: tuple[Stage, ...]
    rehearsal: Rehearsal
    rows: int
    recompute: tuple[str, ...] = ()
    precision: str = "fp32"
    by_op: bool = False

    @property
    def graph(self) -> Graph:
        return self.trace.graph

    @property
    def specs(self) -> Sequence[InputSpec]:
        return self.trace.inputs

    def programs(
        self,
        schedule: str,
        micro_batches: int,
        *,
        chunks: int = 1,
        window: int = WINDOW,
        depth: int = 0,
    ) -> Programs:
        """A step's programs: `chunks` stages on each rank, the same window and depth everywhere."""
        stages = len(self.stages)
        depths = [depth] * (stages - 1) if depth else []
        compute = make(schedule, stages // chunks, micro_batches, chunks=chunks, depths=depths)
        boundaries, windows = self.rehearsal.boundaries, [window] * (stages - 1)
        ahead = sends_for(depths)
        return step_programs.step_programs(compute, self.stages, boundaries, windows, ahead)

    def __str__(self) -> str:
        return f"{self.name} before {[self.graph.nodes[s.first].name for s in self.stages[1:]]}"


@cache
def cut(
    name: str,
    pp: int,
    seed: int | None = None,
    rows: int = ROWS,
    *,
    split: bool = False,
    recompute: tuple[str, ...] = (),
    ops: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    precision: str = "fp32",
) -> Cut:
    """Cut evenly by the number of legal cuts, or with a seed anywhere that is legal.

    With `split` the stages are rehearsed for schedules that split backwards; of all blocks the
    nodes of `ops`, short names, and what `words` mean (`asked_ops`) run again alone.
    """
    found, flow, blocks = traced(name)
    legal = legal_cuts(flow)
    chosen = [legal[len(legal) * number // pp] for number in range(1, pp)]
    if seed is not None:
        chosen = sorted(random.Random(f"{name} {pp} {seed}").sample(legal, pp - 1))
    stages = partition(flow, chosen)
    graph, again = found.graph, blocks_meant(blocks, recompute)
    inside = chain.from_iterable(range(block.first, block.stop) for block in blocks)
    again += tuple(n.name for n in (graph.nodes[p] for p in inside) if n.short in ops)
    again += tuple(graph.nodes[position].name for position in sorted(meant(flow, blocks, words)))
    by_op = bool(ops or words)
    how = wanted(split, compiled=False, by_op=by_op)
    rehearsal = rehearse(graph, stages, blocks, rows, recompute=again, precision=precision)
    if how is not None:
        joint = JointDryRun(graph, blocks, rows, again, precision, how)
        rehearsal = joint.instead(stages, rehearsal)
    return Cut(name, found, flow, blocks, stages, rehearsal, rows, again, precision, by_op)


@dataclass(frozen=True)
class Outcome:
    """What a step left behind: in every stage, and summed or joined under the model's names."""

    losses: list[tuple[Tensor, ...]]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    executors: list[Executor]


def own_states(cut: Cut, stage: Stage, model: nn.Module) -> dict[str, Tensor]:
    """A stage's own copy of its parameters, buffers and constants."""
    graph, own = cut.graph, {}
    for name in stage.states:
        if graph.states[name].kind == "parameter":
            parameter = model.get_parameter(name)
            own[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
        elif name in graph.constants:
            own[name] = graph.constants[name].clone()
        else:
            own[name] = model.get_buffer(name).clone()
    return own


def micro_batch(cut: Cut, batch: Batch, k: int) -> Any:
    """Micro-batch k of a batch, as a batch."""
    leaves = flatten(batch)
    rows = slice_rows(cut.specs, leaves, k * cut.rows, (k + 1) * cut.rows)
    return rebuild(batch, rows)


def ready(
    cut: Cut, programs: Programs, *, metered: bool = False, model: nn.Module | None = None
) -> tuple[list[Executor], list[dict[str, Tensor]]]:
    """The ranks of the zoo's model, or of another one, ready to run, and what each one owns."""
    model = ZOO[cut.name].model() if model is None else model
    made, owned = [], []
    ranks = holders(programs)
    backwards = wanted(splits(programs), compiled=False, by_op=cut.by_op)
    for rank, transport in enumerate(local_network(ranks)):
        stages = [s for s, holder in zip(cut.stages, ranks, strict=True) if holder == rank]
        own: dict[str, Tensor] = {}
        for stage in stages:
            own = own_states(cut, stage, model) | own
        runs, low = [], list[Tensor]()
        for stage in stages:
            last, how = stage.index == len(cut.stages) - 1, cut.precision
            lowered = lower(
                cut.graph,
                stage,
                cut.blocks,
                own,
                cut.trace.reads,
                cut.rows,
                last=last,
                recompute=within(cut.graph, stage, cut.blocks, cut.recompute),
                precision=how,
            )
            low += [own[name] for name in lowered.low]
            joint = None
            if backwards is not None:
                joint = joint_for(
                    cut.graph,
                    lowered,
                    cut.rehearsal,
                    last=last,
                    precision=how,
                    wanted=backwards,
                )
            module = lowered.module
            engine: Engine = AutogradEngine(module) if joint is None else JointEngine(module, joint)
            boundaries, values = cut.rehearsal.boundaries, [own[name] for name in stage.states]
            pool = Pool(torch.device("cpu"))
            runs.append(StageRun(stage, boundaries, engine, transport, values, pool))
        begin = partial(arithmetic, cut.precision, "cpu", low)
        executor = Executor(runs, programs[rank], Unsummed(), begin)
        executor.meter = Meter() if metered else None
        made.append(executor)
        owned.append(own)
    return made, owned


class Unsummed:
    """In the place of the sum over processes: this harness adds what it finds at the end."""

    def begin(self, stage: int) -> None:
        pass

    def arm(self, stage: int) -> None:
        pass

    def finish(self) -> None:
        pass


def step(
    made: Sequence[Executor],
    cut: Cut,
    batch: Batch,
    seed: float,
    number: int = 0,
    *,
    training: bool = True,
) -> list[tuple[Tensor, ...]]:
    """One step of all ranks, each in its thread; the results of the last stage."""
    leaves = flatten(batch)

    def inputs_of(stage: Stage, k: int) -> list[Tensor]:
        rows = slice_rows(cut.specs, leaves, k * cut.rows, (k + 1) * cut.rows)
        # A rank's own rows, as in a process of its own: the model may write them.
        return [rows[path].clone() for path in stage.inputs]  # type: ignore[misc]

    def run_one(executor: Executor) -> list[tuple[Tensor, ...]]:
        transport = next(iter(executor.stages.values())).transport
        assert isinstance(transport, LocalTransport)
        try:
            with torch.set_grad_enabled(training):
                results = [*executor.run(StepInput(inputs_of, seed, (0, number, 0))).values()]
            transport.close()
        except BaseException as error:
            transport.abort(error)
            raise
        return results

    # One core a rank, which a thread says for itself: oneDNN asks the thread, not the process.
    with ThreadPoolExecutor(len(made), initializer=torch.set_num_threads, initargs=(1,)) as threads:
        running = [threads.submit(run_one, executor) for executor in made]
    return next(found for future in running if (found := future.result()))


def run(
    cut: Cut,
    batch: Batch,
    *,
    micro_batches: int,
    schedule: str = "1f1b",
    metered: bool = False,
    seed: float | None = None,
    **shape: int,
) -> Outcome:
    """One step of the zoo's model from its first weights.

    Args:
        seed: the gradient of each micro-batch's loss; None: its share of a mean.
        shape: chunks, window and depth, as `Cut.programs` takes them.
    """
    made, owned = ready(cut, cut.programs(schedule, micro_batches, **shape), metered=metered)
    share = 1 / micro_batches if seed is None else seed
    losses = step(made, cut, batch, share)
    return Outcome(losses, gradients(owned), buffers(cut, owned), made)


def gradients(owned: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every parameter's gradient, summed over the ranks that have the parameter."""
    found: dict[str, Tensor] = {}
    for own in owned:
        for name, tensor in own.items():
            if tensor.grad is not None:
                found[name] = found[name] + tensor.grad if name in found else tensor.grad
    return found


def buffers(cut: Cut, owned: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Every buffer of the model as the stages have left it."""
    return {
        name: tensor
        for own in owned
        for name, tensor in own.items()
        if cut.graph.states[name].kind == "buffer"
    }
