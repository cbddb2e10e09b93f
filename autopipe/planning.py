"""`plan`: from a model and a cluster to a `Plan`.

model, inputs --trace--> Graph --profile--> Problem --planner--> Decision --rehearse--> Plan
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopipe import assemble, batches, fake, fingerprint
from autopipe.blocks import Block, classes, find_blocks
from autopipe.capture import Loss
from autopipe.cluster import Cluster, LocalSpec, parse
from autopipe.dataflow import Dataflow, analyse
from autopipe.errors import AutopipeError, InfeasibleError, ModelError
from autopipe.estimate import Estimate
from autopipe.footprint import footprint
from autopipe.graph import Ref, bytes_at
from autopipe.partition import Stage, partition
from autopipe.plan import (
    FORMAT,
    Batch,
    BlockClass,
    Boundary,
    InputSpec,
    Memory,
    Mesh,
    Place,
    Plan,
    PlannerNote,
    Prediction,
    StagePlan,
    StagePrediction,
    Transfer,
)
from autopipe.planners import PLANNERS, Answer
from autopipe.probe import local_cluster, local_processes
from autopipe.problem import Constraints, Decision
from autopipe.profile import Units, build_problem, find_units
from autopipe.rehearsal import Rehearsal, rehearse
from autopipe.trace import Trace, trace

WINDOW = 2
"""Receives posted ahead per boundary: one being filled while one is computed on."""

ROWS_PER_DEVICE = 8
"""Rows of the batch for each device where nobody says how many."""

Factory = Callable[[], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Say = Callable[[str], None]


def plan(
    model: nn.Module | Factory,
    inputs: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    precision: str = "fp32",
    cluster: str | Path | Cluster | None = None,
    batch_size: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    micro_batches: int | None = None,
    schedule: str | None = None,
    memory: int | str | None = None,
    zero: int = 0,
    recompute: Sequence[str] = (),
    planner: str = "dynamic",
    source: str | None = None,
    say: Say | None = None,
) -> Plan:
    """Decide how to split a model over a cluster. No process is started but to probe this machine.

    Args:
        model: the model, or the function that builds it; its weights are never allocated.
        inputs: an example batch, or `inputs(batch_size)`: a tuple for `model(*batch)` or a dict
            for `model(**batch)`. What `forward` does not take is the loss's.
        loss: `loss(outputs, batch)`, a scalar tensor or `(sum, count)`; default: a scalar output,
            or an output's `.loss`.
        optimizer: the name of one in torch.optim, or a function from parameters to one.
        precision: "fp32".
        cluster: "local:4", "2x8xA100-80GB", a file, a `Cluster`; default: this machine.
        batch_size: rows of the whole batch; default: the example's, or 8 a device.
        pp, dp, tp, micro_batches, schedule: constraints; None leaves them to the planner.
        memory: bytes a device may hold ("24GiB"), where that is less than it has.
        zero, recompute: not in this version.
        planner: "dynamic", "exhaustive" or "uniform".
        source: where the model comes from, for the plan to remember.
        say: gets a line of talk at a time.

    Raises:
        ModelError: the inputs do not fit the model, or (CaptureError) it cannot be captured.
        InfeasibleError: no plan fits; says the nearest one and its shortfall in bytes.
        AutopipeError: an argument cannot be met.
    """
    say = say or (lambda line: None)
    _refuse_unknown(precision, zero, recompute, planner)
    machine = _cluster(cluster, (pp, dp, tp), say)
    example, specs = _example(inputs)
    rows = batch_size or _rows(inputs, example, specs) or ROWS_PER_DEVICE * machine.num_devices
    constraints = Constraints(pp, dp, tp, micro_batches, schedule, _bytes(memory))

    traced = trace_model(model, batches_for_tracing(example, specs), specs, loss)
    graph = traced.graph
    flow, blocks = analyse(graph), find_blocks(graph)
    units = find_units(flow, at_least=pp or 1)
    say(_summary(traced, blocks))
    factor = optimizer_factor(_optimizer(optimizer))
    problem = build_problem(
        flow,
        blocks,
        units,
        machine,
        batch=rows,
        rows=_sizes(rows, machine.num_devices, constraints),
        optimizer_factor=factor,
        window=WINDOW,
        constraints=constraints,
    )
    answer = PLANNERS[planner](problem)
    found = _Found(
        traced, flow, blocks, units, machine, rows, precision, factor, planner, answer, source
    )
    name = optimizer if isinstance(optimizer, str) else "custom"
    return found.plan(_versions(model), name, problem.memory)


def trace_model(
    model: nn.Module | Factory, example: Any, specs: Sequence[InputSpec], loss: Loss | None
) -> Trace:
    """Trace a model in training without allocating its weights."""
    return trace(
        bare(model),
        example,
        specs,
        loss,
        real=lambda: model if isinstance(model, nn.Module) else model(),
    )


def bare(model: nn.Module | Factory) -> nn.Module:
    """The model with fake parameters; a given model itself is left as it is."""
    built = fake.skeleton(model) if isinstance(model, nn.Module) else fake.build_fake(model)
    if not isinstance(built, nn.Module):
        raise ModelError(f"model() gives a {type(built).__name__}, not an nn.Module")
    first: dict[tuple[int, int], str] = {}
    for name, parameter in built.named_parameters():
        where = fake.storage_key(parameter), int(parameter.storage_offset())
        if parameter.numel() and first.setdefault(where, name) != name:
            raise ModelError(
                f"{first[where]!r} and {name!r} are two parameters in one memory: split over two "
                "stages they would drift apart",
                hint="tie them by making both names the same nn.Parameter",
            )
    return built


def batches_for_tracing(example: Any, specs: Sequence[InputSpec]) -> Any:
    """Two rows of the example: export takes a dim of size 1 for a constant."""
    leaves = batches.flatten(example)
    rows = batches.rows_of(specs, leaves)
    if rows >= 2:
        return batches.rebuild(example, batches.slice_rows(specs, leaves, 0, 2))
    doubled = {
        spec.path: torch.cat([leaf, leaf], spec.batch_dim)
        if isinstance(leaf := leaves[spec.path], Tensor) and spec.batch_dim is not None
        else leaf
        for spec in specs
    }
    return batches.rebuild(example, doubled)


def optimizer_factor(make: MakeOptimizer) -> float:
    """Bytes of optimizer state per byte of parameter, seen by one step on a small parameter."""
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    held = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        # A step counter is no part of what grows with the parameter.
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    )
    return held / (parameter.numel() * parameter.element_size())


@dataclass(frozen=True)
class _Found:
    """A planner's answer and all that is needed to write it down."""

    traced: Trace
    flow: Dataflow
    blocks: tuple[Block, ...]
    units: Units
    cluster: Cluster
    rows: int
    precision: str
    optimizer_factor: float
    planner: str
    answer: Answer
    source: str | None

    def plan(self, versions: dict[str, str], optimizer: str, memory: int) -> Plan:
        decision, estimate = self.answer.decision, self.answer.estimate
        cuts = [self.units.starts[cut] for cut in decision.cuts]
        stages = partition(self.flow, cuts)
        rows = self.rows // (decision.dp * decision.micro_batches)
        rehearsal = rehearse(self.traced.graph, stages, self.blocks, rows)
        windows = [WINDOW] * (decision.pp - 1)
        programs = assemble.step_programs(
            decision.schedule, stages, rehearsal.boundaries, decision.micro_batches, windows
        )
        peaks = [
            footprint(program, assemble.sizes(stage, rehearsal.boundaries, kept))
            for program, stage, kept in zip(programs, stages, rehearsal.saved, strict=True)
        ]
        memories = [
            self._memory(stage, peak["activations"], peak["transfers"])
            for stage, peak in zip(stages, peaks, strict=True)
        ]
        _check_fits(memories, memory, decision)
        return Plan(
            format=FORMAT,
            versions=versions,
            source=self.source,
            fingerprint=fingerprint.fingerprint(self.traced.graph),
            trail=fingerprint.trail(self.traced.graph),
            inputs=self.traced.inputs,
            reads=self.traced.reads,
            cluster=self.cluster,
            mesh=_mesh(self.cluster, decision),
            batch=Batch(self.rows, decision.micro_batches),
            precision=self.precision,
            optimizer=optimizer,
            schedule=decision.schedule,
            boundaries=tuple(Boundary(window, 0) for window in windows),
            blocks=tuple(BlockClass(n, m) for n, m in classes(self.blocks).items()),
            stages=tuple(
                self._stage(stage, rehearsal, estimate, used)
                for stage, used in zip(stages, memories, strict=True)
            ),
            prediction=Prediction(estimate.step_seconds, estimate.bubble),
            planner=PlannerNote(
                self.planner,
                self.answer.bound_seconds,
                self.answer.binding,
                self.answer.alternatives[0] if self.answer.alternatives else None,
            ),
        )

    def _memory(self, stage: Stage, activations: int, transfers: int) -> Memory:
        graph = self.traced.graph
        sizes = {n: bytes_at(graph.states[n].spec, 1) for n in stage.states}
        of = {kind: 0 for kind in ("parameter", "buffer", "constant")}
        for name, size in sizes.items():
            of[graph.states[name].kind] += size
        trainable = sum(size for n, size in sizes.items() if graph.states[n].trainable)
        return Memory(
            parameters=of["parameter"],
            gradients=trainable,
            optimizer=round(trainable * self.optimizer_factor),
            buffers=of["buffer"] + of["constant"],
            activations=activations,
            transfers=transfers,
        )

    def _stage(
        self, stage: Stage, rehearsal: Rehearsal, estimate: Estimate, memory: Memory
    ) -> StagePlan:
        graph = self.traced.graph

        def transfer(ref: Ref, peer: int, receiver: int) -> Transfer:
            spec = graph.spec(ref)
            shape = tuple(dim if isinstance(dim, int) else str(dim) for dim in spec.shape)
            back = receiver in rehearsal.boundaries[ref].gradients
            return Transfer(str(ref), shape, str(spec.dtype).removeprefix("torch."), peer, back)

        predicted = estimate.stages[stage.index]
        return StagePlan(
            first=graph.nodes[stage.first].name,
            last=graph.nodes[stage.stop - 1].name,
            nodes=len(stage.nodes),
            parameters=tuple(n for n in stage.states if graph.states[n].kind == "parameter"),
            receives=tuple(transfer(ref, peer, stage.index) for ref, peer in stage.receives),
            sends=tuple(transfer(ref, peer, peer) for ref, peer in stage.sends),
            recompute=(),
            zero=0,
            predicted=StagePrediction(
                predicted.forward_seconds, predicted.backward_seconds, memory
            ),
        )


def _check_fits(memories: Sequence[Memory], limit: int, decision: Decision) -> None:
    """The estimate holds more buffers than a program ever does; this is the last word."""
    for index, memory in enumerate(memories):
        if memory.peak > limit:
            raise InfeasibleError(
                f"no plan fits {limit} bytes a device: of the nearest (pp={decision.pp} "
                f"dp={decision.dp} micro_batches={decision.micro_batches}) stage {index} needs "
                f"{memory.peak} bytes, {memory.peak - limit} too many",
                hint="more stages, more micro-batches, or a higher memory limit",
            )


def _mesh(cluster: Cluster, decision: Decision) -> Mesh:
    places = []
    for rank in range(decision.pp * decision.dp):
        node, local, device = cluster.device_at(rank)
        name = "cpu" if device.kind == "cpu" else f"cuda:{local}"
        places.append(Place(rank, *divmod(rank, decision.dp), 0, node, local, name))
    return Mesh(decision.pp, decision.dp, 1, tuple(places))


def _refuse_unknown(precision: str, zero: int, recompute: Sequence[str], planner: str) -> None:
    if precision != "fp32":
        raise AutopipeError(f"precision {precision!r} was asked for; this version runs fp32 only")
    if zero or recompute:
        raise AutopipeError(
            f"zero={zero} recompute={list(recompute)} was asked for; this version has neither"
        )
    if planner not in PLANNERS:
        raise AutopipeError(
            f"there is no planner {planner!r}", hint=f"one of {', '.join(sorted(PLANNERS))}"
        )


def _cluster(
    cluster: str | Path | Cluster | None, degrees: tuple[int | None, ...], say: Say
) -> Cluster:
    """The cluster meant; without a word of it this machine, with as many processes as asked for."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        asked = 1
        for degree in degrees:
            asked *= degree or 1
        found: Cluster | LocalSpec = LocalSpec(asked if any(degrees) else local_processes())
    else:
        found = parse(str(cluster))
    if isinstance(found, LocalSpec):
        say(f"cluster: local:{found.processes}, this machine")
        found = local_cluster(found.processes, say)
    return found


def _example(inputs: Any) -> tuple[Any, list[InputSpec]]:
    """An example batch and its description."""
    if callable(inputs):
        example, other = inputs(2), inputs(3)
        return example, batches.describe(example, other, 2, 3)
    leaves = batches.flatten(inputs)
    first = next((t for t in leaves.values() if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        raise ModelError("inputs hold no tensor with a dim, so there are no rows to split")
    return inputs, batches.describe(inputs, None, first.shape[0], 0)


def _rows(inputs: Any, example: Any, specs: Sequence[InputSpec]) -> int | None:
    return None if callable(inputs) else batches.rows_of(specs, batches.flatten(example))


def _bytes(memory: int | str | None) -> int | None:
    """Bytes from a number or text: 24GiB, 24GB, 512MiB, 1000000.

    Raises:
        AutopipeError: the text is no size.
    """
    if not isinstance(memory, str):
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", memory, re.IGNORECASE)
    if found is None:
        raise AutopipeError(f"memory {memory!r} is no size", hint="24GiB, 512MB or bytes")
    number, letter, binary = found.groups()
    power = "KMGT".index(letter.upper()) + 1 if letter else 0
    unit: int = (1024 if binary else 1000) ** power
    return round(float(number) * unit)


def _sizes(rows: int, devices: int, constraints: Constraints) -> list[int]:
    """Micro-batch sizes that some mesh could use."""
    sizes = set()
    for dp in range(1, devices + 1):
        if constraints.dp not in (None, dp) or rows % dp:
            continue
        share = rows // dp
        counts = [constraints.micro_batches] if constraints.micro_batches else range(1, share + 1)
        sizes |= {share // count for count in counts if share % count == 0}
    return sorted(sizes) or [rows]


def _optimizer(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    """A maker of optimizers from a name in torch.optim."""
    if callable(optimizer):
        return optimizer
    names = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if optimizer.lower() not in names:
        raise AutopipeError(
            f"torch.optim has no optimizer {optimizer!r}", hint="adamw, adam, sgd, ..."
        )
    kind = names[optimizer.lower()]
    return lambda parameters: kind(parameters)  # type: ignore[call-arg]


def _versions(model: nn.Module | Factory) -> dict[str, str]:
    """torch's version, and that of the package the model's class comes from."""
    found = {"torch": str(torch.__version__)}
    made_by = type(model) if isinstance(model, nn.Module) else model
    package = made_by.__module__.partition(".")[0]
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        found[package] = metadata.version(package)
    return found


def _summary(traced: Trace, blocks: Sequence[Block]) -> str:
    graph = traced.graph
    parameters = sum(
        int(bytes_at(s.spec, 1) / s.spec.dtype.itemsize)
        for s in graph.states.values()
        if s.kind == "parameter"
    )
    of = ", ".join(f"{len(paths)} of {kind}" for kind, paths in classes(tuple(blocks)).items())
    return f"traced: {len(graph.nodes)} nodes, {parameters / 1e6:.1f} M parameters" + (
        f", blocks: {of}" if of else ""
    )
