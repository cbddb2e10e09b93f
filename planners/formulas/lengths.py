"""The plan's model traced again, with its rows and, where it has one, its sequence as symbols.

plan, model --traced_again--> TracedAgain --cut--> the plan's stages of it --at--> for one length
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopipe.batch import row_length
from autopipe.batch.cut import two_rows
from autopipe.errors import PlanError
from autopipe.frontend.model_file import ModelFile
from autopipe.ir import fingerprint
from autopipe.ir.dataflow import analyse
from autopipe.ir.partition import partition
from autopipe.joint.wanted import wanted
from autopipe.planfile import programs
from autopipe.planfile.again import by_op
from autopipe.planfile.contents import Plan
from autopipe.planners.costs.plan_memory import CutModel
from autopipe.planners.costs.tp_degrees import Degree
from autopipe.planners.driver import arguments
from autopipe.schedules.instructions import splits
from autopipe.sharding.plan_io import read_back
from autopipe.stages.bind import Split, cut_as_planned
from autopipe.tracing.capture.low_precision import kept_by
from autopipe.tracing.source import trace_source
from autopipe.tracing.symbolic_sequence import trace_lengths, with_tokens
from autopipe.tracing.traced import Trace


@dataclass(frozen=True, eq=False)
class TracedAgain:
    """A plan's model, traced again.

    Attributes:
        trace: its rows are a symbol, and so are its tokens if `why` is empty.
        tokens: tokens of a row in the plan; 0: rows are no sequences.
        why: why tokens are no symbol.
    """

    trace: Trace
    tokens: int
    why: str

    @property
    def symbolic(self) -> bool:
        """Whether its tokens are a symbol: it is right up to as many as the plan has."""
        return not self.why

    def fixed(self) -> Trace:
        """The trace for rows of as many tokens as the plan has."""
        return at_length(self.trace, self.tokens) if self.symbolic else self.trace


def at_length(trace: Trace, tokens: int) -> Trace:
    """A trace, whose tokens are a symbol, for rows of `tokens` tokens."""
    return replace(trace, graph=with_tokens(trace.graph, tokens))


def traced_again(plan: Plan, file: ModelFile) -> TracedAgain:
    """Trace the model of a plan.

    Raises:
        ModelError: it cannot be captured.
        PlanError: it is not the plan's.
    """
    example, specs = arguments.example_of(file.inputs)
    pair = two_rows(example, specs)
    dtypes = kept_by(plan)
    lengths = trace_lengths(file.model, pair, specs, file.loss, dtypes)
    tokens = row_length.length_of(specs) or 0
    traced = TracedAgain(lengths.trace, tokens, lengths.why)
    if lengths.longest is not None and not _is_of(plan, traced):
        # A table as long as the row is read whole at full length, a different program.
        fixed = trace_source(file.model, pair, specs, file.loss, kept=dtypes)
        traced = TracedAgain(fixed, tokens, f"the model is another program at {tokens} tokens")
    if not _is_of(plan, traced):
        graph = traced.fixed().graph
        raise PlanError(
            "plan.fingerprint: the plan was made for another model or another loss. First "
            f"difference: {fingerprint.first_difference(graph, plan.trail)}",
            hint="plan again with `autopipe plan`; or --no-sliders, which needs no model",
        )
    return traced


def _is_of(plan: Plan, traced: TracedAgain) -> bool:
    return fingerprint.fingerprint(traced.fixed().graph) == plan.fingerprint


@dataclass(frozen=True, eq=False)
class PlannedStages:
    """A plan's stages of its model, as the first tensor-parallel rank runs them.

    Attributes:
        split: the stages; tokens are a symbol if they are one in `traced`.
    """

    plan: Plan
    traced: TracedAgain
    split: Split

    @property
    def plain(self) -> Split:
        """The stages with all tensors sent whole, if some of the plan's go in parts."""
        return self.split.plain or self.split

    def fixed(self, rows: int, tokens: int) -> CutModel:
        """The cut model for dry runs of micro-batches of `rows` rows of `tokens` tokens."""
        plan, traced = self.plan, self.traced
        trace = at_length(self.split.trace, tokens) if traced.symbolic else self.split.trace
        flow = analyse(trace.graph)
        cuts = [stage.first for stage in self.split.stages][1:]
        degree = Degree(
            plan.mesh.tp,
            trace,
            self.split.blocks,
            read_back(plan) if plan.mesh.tp > 1 else None,
            trace,
            flow,
            self.split.blocks,
        )
        halves = splits(programs.compute(plan))
        return CutModel(
            degree=degree,
            once=partition(flow, cuts),
            rows=rows,
            recompute=tuple(block for stage in plan.stages for block in stage.recompute),
            precision=plan.precision,
            wanted=wanted(
                halves, compiled=plan.compiled, by_op=by_op(plan), gathers=plan.fully_sharded
            ),
            shards=plan.mesh.dp if plan.fully_sharded else 1,
        )


def cut(plan: Plan, traced: TracedAgain) -> PlannedStages:
    """The stages of a plan.

    Raises:
        PlanError: a cut is not legal.
    """
    length = traced.tokens if traced.symbolic else None
    return PlannedStages(plan, traced, cut_as_planned(traced.trace, plan, length=length))
