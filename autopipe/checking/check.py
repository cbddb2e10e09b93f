"""`check_plan` and `check_model`: two steps of a split model beside the unsplit one.

a plan, or a model file and words
    fewer_ranks, sized             what fits on this machine           (`fit`, `sized`)
    same_cuts, planned             its plan                            (`small_plan`)
    spawn                          a process for each rank             (`split`)
    compared                       beside plain PyTorch here           (`unsplit`, `compare`)
    first_node                     where a difference begins           -> Comparison
    second_look                    in fp64, if rounding may decide
    closer_look                    in fp32, if rounding to 16 bits may decide or hide a difference
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from autopipe.checking import split, subject
from autopipe.checking.compare import FP32, TensorRow, compared, nearness, orders_kept
from autopipe.checking.comparison import Comparison
from autopipe.checking.first_node import first_node
from autopipe.checking.fit import Degrees, fewer_ranks
from autopipe.checking.random_ops import RandomNodes, Unmatched, Unrepeatable, random_nodes
from autopipe.checking.second_look import closer_look, may_be_hidden, may_be_rounding, second_look
from autopipe.checking.shrink import shrunk
from autopipe.checking.sized import Sized, sized
from autopipe.checking.small_plan import in_double, planned, same_cuts, words_of
from autopipe.checking.subject import CheckJob, Smaller
from autopipe.checking.unsplit import Unsplit, check_statistics
from autopipe.eager.kept import restoring
from autopipe.errors import AutopipeError, ModelError
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.refusals import fails_by_itself
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.dataflow import is_random
from autopipe.ir.opaque_ops import FUNCTION_OP
from autopipe.planfile.contents import BATCH, ROWS, Plan
from autopipe.planners.driver.against_eager import one_thread
from autopipe.rewriting.label_counts import label_counts
from autopipe.rewriting.projections import sets_norms
from autopipe.runtime.launch.spawn import spawn
from autopipe.runtime.start import trace_planned
from autopipe.tracing.source import keeping_default_dtype
from autopipe.tracing.trace import Trace
from autopipe.util.progress import Say, phase

INTERRUPTED = 128 + signal.SIGINT

MISTAKE = 2
"""The exit code of a rank that has refused what it was given, and said why."""

Spawn = Callable[[int, Sequence[str]], int]
"""Runs `autopipe` with some arguments in a number of processes; returns the first nonzero code."""

MakePlan = Callable[[Smaller, Degrees, str | None], Plan]
"""Plans a model made smaller for a smaller mesh, in a precision; None: in the one asked for."""


def check_plan(
    plan: Plan, source: str, say: Say, precision: str | None = None, start: Spawn | None = None
) -> Comparison:
    """Check a plan with its model file.

    Args:
        source: the model file, as `model_file.load` takes it.
        say: gets a line of talk at a time.
        precision: the precision to check in; None: the plan's own, and closer in fp32 if that has
            16 bits.
        start: starts the ranks; None: `spawn`.

    Raises:
        AutopipeError: the model file or the plan cannot be checked; says why.
    """
    file, wanted, default = model_file.load(source), Degrees.of(plan), precision or plan.precision

    def make_plan(smaller: Smaller, few: Degrees, instead: str | None) -> Plan:
        chosen, words = instead or default, words_of(plan)
        same = smaller == Smaller() and (few.pp, few.tp) == (wanted.pp, wanted.tp)
        if same and chosen == plan.precision:
            return same_cuts(plan, few)
        words |= {} if chosen == plan.precision else _in(chosen)
        return planned(shrunk(file, smaller), few, _of_length(words, smaller), say)

    few = fewer_ranks(wanted, written=bool(plan.programs))
    # A GPU's compiler makes other code of a graph than a CPU's, which needs one of C++ besides.
    backend = "eager" if plan.cluster.has_gpus else "inductor"
    check = CheckRun(source, file, make_plan, say, start, precision is None, backend)
    return check.of(wanted, few)


def check_model(
    source: str, degrees: Degrees, words: dict[str, Any], say: Say, start: Spawn | None = None
) -> Comparison:
    """Plan a model file for this machine under `words`, and check the plan.

    Args:
        degrees: the mesh and the batch.
        words: other arguments of `make_plan.plan`.
        source, say, start: as `check_plan` has them.

    Raises:
        AutopipeError: as `check_plan`, or as `make_plan.plan`.
    """
    file = model_file.load(source)
    words = {"loss_over": file.loss_over, "lengths": file.lengths, **words}

    def make_plan(smaller: Smaller, few: Degrees, instead: str | None) -> Plan:
        asked = _of_length(words, smaller) | (_in(instead) if instead else {})
        return planned(shrunk(file, smaller), few, asked, say)

    check = CheckRun(source, file, make_plan, say, start, closer="precision" not in words)
    return check.of(degrees, fewer_ranks(degrees))


def _in(precision: str) -> dict[str, Any]:
    """The words for planning in another precision than the plan's own."""
    return {"precision": precision, "grad_dtype": None, "optimizer_dtype": None}


def _of_length(words: dict[str, Any], smaller: Smaller) -> dict[str, Any]:
    """The words for a smaller model: without other lengths, if rows are cut."""
    return {**words, "lengths": ()} if smaller.length else words


@dataclass(frozen=True)
class CheckRun:
    """One check: its subject, and how cases of it are planned and compared.

    Attributes:
        closer: whether a plan of 16 bits is compared in fp32 too.
        backend: the backend of torch.compile for compiled stages.
    """

    source: str
    file: ModelFile
    make_plan: MakePlan
    say: Say
    start: Spawn | None
    closer: bool
    backend: str = "inductor"

    def of(self, wanted: Degrees, few: Degrees) -> Comparison:
        """Find a case that fits, plan it, and compare; without dropout if its draws cannot be
        compared.

        Raises:
            AutopipeError: no case that fits can be planned, or compared.
        """
        with keeping_default_dtype():
            first = sized(self.file, wanted, few, self.as_asked, self.say)
            try:
                return self.settled(first)
            except Unrepeatable:
                self.say("dropout is off: its random numbers are none that one process could draw")
            calm = "dropout is off: one process cannot draw the numbers that ranks draw"
            try:
                return self.settled(self.changed(first, calm=True), calm)
            except Unrepeatable:
                raise ModelError(
                    "the model draws random numbers, other than dropout's, that cannot be drawn "
                    "again in one process: its split cannot be compared with it",
                    hint="check it with these random numbers switched off in model()"
                    + ("; or at --tp 1, where each is drawn once" if few.tp > 1 else ""),
                ) from None

    def as_asked(self, smaller: Smaller, few: Degrees) -> Plan:
        """A plan in the precision asked for."""
        return self.make_plan(smaller, few, None)

    def settled(self, case: Sized, *notes: str) -> Comparison:
        """Compare, and compare again if the result is not certain: in fp64 if rounding may decide,
        in fp32 if rounding to 16 bits may decide or hide a difference.

        Raises:
            Unrepeatable: the model draws random numbers that cannot be compared.
        """
        found = self.compared(case, *notes)
        first_line = found.sentence.partition("\n")[0]
        if may_be_rounding(found) and case.plan.precision == "fp32":
            self.say(f"{first_line}: once more in fp64, as rounding may decide")
            return second_look(found, lambda: self.compared(self.in_double(case), *notes))
        if self.closer and (may_be_hidden(found) or may_be_rounding(found)):
            self.say(f"{first_line}: once more in fp32, to look closer")
            return closer_look(found, lambda: self.settled(self.in_fp32(case), *notes))
        return found

    def compared(self, case: Sized, *notes: str) -> Comparison:
        """One comparison."""
        graphs = [_GRAPHS] if case.plan.compiled and self.backend == "eager" else []
        all_notes = (*nearness(case.plan), *graphs, *notes)
        path = Path(self.source)  # the ranks may start in another folder
        source = str(path.resolve()) if path.is_file() else self.source
        job = CheckJob(source, case.smaller, self.backend)
        return _compare(job, case, all_notes, self.say, self.start)

    def changed(self, case: Sized, **how: bool) -> Sized:
        """A case with one more change of its model, planned again."""
        other = replace(case.smaller, **how)
        plan = self.make_plan(other, case.degrees, case.precision)
        return replace(case, smaller=other, file=shrunk(self.file, other), plan=plan)

    def in_double(self, case: Sized) -> Sized:
        """A case in fp64 with the same plan."""
        wide = self.changed(case, double=True)
        return replace(wide, plan=in_double(case.plan, wide.plan))

    def in_fp32(self, case: Sized) -> Sized:
        """A case in fp32, planned under the same words."""
        plan = self.make_plan(case.smaller, case.degrees, "fp32")
        return replace(case, plan=plan, precision="fp32")


def _compare(
    job: CheckJob, case: Sized, notes: tuple[str, ...], say: Say, start: Spawn | None
) -> Comparison:
    """Run both sides, and compare them.

    Raises:
        Unrepeatable: the model draws random numbers that cannot be compared.
    """
    plan, file = case.plan, case.file
    found = Comparison(plan, case.reduced, notes)
    ranks = len(plan.mesh.places)
    traced = cache(partial(_traced, file, plan))
    with TemporaryDirectory(prefix="autopipe-check-") as name:
        folder = Path(name)
        subject.write(folder, job, plan, file)
        drawn = subject.read(folder)[2]

        def nodes() -> RandomNodes:
            return random_nodes(traced())

        if plan.loss_over == BATCH:
            check_statistics(plan, traced().graph)
        try:
            _check_draws(file, plan, drawn[0], nodes)
        except Unmatched:
            return _unmatched(found, traced())
        say(f"two steps of {ranks} ranks, and of the unsplit model")
        with phase(f"running {ranks} ranks"):
            code = (start or spawn)(ranks, ["check", str(folder)])
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            if code != MISTAKE:
                _check_by_itself(file, plan, drawn[0], nodes)
            what = f"the split model does not run (exit code {code})"
            return replace(found, failure=what, refused=code == MISTAKE)
        with phase("running the unsplit model"), _as_planned(file):
            labels = label_counts(traced().graph) if plan.loss_over == ROWS else None
            unsplit, wide = Unsplit(file, plan, nodes, labels), None
            if plan.precision != "fp32" and not orders_kept(plan):
                in_fp32 = replace(plan, precision="fp32", grad_dtype="fp32", optimizer_dtype="fp32")
                wide = Unsplit(file, in_fp32, nodes, labels)
            try:
                every = split.read(folder, ranks)
                exact = orders_kept(plan) and not sets_norms(traced().graph)
                rows = compared(unsplit, plan, drawn, every, wide, exact=exact)
            except Unmatched:
                return _unmatched(found, traced())
        if orders_kept(plan) and not exact:
            found = replace(found, notes=(_NORMS, *found.notes[1:]))
        found = replace(found, rows=tuple(rows))
        return found if found.right else replace(found, first=_first(rows, case, traced, drawn[0]))


def _unmatched(found: Comparison, traced: Trace) -> Comparison:
    """The note for a model whose random ops differ from those of its graph.

    Raises:
        Unrepeatable: a custom function draws an unknown number of times.
    """
    if any(is_random(node) and node.op == FUNCTION_OP for node in traced.graph.nodes):
        raise Unrepeatable
    why = (
        "the model does not draw random numbers once for each random node of its graph: one of "
        "them is lost, or its numbers are used by nobody"
    )
    return replace(found, failure=why)


def _first(rows: Sequence[TensorRow], case: Sized, traced: Callable[[], Trace], batch: Any) -> Any:
    with phase("looking for the first differing node"), _as_planned(case.file):
        return first_node(rows, traced(), case.plan, case.file, batch)


def _traced(file: ModelFile, plan: Plan) -> Trace:
    return trace_planned(file.model, None, file.loss, plan).trace


def _check_draws(file: ModelFile, plan: Plan, batch: Any, nodes: Callable[[], RandomNodes]) -> None:
    """Refuse early, before ranks start, draws that one process cannot repeat.

    Raises:
        Unrepeatable: tensor-parallel ranks may draw for their parts; and where the loss is over the
            whole batch, the unsplit model has no micro-batches to draw for.
        Unmatched: as `Unsplit.step`.
    """
    if plan.mesh.tp > 1 or plan.loss_over == BATCH:
        with phase("looking for random numbers"), _as_planned(file):
            unsplit = Unsplit(file, plan, nodes, None)
            unsplit.step(batch, 1.0)
        if unsplit.draws:
            raise Unrepeatable


def _check_by_itself(
    file: ModelFile, plan: Plan, batch: Any, nodes: Callable[[], RandomNodes]
) -> None:
    """Refuse a model that fails unsplit too, with the user's line, which ranks do not know.

    Raises:
        ModelError: the unsplit model fails.
    """
    with phase("running the unsplit model"), _as_planned(file):
        try:
            Unsplit(file, plan, nodes, None).step(batch, 1.0)
        except (AutopipeError, Unmatched, Unrepeatable):  # it does not tell why ranks fail
            return
        except Exception as error:  # whatever the user's model raises
            raise fails_by_itself(error) from error


@contextmanager
def _as_planned(file: ModelFile) -> Iterator[None]:
    """Within, the unsplit model runs as in its trace: the same branches, one thread, quiet
    libraries. All runs share one loss object; values that it keeps (a mean of outputs) are put
    back."""
    kept = nullcontext() if file.loss is None else restoring(file.loss)
    with one_thread(), eager_branches(), libraries_hushed(heard=False), kept:
        with torch.random.fork_rng(devices=[]):
            yield


_GRAPHS = "the graphs that a GPU's compiler would be given run here as they are"

_NORMS = (
    f"gradients have to be equal to {FP32:g} of their largest entry: forward sets norms of a "
    "parameter, in one process in each micro-batch again, which may change a last bit"
)
