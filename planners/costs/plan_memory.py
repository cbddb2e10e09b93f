"""The exact bytes of a plan: its stages run on tensors without memory, its programs walked.

    CutModel --dry_run--> StageBytes --with_memory--> Plan with the bytes of each stage
                                     --check_fits---> Overflow if a device may not hold them

The estimate that chose the plan adds up parts; these are the bytes that its run will hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopipe.errors import InfeasibleError
from autopipe.ir.graph import Graph, at_batch
from autopipe.ir.partition import Stage, in_turns
from autopipe.ir.torch_private import fake_mode
from autopipe.joint.dry_run_repeats import rehearse_deep
from autopipe.joint.wanted import Wanted
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Boundary
from autopipe.planfile.turns import taking_turns
from autopipe.planners.costs.eager_depths import choose, pipeline
from autopipe.planners.costs.gathered import gathered_bytes
from autopipe.planners.costs.loss_bytes import loss_bytes
from autopipe.planners.costs.stage_memory import gradient_bytes, memory, passing, sharing
from autopipe.planners.costs.tp_degrees import Degree
from autopipe.planners.model.memory import excess
from autopipe.schedules.instructions import Instruction, holders
from autopipe.stages import step_programs
from autopipe.stages.dry_run import Known, Rehearsal, fake_state
from autopipe.stages.lower import lower
from autopipe.stages.precision import copied, copy_bytes
from autopipe.stages.recompute import within
from autopipe.stages.sent_parts import Parted
from autopipe.stages.whole_loss import WholeLoss
from autopipe.util import numbers


@dataclass(frozen=True, kw_only=True)
class CutModel:
    """A model cut into stages, and how a micro-batch runs through them.

    Attributes:
        once: the stages of a tensor-parallel rank's graph.
        turns: for each stage the ranks that take turns at it; empty: one each.
        rows: rows of a micro-batch.
        recompute: paths of the blocks to recompute in backward, and names of nodes.
        wanted: how backwards run if autograd does not run them; None: autograd does.
        shards: replicas over which parameters and gradients are sharded, as by ZeRO-3; 1: none.
        whole: the loss of the whole batch, if it is computed between two passes.
        parted: the graph with its conversions, if stages send tensors in parts.
    """

    degree: Degree
    once: tuple[Stage, ...] = field(repr=False)
    rows: int
    recompute: tuple[str, ...]
    precision: str
    wanted: Wanted | None
    shards: int
    whole: WholeLoss | None = field(default=None, repr=False)
    parted: Parted | None = field(default=None, repr=False)
    turns: tuple[int, ...] = ()

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the plan's list."""
        return in_turns(self.once, self.turns)

    @property
    def graph(self) -> Graph:
        """The graph of a tensor-parallel rank."""
        return self.degree.trace.graph


@dataclass(frozen=True)
class StageBytes:
    """The result of a dry run of a cut model.

    Attributes:
        rehearsal: the tensors between stages, and the bytes that a micro-batch takes.
        gathered: by stage, the most bytes that ZeRO-3 gathers at once; 0 without it.
        low: by stage, the parameters of which a step has copies in 16 bits, for all of its
            micro-batches. Empty under ZeRO-3, whose copies come and go with gathered parameters.
    """

    cut: CutModel
    rehearsal: Rehearsal
    gathered: tuple[int, ...]
    low: tuple[tuple[str, ...], ...]


class Overflow(InfeasibleError):
    """The exact bytes of a stage, `held`, are more than a device may hold, `limit`."""

    def __init__(self, message: str, held: int, limit: int) -> None:
        hint = f"devices, or a memory limit, of {numbers.Amount(held).ceiling(held)}"
        super().__init__(message, hint=hint, shortfall=excess(held, limit))


def dry_run(cut: CutModel, *, repeats_equal: bool, known: Known) -> StageBytes:
    """Run each stage once on tensors without memory.

    Args:
        repeats_equal: whether repeated blocks make tensors of equal shapes and dtypes, so that
            running few of them is enough.
        known: results of earlier dry runs of this degree; those of this one are added.
    """
    rehearsal = rehearse_deep(
        cut.degree.flow,
        cut.once,
        cut.degree.blocks,
        cut.rows,
        recompute=cut.recompute,
        precision=cut.precision,
        wanted=cut.wanted,
        even=repeats_equal,
        known=known,
    ).in_turns(cut.turns)
    if cut.shards > 1:
        return _sharded(cut, rehearsal)
    nodes = cut.graph.nodes
    low = (copied(cut.graph, (nodes[n] for n in s.nodes), cut.precision) for s in cut.stages)
    return StageBytes(cut, rehearsal, (0,) * len(cut.stages), tuple(low))


def _sharded(cut: CutModel, rehearsal: Rehearsal) -> StageBytes:
    """The dry run under ZeRO-3, from one without: parameters come and go."""
    graph, blocks, gathered = cut.graph, cut.degree.blocks, []
    for stage in cut.stages:
        with fake_mode():
            states = {name: fake_state(graph, name) for name in stage.states}
            lowered = lower(
                graph,
                stage,
                blocks,
                states,
                None,
                cut.rows,
                last=stage.is_last(graph),
                recompute=within(graph, stage, blocks, cut.recompute),
                precision=cut.precision,
            )
        gathered.append(gathered_bytes(graph, lowered, states, cut.shards))
    return StageBytes(cut, rehearsal, tuple(gathered), ((),) * len(cut.stages))


def with_memory(plan: Plan, held: StageBytes, optimizer_factor: float) -> Plan:
    """The plan with the bytes that its programs hold, at the windows and depths that it has.

    Args:
        optimizer_factor: bytes of optimizer state per byte of trainable parameter.
    """
    stages, rehearsal = held.cut.stages, held.rehearsal
    windows = [boundary.window for boundary in plan.boundaries]
    compute = programs.compute(plan)
    moments = step_programs.fullest_moments(
        step_programs.step_programs(
            compute,
            stages,
            rehearsal.boundaries,
            windows,
            programs.sends_ahead(plan),
            plan.turns,
        ),
        stages,
        rehearsal,
    )
    placed = holders(compute)
    over = sharing(stages, held.cut.degree.sharding, placed, plan)
    entries = []
    for stage, (peak, at), entry in zip(stages, moments, plan.stages, strict=True):
        on_rank = [s for s in stages if placed[s.index] == placed[stage.index]]
        earlier = {name for s in on_rank if s.index < stage.index for name in s.states}
        counted = {name: over[name] for name in stage.states if name not in earlier}
        low = {name for s in on_rank for name in held.low[s.index]}
        copies = sum(copy_bytes(held.cut.graph.states[name]) for name in counted if name in low)
        if stage is max(on_rank, key=lambda s: held.gathered[s.index]):  # one runs at a time
            copies += held.gathered[stage.index]
        if held.cut.whole is not None and stage is stages[-1]:
            peak, at = _with_loss(peak, at, held.cut.whole, plan)
        compiled = rehearsal.runs_compiled(stage.index)
        loss = _of_loss(held.cut, stage, compiled=compiled)
        passes, doing = passing(held.cut.graph, counted, peak, loss, plan, compiled=compiled)
        if doing is not None:
            at = Instruction(doing, stage.index)
        holds = memory(held.cut.graph, counted, peak, copies, passes, plan, optimizer_factor)
        elsewhere = _elsewhere(stage, stages, placed, plan, counted)
        tied = gradient_bytes(held.cut.graph, elsewhere, plan)
        predicted = replace(entry.predicted, memory=holds, fullest=str(at or ""), tied=tied)
        entries.append(replace(entry, predicted=predicted))
    return replace(plan, stages=tuple(entries))


def _elsewhere(
    stage: Stage,
    stages: Sequence[Stage],
    placed: Sequence[int],
    plan: Plan,
    names: Iterable[str],
) -> set[str]:
    """Those of a stage's states that other stages have on other pipeline ranks.

    Args:
        placed: the pipeline rank of each stage.
    """
    own = {placed[index] for index in taking_turns(plan.stages, stage.index)}
    others = (other for other in stages if placed[other.index] not in own)
    return {*names}.intersection(name for other in others for name in other.states)


def _of_loss(cut: CutModel, stage: Stage, *, compiled: bool) -> int:
    """Bytes that exist only within the backward of a stage's loss."""
    sizes = loss_bytes(cut.graph, stage.nodes, compiled=compiled)
    return max((at_batch(size, cut.rows) for size in sizes), default=0)


def _with_loss(
    peak: Counter[str], at: Instruction | None, whole: WholeLoss, plan: Plan
) -> step_programs.StageMoment:
    """The most bytes that the last stage holds: in the second pass, or in the loss before it.

    Both hold the stage's own embeddings and their gradients; the loss holds those of all replicas.
    """
    own = whole.embedding_bytes(plan.batch.rows // plan.mesh.dp)
    loss = whole.held(plan.batch.rows, plan.precision)
    if loss > peak.total():
        return Counter(activations=own + loss), None
    return peak + Counter(activations=own), at


def with_eager_depths(
    plan: Plan,
    held: StageBytes,
    limits: Sequence[int],
    optimizer_factor: float,
    window: int | None,
) -> Plan:
    """The plan with the depths and windows that its links ask for, as far as memory allows.

    Args:
        limits: bytes that each pipeline rank may hold; it has one stage.
        window: the receives posted ahead that were asked for; None: chosen too.
    """
    least = replace(plan, boundaries=(Boundary(1, 0),) * len(plan.boundaries))
    holding = with_memory(least, held, optimizer_factor)
    saved, boundaries = held.rehearsal.saved, held.rehearsal.boundaries
    chosen = choose(
        pipeline(
            holding,
            held=[
                saved[stage.index] + sum(boundaries[ref].bytes for ref, _ in stage.receives)
                for stage in held.cut.stages
            ],
            room=[
                limit - stage.predicted.memory.peak
                for limit, stage in zip(limits, holding.stages, strict=True)
            ],
        )
    )
    windows = chosen.windows if window is None else (window,) * len(plan.boundaries)
    return replace(plan, boundaries=tuple(map(Boundary, windows, chosen.depths)))


def check_fits(plan: Plan, limits: Sequence[int]) -> None:
    """Compare the exact bytes that programs hold with the limit of each pipeline rank.

    Raises:
        Overflow: names the stages of the first rank that holds too much.
    """
    placed = holders(programs.compute(plan))
    for rank, limit in enumerate(limits):
        on_rank = [stage for stage, holder in enumerate(placed) if holder == rank]
        held = sum(plan.stages[stage].predicted.memory.peak for stage in on_rank)
        if excess(held, limit) > 0:
            names, many = " and ".join(map(str, on_rank)), len(on_rank) > 1
            raise Overflow(
                f"no plan fits {numbers.memory(limit)} a device: of the nearest (pp={plan.mesh.pp} "
                f"dp={plan.mesh.dp} micro_batches={plan.batch.micro_batches}) "
                f"stage{'s' if many else ''} {names} need{'' if many else 's'} "
                f"{numbers.memory(held)}, {numbers.memory(excess(held, limit))} too many",
                held,
                limit,
            )
