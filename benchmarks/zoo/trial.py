"""One model, tried: planned, run split in this process, and compared with plain PyTorch.

Tried(subject)      built, traced once
  .split("pp2")     a plan for two stages, run by the runtime's executors -> Row
  .torch()          the same by torch.distributed.pipelining -> Row
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.tree import flatten, rebuild
from autopipe.cluster.cluster import Cluster
from autopipe.ir.dataflow import is_random
from autopipe.ir.fingerprint import fingerprint
from autopipe.ir.graph import Graph
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import InputSpec
from autopipe.planners.costs.tp_degrees import check_degree
from autopipe.planners.driver.checked_trace import traced_model
from autopipe.planners.driver.loss_parts import best_loss
from autopipe.planners.driver.request import Job, PlanRequest, Traced
from autopipe.planners.model.problem import Constraints
from autopipe.runtime.start import trace_planned
from autopipe.sharding.plan_io import read_back
from autopipe.stages.dry_run import Known
from autopipe.tracing.source import bare
from autopipe.tracing.traced import Trace
from autopipe.util.stopwatch import Stopwatch
from benchmarks.zoo import theirs
from benchmarks.zoo.compare import CLOSE, compared, rounded
from benchmarks.zoo.one_process import Result, dealt_out, in_stages
from benchmarks.zoo.row import Row, attempt, said
from benchmarks.zoo.subject import Model, Subject
from benchmarks.zoo.versions import doubled, doubled_graph, doubled_inputs, nudged
from tests.support.inprocess import machine

ROWS, MICRO_BATCHES = 2, 2
"""Rows of a micro-batch, and how many of them."""

CLOSE_IN_16_BITS = 0.02
"""The same for a model that computes in 16 bits somewhere: two roundings of bf16."""

ROUNDINGS = 1e-3
"""A share of the largest entry; what is off by more is not called a rounding."""

MEMORY = 2**36
"""Bytes of a device: memory is not what is tried here."""

LOW = (torch.bfloat16, torch.float16)

SPLITS = {"pp2": (2, 1), "pp4": (4, 1), "tp2": (1, 2)}
"""What is tried: stages, and tensor-parallel ranks."""


def processes(ranks: int) -> Cluster:
    """So many processes on this machine."""
    return machine(ranks, MEMORY)


def rows(subject: Subject, whats: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A row for each way to split a model; one row if it cannot be built."""
    torch.set_num_threads(1)
    begin = time.process_time()

    def timed(row: Row) -> dict[str, Any]:
        nonlocal begin
        seconds, begin = time.process_time() - begin, time.process_time()
        return asdict(replace(row, seconds=round(seconds, 2)))

    try:
        model = subject.make()
    except Exception as error:  # whatever a library raises
        yield timed(Row(subject.name, "build", "not built", said(error)))
        return
    tried = Tried(subject, model)
    for what in whats:
        one = tried.torch if what == "torch" else partial(tried.split, what)
        yield timed(attempt(subject.name, what, one))


class Tried:
    """A model that is being tried: what all ways to split it share is made once."""

    def __init__(
        self,
        subject: Subject,
        model: Model,
        cluster: Callable[[int], Cluster] = processes,
        precision: str = "fp32",
        compiled: bool | None = None,
    ) -> None:
        self.subject, self.model, self.cluster, self.precision = subject, model, cluster, precision
        self.compiled = compiled
        self.batch = model.inputs(ROWS * MICRO_BATCHES)
        self._plans: dict[tuple[int, int], Plan] = {}
        self._rehearsed: defaultdict[int, Known] = defaultdict(dict)

    @cached_property
    def request(self) -> PlanRequest:
        """What is asked of the planner, but for the mesh."""
        return PlanRequest(
            model=self.model.build,
            inputs=self.model.inputs,
            loss=self.model.loss,
            optimizer="sgd",
            precision=self.precision,
            cluster=self.cluster(1),
            batch_size=ROWS * MICRO_BATCHES,
            constraints=Constraints(dp=1, micro_batches=MICRO_BATCHES),
            planner="dynamic",
            sequence_parallel=True,
            loss_over=self.model.loss_over,
            compiled=self.compiled,
        )

    @property
    def traced(self) -> Traced:
        """As `autopipe.plan` traces it, and compares the graph with the model.

        Raises:
            Exception: what that raises.
        """
        if isinstance(self._traced, Exception):
            raise self._traced
        return self._traced

    @cached_property
    def _traced(self) -> Traced | Exception:
        try:
            skeleton = bare(self.request.model)
            return traced_model(self.request, skeleton, lambda line: None, Stopwatch())
        except Exception as error:  # a refusal, once for all ways to split it
            return error

    @cached_property
    def trace(self) -> Trace:
        """What its plans are run on."""
        return self.traced.trace

    def plan(self, pp: int, tp: int) -> Plan:
        """As `autopipe.plan` makes it, once."""
        if (pp, tp) not in self._plans:
            self._plans[pp, tp] = self._planned(pp, tp)
        return self._plans[pp, tp]

    def _planned(self, pp: int, tp: int) -> Plan:
        check_degree(self.traced.graph, tp)
        cluster = self.cluster(pp * tp)
        constraints = Constraints(pp, 1, tp, MICRO_BATCHES, "1f1b")
        request = replace(self.request, cluster=cluster, constraints=constraints)
        job = Job(request, self.traced, cluster, 0.0, known=self._rehearsed)
        return best_loss(job, Stopwatch(), lambda line: None)

    @cached_property
    def eager(self) -> Result:
        """The unsplit model over the same micro-batches, by plain PyTorch."""
        parts = micro_batches(self.trace.inputs, self.model)
        return unsplit(self.model, self.model.build(), parts)

    @cached_property
    def doubled(self) -> tuple[Tried, ...]:
        """The same model by the same plans in fp64: its graph's ops, and where that is not right,
        the ops of a graph that is traced in fp64."""
        return SameOpsDoubled(self), Doubled(self)

    @property
    def close(self) -> float:
        """How far a sum in another order may be off."""
        made = (spec for node in self.trace.graph.nodes for spec in node.outputs)
        low = any(spec is not None and spec.dtype in LOW for spec in made)
        return CLOSE_IN_16_BITS if low else CLOSE

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers, which no split draws as plain PyTorch does."""
        return any(is_random(node) for node in self.trace.graph.nodes)

    def run(self, plan: Plan) -> Result:
        """A step by the plan, all its ranks in this process."""
        trace, model = self.trace, self.model.build()
        if plan.mesh.tp > 1:
            return dealt_out(plan, trace, model, self.batch)
        return in_stages(plan, trace, model, self.batch, self._rehearsed[1])

    @cached_property
    def reference(self) -> tuple[str, Result]:
        """What a split is held to, and its name."""
        if not self.random:
            return "eager", self.eager
        return "graph", self.run(self.plan(1, 1))

    def split(self, what: str) -> Row:
        """Plan, run and compare; what differs is compared once more in fp64."""
        row, found = self.compared(what)
        if row.outcome == "wrong":
            for wide in self.doubled:
                again = attempt(row.model, what, partial(wide.row, what))
                if again.outcome == "right":
                    reference = f"{again.reference} in fp64"
                    return replace(row, outcome="right", cause="", reference=reference)
            if self.rounds(found):
                return replace(row, outcome="right", cause="", reference="rounding")
            row = replace(row, cause=f"{row.cause}; in fp64 {again.outcome}: {again.cause}")
        return row

    def rounds(self, found: Result) -> bool:
        """Whether a split is as near as the unsplit model with each weight's last place off by one.

        For models that fp64 does not take whole: torch multiplies groups in no such dtype, and
        norms may cast to fp32.
        """
        _, nearby = Tried(self.subject, nudged(self.model)).reference
        _, expected = self.reference
        own, off = compared(nearby, expected)[0], compared(found, expected)[0]
        return off <= own and off <= ROUNDINGS

    def row(self, what: str) -> Row:
        """What came of it, in the dtype of the model."""
        return self.compared(what)[0]

    def compared(self, what: str) -> tuple[Row, Result]:
        """Plan and run, in the dtype of the model, and compare."""
        plan = self.plan(*SPLITS[what])
        found = self.run(plan)
        name, expected = self.reference
        worst, bitwise, differing = compared(found, expected, self.close)
        left = rounded(found, expected) if plan.mesh.tp == 1 else []
        row = Row(
            model=self.subject.name,
            what=what,
            outcome="wrong" if differing else "right",
            cause=", ".join(differing[:4]),
            gradient=worst,
            bitwise=bitwise,
            unexplained=", ".join(left[:4]),
            dealt=dealt(plan, self.trace.graph) if plan.mesh.tp > 1 else None,
            reference=name,
            predicted=sum(stage.predicted.memory.activations for stage in plan.stages),
            counted=found.saved,
        )
        return row, found

    def torch(self) -> Row:
        """By torch's own tracing and splitting into two stages."""
        name = self.subject.name
        try:
            found = theirs.run(self.model, micro_batches(self.trace.inputs, self.model))
        except Exception as error:
            return Row(name, "torch", "crashed", said(error))
        worst, bitwise, differing = compared(found, self.eager)
        outcome = "wrong" if differing else "right"
        cause = ", ".join(differing[:4])
        return Row(name, "torch", outcome, cause, worst, bitwise, reference="eager")


class Doubled(Tried):
    """A model by its plans in fp64, in which a mistake stays and what roundings made is gone.

    It is traced as a rank traces it that has such a plan: no look at what Python reads is repeated.
    """

    def __init__(self, single: Tried) -> None:
        super().__init__(single.subject, doubled(single.model), single.cluster, single.precision)
        self._single = single

    def _planned(self, pp: int, tp: int) -> Plan:
        plan = self._in_doubles(self._single.plan(pp, tp))
        return replace(plan, fingerprint=fingerprint(self.trace.graph))

    @cached_property
    def trace(self) -> Trace:
        """By any of its plans: they are of one graph."""
        plan = self._in_doubles(next(iter(self._single._plans.values())))
        return trace_planned(self.model.build, self.batch, self.model.loss, plan).trace

    def _in_doubles(self, plan: Plan) -> Plan:
        return replace(plan, inputs=doubled_inputs(plan.inputs))


class SameOpsDoubled(Doubled):
    """A model by its plans in fp64, by the ops of its graph in fp32: it is not traced again."""

    @cached_property
    def trace(self) -> Trace:
        """The graph with fp64 for fp32."""
        trace = self._single.trace
        inputs, graph = doubled_inputs(trace.inputs), doubled_graph(trace.graph)
        return replace(trace, inputs=inputs, graph=graph)


def micro_batches(specs: Sequence[InputSpec], given: Model) -> list[Any]:
    """The micro-batches of a step, as batches of the model."""
    batch = given.inputs(ROWS * MICRO_BATCHES)
    leaves = flatten(batch)
    cuts = range(0, ROWS * MICRO_BATCHES, ROWS)
    parts = (slice_rows(specs, leaves, begin, begin + ROWS) for begin in cuts)
    return [rebuild(batch, part) for part in parts]


def unsplit(
    given: Model,
    model: nn.Module,
    parts: Sequence[Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Result:
    """What plain PyTorch computes over some micro-batches, where the model lies.

    Args:
        around: what its forward stands in.
    """
    losses = []
    for part in parts:
        with around():
            loss = given.eager(model, part)
        (loss.sum() / len(parts)).backward()
        losses.append(loss.detach())
    named = model.named_parameters()
    gradients = {name: p.grad.to_dense() for name, p in named if p.grad is not None}
    return Result(losses, gradients, dict(model.named_buffers(remove_duplicate=False)))


def dealt(plan: Plan, graph: Graph) -> float:
    """Of the bytes of parameters, the share that tensor-parallel ranks have a part of."""
    sharding = read_back(plan)
    sizes = {name: int(state.spec.bytes) for name, state in graph.states.items() if state.trainable}
    shared = [name for name, lies in sharding.states.items() if lies.sharded and name in sizes]
    return sum(sizes[name] for name in shared) / max(sum(sizes.values()), 1)
