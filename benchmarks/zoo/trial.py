"""One model, tried: planned, run split in this process, and held to what plain PyTorch computes.

Tried(subject)      built, planned, traced once as a rank does
  .split("pp2")     a plan for two stages, run by the runtime's executors -> Row
  .torch()          the same by torch.distributed.pipelining -> Row
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autopipe.errors import AutopipeError
from autopipe.frontend import batch as batches
from autopipe.ir.dataflow import is_random
from autopipe.planfile.contents import Plan
from autopipe.planners.costs.tp_degrees import check_heads
from autopipe.planners.driver.loss_parts import best_loss
from autopipe.planners.driver.make_plan import traced_model
from autopipe.planners.driver.request import Job, PlanRequest, Traced
from autopipe.planners.model.problem import Constraints
from autopipe.runtime.start import TracedModel, trace_planned
from autopipe.tracing.source import bare
from autopipe.util.stopwatch import Stopwatch
from benchmarks.zoo import theirs
from benchmarks.zoo.hub.kernels import grouped_products_in_fp64
from benchmarks.zoo.one_process import Result, dealt_out, in_stages
from benchmarks.zoo.subject import Model, Subject
from tests.support.inprocess import machine

ROWS, MICRO_BATCHES = 2, 2
"""Rows of a micro-batch, and how many of them."""

CLOSE = 1e-5
"""How far a sum in another order may be off, as a share of the largest entry."""

CLOSE_IN_16_BITS = 0.02
"""The same for a model that computes in 16 bits somewhere: two roundings of bf16."""

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""A share of the largest gradient of all below which a difference is that of roundings: gradients
that are 0 but for roundings, as of a bias before a batch norm, have no digits to compare."""

MEMORY = 2**36
"""Bytes of a device: memory is not what is tried here."""

SUMS = 4
"""So many times the distance of plain PyTorch's gradients from those in fp64 another order of sums
may be off, where a model makes more of roundings than CLOSE."""

LOW = (torch.bfloat16, torch.float16)

SPLITS = {"pp2": (2, 1), "pp4": (4, 1), "tp2": (1, 2)}
"""What is tried: stages, and tensor-parallel ranks."""


@dataclass(frozen=True)
class Row:
    """What came of one model split one way.

    Attributes:
        outcome: right, refused, wrong, crashed, timeout, or not built.
        cause: the sentence of a refusal; what differs of a wrong one.
        gradient: the worst difference of a gradient, as a share of its largest entry.
        bitwise: whether loss, gradients and buffers are equal in every bit.
        reference: what it was held to: "eager", or for random models "graph", the unsplit graph.
        predicted, counted: bytes kept for backward on all ranks, by the plan and by the run.
        seconds: since the row before; the first row has building and tracing.
    """

    model: str
    what: str
    outcome: str
    cause: str = ""
    gradient: float | None = None
    bitwise: bool | None = None
    reference: str = ""
    predicted: int | None = None
    counted: int | None = None
    seconds: float = 0.0


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


def attempt(name: str, what: str, one: Callable[[], Row]) -> Row:
    """The row of one attempt, whatever is raised in it."""
    try:
        return one()
    except AutopipeError as error:
        return Row(name, what, "refused", said(error))
    except Exception as error:  # a bug of autopipe: no user may see it
        return Row(name, what, "crashed", said(error))


class Tried:
    """A model that is being tried: what all ways to split it share is made once."""

    def __init__(self, subject: Subject, model: Model) -> None:
        self.subject, self.model = subject, model
        self.batch = model.inputs(ROWS * MICRO_BATCHES)

    @cached_property
    def request(self) -> PlanRequest:
        """What is asked of the planner, but for the mesh."""
        return PlanRequest(
            model=self.model.build,
            inputs=self.model.inputs,
            loss=self.model.loss,
            optimizer="sgd",
            precision="fp32",
            grad_dtype="fp32",
            optimizer_dtype="fp32",
            compiled=None,
            cluster=machine(1, MEMORY),
            batch_size=ROWS * MICRO_BATCHES,
            constraints=Constraints(),
            recompute=None,
            planner="dynamic",
            sequence_parallel=True,
            loss_over="micro-batch",
            loss_parts=None,
            source=None,
        )

    @cached_property
    def traced(self) -> Traced:
        """As `autopipe.plan` traces it, and compares the graph with the model."""
        skeleton = bare(self.request.model)
        return traced_model(self.request, skeleton, lambda line: None, Stopwatch())

    def plan(self, pp: int, tp: int) -> Plan:
        """As `autopipe.plan` makes it."""
        if tp > 1:
            check_heads(self.traced.graph, tp)
        cluster = machine(pp * tp, MEMORY)
        constraints = Constraints(pp, 1, tp, MICRO_BATCHES, "1f1b")
        request = replace(self.request, cluster=cluster, constraints=constraints)
        return best_loss(Job(request, self.traced, cluster, 0.0), Stopwatch(), lambda line: None)

    @cached_property
    def eager(self) -> Result:
        """The unsplit model over the same micro-batches, by plain PyTorch."""
        return self._eager(self.model.build(), lambda batch: batch)

    @cached_property
    def rounding(self) -> float:
        """How far gradients of plain PyTorch are from those in fp64, by roundings; 0 if unknown."""

        def doubled(leaf: Any) -> Any:
            floats = isinstance(leaf, Tensor) and leaf.is_floating_point()
            return leaf.double() if floats else leaf

        try:
            with grouped_products_in_fp64():
                exact = self._eager(self.model.build().double(), partial(tree_map, doubled))
        except Exception:  # the model's own code asks for fp32
            return 0.0
        return compared(self.eager, exact)[0]

    def _eager(self, model: nn.Module, cast: Callable[[Any], Any]) -> Result:
        losses = []
        for k in range(MICRO_BATCHES):
            loss = self.model.eager(model, cast(self.micro_batch(k)))
            (loss.sum() / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return Result(losses, gradients, buffers)

    def micro_batch(self, k: int) -> Any:
        """Micro-batch k."""
        specs = self.traced.trace.inputs
        leaves = batches.flatten(self.model.inputs(ROWS * MICRO_BATCHES))
        return batches.rebuild(
            self.batch, batches.slice_rows(specs, leaves, k * ROWS, (k + 1) * ROWS)
        )

    @property
    def close(self) -> float:
        """How far a sum in another order may be off."""
        made = (spec for node in self.traced.graph.nodes for spec in node.outputs)
        low = any(spec is not None and spec.dtype in LOW for spec in made)
        return CLOSE_IN_16_BITS if low else CLOSE

    @property
    def random(self) -> bool:
        """Whether the model draws random numbers, which no split draws as plain PyTorch does."""
        return any(is_random(node) for node in self.traced.graph.nodes)

    def as_rank(self, plan: Plan) -> TracedModel:
        """The model as a rank traces it, from the plan."""
        if self._rank is None:
            self._rank = trace_planned(self.model.build, self.model.inputs, self.model.loss, plan)
        return self._rank

    _rank: TracedModel | None = None

    def run(self, plan: Plan) -> Result:
        """A step by the plan, all its ranks in this process."""
        trace = self.as_rank(plan).trace
        run = dealt_out if plan.mesh.tp > 1 else in_stages
        return run(plan, trace, self.model.build(), self.batch)

    @cached_property
    def reference(self) -> tuple[str, Result]:
        """What a split is held to, and its name."""
        if not self.random:
            return "eager", self.eager
        return "graph", self.run(self.plan(1, 1))

    def split(self, what: str) -> Row:
        """Plan, run and compare."""
        plan = self.plan(*SPLITS[what])
        found = self.run(plan)
        name, expected = self.reference
        worst, bitwise, differing = compared(found, expected, self.close)
        if differing and worst <= SUMS * self.rounding:
            worst, bitwise, differing = compared(found, expected, SUMS * self.rounding)
        return Row(
            self.subject.name,
            what,
            "wrong" if differing else "right",
            ", ".join(differing[:4]),
            worst,
            bitwise,
            name,
            sum(stage.predicted.memory.activations for stage in plan.stages),
            found.saved,
        )

    def torch(self) -> Row:
        """By torch's own tracing and splitting into two stages."""
        name = self.subject.name
        try:
            found = theirs.run(self.model, [self.micro_batch(k) for k in range(MICRO_BATCHES)])
        except Exception as error:
            return Row(name, "torch", "crashed", said(error))
        worst, bitwise, differing = compared(found, self.eager)
        outcome = "wrong" if differing else "right"
        return Row(name, "torch", outcome, ", ".join(differing[:4]), worst, bitwise, "eager")


def compared(
    found: Result, expected: Result, close: float = CLOSE
) -> tuple[float, bool, list[str]]:
    """The worst difference of a gradient, whether all is equal in every bit, and what differs."""
    differing, worst = [], 0.0
    pairs = list(zip(found.losses, expected.losses, strict=True))
    bitwise = all(torch.equal(a, b) for a, b in pairs)
    if any(_off(a, b, 0.0) > close for a, b in pairs):
        differing.append("loss")
    largest = _largest(expected.gradients.values())
    for name, other in expected.gradients.items():
        gradient = found.gradients.get(name)
        if gradient is None:
            off = 0.0 if not bool(other.any()) else float("inf")
        else:
            off = _off(gradient, other, ROUNDING / CLOSE * largest)
            bitwise &= torch.equal(gradient, other)
        worst = max(worst, off)
        if off > close:
            differing.append(name)
    differing += [
        name
        for name, gradient in found.gradients.items()
        if name not in expected.gradients and bool(gradient.any())
    ]
    largest = _largest(expected.buffers.values())
    for name, buffer in found.buffers.items():
        other = expected.buffers.get(name)
        if other is not None and not torch.equal(buffer, other):
            bitwise = False
            if _off(buffer, other, ROUNDING / CLOSE * largest) > close:
                differing.append(f"buffer {name}")
    return worst, bitwise, differing


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest entry of all floating-point tensors: others are held to a share of it.

    Some gradients, and some running means, are zero but for rounding.
    """
    floats = (x for x in tensors if x.numel() and (x.is_floating_point() or x.is_complex()))
    return max((float(x.detach().abs().max().nan_to_num(0, 0, 0)) for x in floats), default=0.0)


def _off(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected) or not expected.numel():
        return 0.0
    a, b = found.detach(), expected.detach()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    a, b = a.double(), b.double()
    if torch.equal(a.isfinite(), b.isfinite()):
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    scale = max(float(b.abs().max()), floor)
    return float((a - b).abs().max()) / scale if scale else float("inf")


def said(error: BaseException) -> str:
    """The first line of an error, with its type unless it is autopipe's own."""
    lines = str(error).strip().splitlines()
    first = lines[0][:300] if lines else ""
    return first if isinstance(error, AutopipeError) else f"{type(error).__name__}: {first}"
