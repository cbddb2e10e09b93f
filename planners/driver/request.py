"""What a plan is made from: what was asked, what was traced, and both together on devices.

plan(...)'s arguments  ->  PlanRequest                       checked and completed
PlanRequest            ->  Traced                            the model as a graph
both, and the cluster  ->  Job                               all that the search reads
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import LocalSpec
from autopipe.eager.kept import restoring
from autopipe.errors import AutopipeError, PlanError
from autopipe.frontend import measured_optimizer as measured
from autopipe.frontend.loss import Loss
from autopipe.frontend.optimizer import ByName, MakeOptimizer, optimizer_named
from autopipe.frontend.optimizer_trials import Like
from autopipe.ir.blocks import Block, classes, find_blocks
from autopipe.ir.dataflow import Dataflow, analyse
from autopipe.ir.graph import Graph, bytes_at
from autopipe.planfile.contents import MICRO_BATCH
from autopipe.planners.costs.asked_ops import WORDS, check_meant, is_for_ops, words_of
from autopipe.planners.driver.arguments import AUTO, OFF, on_gpus
from autopipe.planners.model.problem import Constraints
from autopipe.planners.search.configs import one_of
from autopipe.rewriting.fused_attention import fused
from autopipe.rows.least_rows import ONE, Least
from autopipe.stages.dry_run import Known
from autopipe.stages.recompute import ALL, blocks_meant, words_of_option
from autopipe.stages.whole_loss import WholeLoss
from autopipe.tracing.capture import user_checkpoints
from autopipe.tracing.capture.low_precision import SixteenBits, kept
from autopipe.tracing.source import Source
from autopipe.tracing.traced import Trace
from autopipe.util.progress import Say

NOTHING = "none"
"""Asks for no block to be recomputed."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments of `plan`, checked.

    Attributes:
        cluster: the one asked for; a `LocalSpec` is this machine, still to be measured.
        batch_size: rows of the whole batch; None: those of the example.
        constraints: what the search must keep to, limits of memory and a written schedule included.
        compiled: whether stages run compiled; None: the planner chooses.
        fuse_attention: whether attentions that the model writes out are fused; None: where stages
            run compiled.
        loss_parts: 0 for the loss as it is; None: the planner's choice.
        lengths: of rows, ascending; none were asked for.
        model, inputs, loss, optimizer, precision, grad_dtype, optimizer_dtype, recompute, offload,
            planner, sequence_parallel, loss_over, source: as `plan` has them.
    """

    model: Source = field(repr=False)
    inputs: Any = field(repr=False)
    loss: Loss | None
    optimizer: str | MakeOptimizer
    precision: str
    grad_dtype: str = "fp32"
    optimizer_dtype: str = "fp32"
    compiled: bool | None = None
    fuse_attention: bool | None = None
    cluster: Cluster | LocalSpec
    batch_size: int | None
    constraints: Constraints
    recompute: str | Sequence[str] | None = None
    offload: str | Sequence[str] | None = None
    planner: str
    sequence_parallel: bool
    loss_over: str
    loss_parts: int | None = None
    lengths: tuple[int, ...] = ()
    source: str | None = None

    @property
    def may_fuse(self) -> bool:
        """Whether attentions may be fused: stages may run compiled, or it is asked for."""
        compiled = on_gpus(self.cluster) if self.compiled is None else self.compiled
        return compiled if self.fuse_attention is None else self.fuse_attention

    @property
    def sixteen_bits(self) -> SixteenBits | None:
        """The 16-bit dtypes that the model is traced in; None: as it is built."""
        return kept(self.precision, self.optimizer_dtype, self.grad_dtype)

    def recomputed(
        self, flow: Dataflow, blocks: Sequence[Block], say: Say
    ) -> Collection[str] | None:
        """Paths of the blocks that the user or the model wants recomputed, and words for ops that
        are to run again in the others (`asked_ops`); None: neither says."""
        if self.recompute is None:
            return user_checkpoints.checkpointed_blocks(flow, blocks, say)
        words = words_of_option("recompute", self.recompute, [NOTHING])
        op_words = [word for word in words if is_for_ops(word)]
        check_meant(flow, blocks, op_words)
        named = [word for word in words if word not in (NOTHING, *op_words)]
        return (*blocks_meant(blocks, named, others=WORDS), *op_words)

    def offloaded(self, blocks: Sequence[Block]) -> Collection[str] | None:
        """Paths of the blocks that are to offload what they keep; None: the planner chooses.

        What runs again is not kept: `--recompute all --offload h.3` means all others and this one.

        Raises:
            PlanError: there is no such block, or all that is asked to run again is offloaded.
        """
        words = words_of_option("offload", self.offload, [AUTO, OFF])
        if AUTO in words:
            return None
        away = blocks_meant(blocks, [word for word in words if word != OFF], "offload")
        asked = words_of_option("recompute", self.recompute, [NOTHING])
        named = [ALL if is_for_ops(word) else word for word in asked if word != NOTHING]
        if away and named and {*blocks_meant(blocks, named)} <= {*away}:
            raise PlanError(
                f"offload={','.join(words)} was asked for, and recompute={','.join(asked)} too: "
                "what runs again is not kept, and there is nothing to offload",
                hint="name other blocks with --offload than with --recompute",
            )
        return away

    def microbatch_rows(self, rows: int) -> int | None:
        """The rows of a micro-batch, if all that they follow from is asked for.

        A loss may see how rows are grouped, which no graph of one number of rows shows: it has to
        be asked for by micro-batch.

        Args:
            rows: of the whole batch.
        """
        asked = self.constraints
        if self.loss_over != MICRO_BATCH:
            return None
        if asked.micro_batch_size is not None:
            return None if rows % asked.micro_batch_size else asked.micro_batch_size
        if asked.dp is None or asked.micro_batches is None:
            return None
        size, rest = divmod(rows, asked.dp * asked.micro_batches)
        return size if size and not rest else None


@dataclass(frozen=True, eq=False)
class Traced:
    """A model as traced.

    Attributes:
        trace: its graph, the description of its batch, the values that Python read.
        flow, blocks: dataflow and repeated modules of the graph.
        rows: of the whole batch.
        least: the fewest rows of a micro-batch for which the graph is right.
        recompute, offload: paths of the blocks that are recomputed in backward, with words for ops
            (`asked_ops`), and of those that offload what they keep; None: the planner chooses.
        fingerprinted: the graph by which a run knows the model: before it was rewritten or cut.
        if_cut: lines for the user if the plan cuts the batch (`row_mixing`, `moved_states`,
            `own_backwards`).
        loss_parts: so many; 0: the loss is as the model has it.
        fused_attention: whether attentions that the model writes out are single ops.
        whole: the loss of the whole batch, if it is to be over that; the trace is then of
            `WholeLoss.rows`.
    """

    trace: Trace = field(repr=False)
    flow: Dataflow = field(repr=False)
    blocks: tuple[Block, ...]
    rows: int
    least: Least
    recompute: Collection[str] | None
    fingerprinted: Graph = field(repr=False)
    loss_parts: int = 0
    fused_attention: bool = False
    whole: WholeLoss | None = field(default=None, repr=False)
    offload: Collection[str] | None = None
    if_cut: tuple[str, ...] = ()

    @property
    def graph(self) -> Graph:
        """The whole model's, of a symbolic number of rows."""
        return self.trace.graph

    def rewritten(self, graph: Graph) -> Traced:
        """The same model by another graph that computes the same."""
        trace, flow, blocks = replace(self.trace, graph=graph), analyse(graph), find_blocks(graph)
        return replace(self, trace=trace, flow=flow, blocks=blocks)

    @cached_property
    def with_fused_attention(self) -> Traced:
        """The same with each attention as one op, if it writes any out."""
        graph = fused(self.graph)
        if graph is self.graph:
            return self
        return replace(self.rewritten(graph), fused_attention=True)

    @property
    def ops_again(self) -> frozenset[str]:
        """The words for ops that are asked to run again."""
        return words_of(self.recompute, self.blocks)

    def __str__(self) -> str:
        """77 nodes, 0.1 M parameters, blocks: 4 of blocks.0"""
        parameters = sum(
            int(bytes_at(s.spec, 1) / s.spec.dtype.itemsize)
            for s in self.graph.states.values()
            if s.kind == "parameter"
        )
        counts = f"{len(self.graph.nodes)} nodes, {parameters / 1e6:.1f} M parameters"
        members = classes(self.blocks)
        of = ", ".join(f"{len(paths)} of {kind}" for kind, paths in members.items())
        return f"{counts}, blocks: {of}" if of else counts


@dataclass(frozen=True, eq=False)
class Job:
    """A traced model, the devices to split it over, and what was asked.

    Attributes:
        cluster: measured or described, with all rates that the model needs.
        optimizer_factor: bytes of optimizer state per byte of trainable parameter.
        known: by tensor-parallel degree, what dry runs have found, for later ones to use: those of
            the same model on the other engine, or with its loss in parts, too.
        beyond: whether micro-batches are costed too whose sizes the constraints rule out: only a
            refusal wants them, which says what would fit.
    """

    request: PlanRequest
    traced: Traced
    cluster: Cluster
    optimizer_factor: float
    known: defaultdict[int, Known] = field(default_factory=partial(defaultdict, dict), repr=False)
    beyond: bool = False

    def on_engine(self, *, compiled: bool) -> Job:
        """The same question, with stages that run compiled or do not.

        Compiled ones compute to rounding what the model does, and so attentions are fused for them
        unless that is asked otherwise.
        """
        request = replace(self.request, compiled=compiled)
        traced = self.traced.with_fused_attention if request.may_fuse else self.traced
        return replace(self, traced=traced, request=request)

    @property
    def constraints(self) -> Constraints:
        """What the search must keep to."""
        return self.request.constraints


def as_optimizer_allows(
    constraints: Constraints,
    optimizer: str | MakeOptimizer,
    say: Say,
    like: Like | None = None,
) -> Constraints:
    """The constraints under which an optimizer changes parameters as it does in one process.

    Raises:
        AutopipeError: parts were asked for of what it changes as a whole; torch.optim has none of
            this name; or it cannot step.
    """
    if callable(optimizer):
        with left_alone(optimizer):
            granularity = measured.stepped_apart(optimizer_named(optimizer), like)
    else:
        granularity = measured.named_apart(optimizer)
    if granularity == measured.ELEMENT:
        return constraints
    effect, instead = measured.WORDS[granularity]
    alone = granularity in (measured.TENSOR, measured.ELSEWHERE)
    names: tuple[str, ...] = ("zero", "tp") if alone else ("zero", "tp", "pp")
    for name in names:
        wish, unsplit = getattr(constraints, name), int(name != "zero")
        if wish not in (None, unsplit):
            raise AutopipeError(
                f"{name}={wish} was asked for, and the optimizer {effect}: of the part "
                "that a rank would have it makes something else",
                hint=f"{name}={unsplit}, or an optimizer that {instead}",
            )
    without = "ZeRO or tensor parallelism" + " or pipelines" * (not alone)
    say(f"optimizer: it {effect}, and no rank gets a part of that: without {without}")
    allowed = replace(constraints, zero=0, tp=1, ruled_out=names)
    return allowed if alone else replace(allowed, pp=1)


@contextmanager
def left_alone(optimizer: str | MakeOptimizer) -> Iterator[None]:
    """Restore afterwards what a user's optimizer keeps: a hook may count the steps of planning."""
    made_by = optimizer.by_name if isinstance(optimizer, ByName) else optimizer
    with restoring(made_by) if callable(made_by) else nullcontext():
        yield


def micro_batch_rows(
    rows: int, devices: int, constraints: Constraints, least: Least = ONE
) -> list[int]:
    """The rows of micro-batches that some mesh could use.

    Raises:
        AutopipeError: the rows do not divide into what was asked for.
        ModelError: none has the rows that the model needs.
    """
    size = constraints.micro_batch_size
    requested = {"dp": constraints.dp, "micro_batches": constraints.micro_batches}
    into = " x ".join(f"{name}={count}" for name, count in requested.items() if count)
    parts = (constraints.dp or 1) * (constraints.micro_batches or 1) * (size or 1)
    there_are = (constraints.pp or 1) * (constraints.dp or 1) <= devices
    if rows % parts and there_are:
        over = f" over {into}" if into else ""
        equal = f"{into} equal parts" if size is None else f"micro-batches of {size} rows{over}"
        below, fewer = rows - rows % parts, rows / ((constraints.dp or 1) * (size or 1))
        another = ""
        if constraints.micro_batches and fewer.is_integer():
            count = max(n for n in range(1, constraints.micro_batches) if fewer % n == 0)
            another = f"--micro-batches {count}, or "
        raise AutopipeError(
            f"a batch of {rows} rows does not divide into {equal}",
            hint=f"{another}a batch of {f'{below} or ' if below else ''}{below + parts} rows",
        )
    sizes = set()
    for dp in range(1, devices + 1):
        if constraints.dp not in (None, dp) or rows % dp:
            continue
        share = rows // dp
        counts = [constraints.micro_batches] if constraints.micro_batches else range(1, share + 1)
        sizes |= {share // count for count in counts if share % count == 0}
    possible = sorted(sizes) or [rows]
    if size is not None:
        if there_are and size not in possible:
            raise AutopipeError(
                f"micro_batch_size={size} was asked for, and {into} of a batch of {rows} rows "
                f"makes micro-batches of {one_of(possible)} rows",
                hint=f"leave out one of them, or a batch of {parts} rows",
            )
        possible = [size]
    if possible[-1] < least.rows:
        raise least.refusal(possible[-1])
    return [each for each in possible if each >= least.rows]
