"""`check_plan` and `check_model`: two steps of a split model beside the unsplit one.

a plan, or a model file and words
    fewer_ranks, sized             what fits on this machine           (`fit`, `sized`)
    same_cuts, planned             its plan                            (`small_plan`)
    TwoSides.compare               two steps of both sides             (`two_sides`)
        spawn                      a process for each rank             (`split`)
        compared                   beside plain PyTorch here           (`unsplit`, `compare`)
        first_node                 where a difference begins           -> Comparison
    second_look                    in fp64, if rounding may decide
    closer_look                    in fp32, if rounding to 16 bits may decide or hide a difference
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopipe.checking.compare import nearness
from autopipe.checking.comparison import Comparison
from autopipe.checking.fit import Degrees, fewer_ranks
from autopipe.checking.random_ops import Unrepeatable
from autopipe.checking.second_look import closer_look, may_be_hidden, may_be_rounding, second_look
from autopipe.checking.shrink import shrunk
from autopipe.checking.sized import Sized, sized
from autopipe.checking.small_plan import in_double, planned, same_cuts, words_of
from autopipe.checking.subject import CheckJob, Smaller
from autopipe.checking.two_sides import Spawn, TwoSides
from autopipe.errors import ModelError
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.runtime.launch.spawn import spawn
from autopipe.schedules.registry import SCHEDULES
from autopipe.tracing.source import keeping_default_dtype
from autopipe.util.progress import Say

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
    written = words.get("schedule") not in (None, *SCHEDULES)
    return check.of(degrees, fewer_ranks(degrees, written=written))


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
        """Run one case beside the unsplit model and compare them, once."""
        graphs = [_GRAPHS] if case.plan.compiled and self.backend == "eager" else []
        all_notes = (*nearness(case.plan), *graphs, *notes)
        path = Path(self.source)  # the ranks may start in another folder
        source = str(path.absolute()) if path.is_file() else self.source
        job = CheckJob(source, case.smaller, self.backend)
        return TwoSides(case, self.say).compare(job, all_notes, self.start or spawn)

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


_GRAPHS = "the graphs that a GPU's compiler would be given run here as they are"
