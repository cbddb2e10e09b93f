"""Run a program on real inputs before the trace, to record what Python reads and keeps.

The program runs with its fake parameters. If a read depends on a weight, or a kernel has no version
for fake tensors, the model is built with its weights, and runs with them.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager import refused_effects, second_run
from autopipe.eager.assigned_buffers import as_before
from autopipe.eager.compared_runs import compared_runs
from autopipe.eager.draws import Generators, seed_known
from autopipe.eager.kept import caches_put_back, restoring
from autopipe.eager.taint import Taint
from autopipe.errors import AutopipeError, CaptureError, DrawnBranch, ModelError, OtherBranch
from autopipe.frontend import refusals, user_lines
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.training_mode import put_into
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import DynamicOutputShapeException, FakeTensor, quiet
from autopipe.opaque.scripted import functions_op_by_op
from autopipe.planfile.parts import InputSpec, Read
from autopipe.tracing.capture.export import tensors_of
from autopipe.tracing.capture.low_precision import parameters_in
from autopipe.tracing.capture.program import Program
from autopipe.tracing.capture.value_guards import NeedsNumbers, ReadsParameter, record
from autopipe.tracing.counting_buffers import later_read
from autopipe.tracing.numbers_of_weights import number_of_weights

Within = Callable[[], AbstractContextManager[object]]
"""Makes what a run of a program happens in."""

Others = Callable[[], Sequence[Tensor]]
"""Makes a batch's tensors, of as many rows as the program was made with."""


def look(
    program: Program,
    leaves: Mapping[str, Any],
    specs: Sequence[InputSpec],
    within: Within,
    *,
    others: Others | None = None,
    real: Callable[[], nn.Module] | None,
    numbers: bool = False,
    dtypes_first: bool = False,
) -> tuple[Read, ...]:
    """Run `program` on real inputs, and record the values that Python reads.

    Args:
        within: makes the `with` block for a run; called for the first run and for a second one.
        others: makes other rows, for which Python has to read the same values.
        real: builds the model with its weights, for a read that depends on one; None: cannot.
        numbers: as for `value_guards.record`.
        dtypes_first: whether to raise `DtypesDiffer` before weights are made.

    Raises:
        DtypesDiffer: an op gets tensors of dtypes that do not go together.
        OtherBranch: Python reads other values of other rows.
        LaterBranch: it reads other values in a later call.
        NeedsNumbers: as `value_guards.record`.
        CaptureError: a read cannot be answered; the message names the user's line.
    """
    with _surroundings():
        runs = _RunsOfALook(program, tensors_of(leaves, specs), numbers, others)
        return _record(runs, within, real, dtypes_first=dtypes_first)


def glance(
    program: Program,
    leaves: Mapping[str, Any],
    specs: Sequence[InputSpec],
    within: Within,
    *,
    numbers: bool = False,
) -> tuple[Read, ...]:
    """The reads of one run of a `program` that was looked at before, perhaps when it was planned.

    Args:
        numbers: as for `value_guards.record`.

    Raises:
        Exception: a read depends on a parameter, or the model's code fails without values.
    """
    runs = _RunsOfALook(program, tensors_of(leaves, specs), numbers, others=None)
    with _surroundings(), quiet(), Generators().restored(), caches_put_back(*program.parts):
        with restoring(*program.parts), as_before(*program.parts):
            return runs.again(within)


@contextmanager
def _surroundings() -> Iterator[None]:
    with eager_branches(), libraries_hushed(heard=True), seed_known(), functions_op_by_op():
        yield


@dataclass
class _RunsOfALook:
    """Runs of a program on real inputs, whose reads are recorded.

    `numbers` is as for `value_guards.record`, `others` as for `look`.
    """

    program: Program
    tensors: Sequence[Tensor]
    numbers: bool
    others: Others | None

    def run(self) -> None:
        self.program(*[tensor.clone() for tensor in self.tensors])

    def reads(self, within: Within) -> tuple[Read, ...]:
        """The reads of a run; sets the program's `unsteady`, `drawn_once` and `left`."""
        parts = self.program.parts
        first, again = partial(self._first, within), partial(self.again, within)
        runs = first, again, self.again
        of = self.program.found
        found, of.unsteady, of.drawn_once, of.left = compared_runs(
            parts, self.tensors, *runs, lambda: of.caches
        )
        return found

    def _first(self, within: Within, noted: second_run.Noted) -> tuple[Read, ...]:
        """The reads of a first run; its calls of torch go to `noted`. Buffers are put back.

        If the run has found assigned buffers, the calls are noted in another run, which writes
        these buffers instead."""
        program, known = self.program, self.program.found.counts
        with as_before(*program.parts):
            found = self._watched(within, noted)
        if program.found.counts != known:
            noted.calls.clear()
            with as_before(*program.parts):
                self.again(within, lambda: noted)
        return found

    def _watched(self, within: Within, noted: second_run.Noted) -> tuple[Read, ...]:
        """The reads of a run in which anything that no graph can express is refused."""
        generators, changed, drew = Generators(*self.program.parts), False, False
        before = generators.places()

        def run() -> None:
            nonlocal changed, drew
            changes = second_run.Changes(self.program.model)
            asked = _asks_for_gpus(self.program.found.asks_for_gpus)
            with within(), refused_effects.refused(self.program.model), noted, asked:
                self.run()
            changed, drew = changes.seen(), changes.drawn()

        taint = Taint()  # of buffers, which are put back only behind all of these runs
        again, known = partial(self.again, taint=taint), self.program.found.counts
        found = record(run, self.run, numbers=self.numbers, taint=taint)
        if self.program.found.counts != known:
            again()  # the first has found buffers to be assigned; a later run writes them
            changed = True
        generators.check(before, again)
        other = second_run.other_reads(found, again) if changed and found else None
        of, checked = self.program.found, any(read.checked for read in found)
        of.otherwise, of.later = other, ""  # of this look alone: the one before had other regions
        later = self.program.model, found, again, self.others is not None and of.refuses_later
        if changed and checked and other is None:
            with restoring(*self.program.parts):
                of.later = later_read(*later)
        if drew and checked and other is None:
            self._check_draws(found, taint)
        if self.others is not None and checked:
            self._check_others(found, self.others(), within, taint)
        if checked and other is None and not of.later:
            with restoring(*self.program.parts):
                of.later = number_of_weights(*later)
        return found

    def _check_draws(self, found: Sequence[Read], taint: Taint) -> None:
        """Refuse reads that give other values with other random numbers."""
        for seed, most in second_run.DRAWS:
            try:
                with second_run.other_draws(seed, most):
                    self.again(taint=taint, expected=found, unlike=second_run.of_other_draws)
            except (DrawnBranch, ReadsParameter):
                raise
            except Exception:  # the model may fail on the least or the most that can be drawn
                continue

    def _check_others(
        self, found: Sequence[Read], others: Sequence[Tensor], within: Within, taint: Taint
    ) -> None:
        """Refuse reads that give other values for other rows."""

        def run() -> None:
            with within():
                self.program(*[tensor.clone() for tensor in others])

        try:
            record(run, run, numbers=self.numbers, expected=found, taint=taint)
        except (OtherBranch, ReadsParameter):
            raise
        except Exception:  # a model that fails on these rows fails in the run, with its error
            return

    def again(
        self,
        within: Within = nullcontext,
        noted: Within = nullcontext,
        taint: Taint | None = None,
        **expected: Any,
    ) -> tuple[Read, ...]:
        """The reads of a run without any other check; `expected` is as for `record`."""

        def run() -> None:
            with within(), noted():
                self.run()

        return record(run, self.run, numbers=self.numbers, taint=taint, **expected)


@contextmanager
def _asks_for_gpus(places: set[str]) -> Iterator[None]:
    """Within, note the user's lines that ask whether a tensor is on a GPU: `x.is_cuda`, or
    `x.device` in a line that names cuda.

    A run on a CPU answers no, and so does a trace of what GPUs are to compute.
    """
    getter: property = vars(FakeTensor)["device"]  # which no function mode sees

    def device(tensor: Any) -> torch.device:
        frame = sys._getframe(1)
        if "cuda" in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            places.update({user_lines.here(alone=True)} & {place})
        found: torch.device = getter.__get__(tensor)
        return found

    with _AsksForGPUs(places), patched(FakeTensor, "device", property(device, getter.fset)):
        yield


class _AsksForGPUs(TorchFunctionMode):
    """Notes the lines that ask real tensors for their device, and any tensor for `is_cuda`."""

    def __init__(self, places: set[str]) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_IS_CUDA, _DEVICE):
            place = user_lines.here(alone=True)
            file, _, line = place.rpartition(":")
            if place and (func == _IS_CUDA or "cuda" in linecache.getline(file, int(line))):
                self.places.add(place)
        return func(*args, **(kwargs or {}))


# mypy takes the attributes for what they give, not for the getters that a mode is shown.
_IS_CUDA, _DEVICE = Tensor.is_cuda.__get__, Tensor.device.__get__  # type: ignore[attr-defined]


class NoRoom(CaptureError):
    """Raised where a model's weights need more memory than is free; the message has both."""


def _without_weights(program: Program, why: Exception, where: str) -> AutopipeError:
    """The error for a model that runs only with its weights, or not even with them.

    Args:
        why: the error of a run without weights.
        where: where the weights are, or which of them.
    """
    if not isinstance(why, ReadsParameter):
        return program.refusal(why)
    return CaptureError(
        f"{why}: Python reads a value here that depends on the model's weights{where}",
        hint="express the branch as a computation (torch.where), or plan where the whole model "
        "fits in memory",
    )


class DtypesDiffer(CaptureError):
    """Raised where a run without weights fails since dtypes do not go together."""


def _record(
    runs: _RunsOfALook,
    within: Within,
    real: Callable[[], nn.Module] | None,
    *,
    dtypes_first: bool,
) -> tuple[Read, ...]:
    """The reads of runs with fake parameters or, where these do not do, with weights; as `look`."""
    program, tensors = runs.program, runs.tensors
    try:
        with quiet(), Generators().restored(), caches_put_back(*program.parts):
            return runs.reads(within)
    except (ModelError, NeedsNumbers):
        raise
    except DynamicOutputShapeException as error:
        raise program.refusal(error) from error
    except Exception as error:  # ReadsParameter, or whatever the model's own code raises
        # Perhaps for the lack of values alone: some kernels have no version for fake tensors.
        why = error
    if dtypes_first and refusals.dtypes_differ(why):
        raise DtypesDiffer(str(why)) from why
    if real is None:
        raise _without_weights(program, why, ", which are not at hand") from why
    try:
        weights = real()
    except NoRoom as found:
        raise _without_weights(program, why, f"; {found.message}") from why
    fake, program.model = program.model, weights
    program.twins += (program.model,)
    try:
        with parameters_in(program.model, program.kept):
            put_into(program.model, program.training)
            try:
                return runs.reads(nullcontext)
            except NeedsNumbers:
                return replace(runs, numbers=True).reads(nullcontext)
    except AutopipeError:
        raise
    except Exception as error:  # whatever the model's own code raises, or torch where one looks
        if _goes_well(program, tensors):
            raise refusals.in_a_trace(error, program.loss) from error
        raise program.refusal(error) from error
    finally:
        program.model = fake


def _goes_well(program: Program, tensors: Sequence[Tensor]) -> bool:
    """Whether a model with its weights runs if no mode watches its calls."""
    plain = Program(
        program.model, program.batch, program.loss, program.specs, kept=program.kept, eager=True
    )
    with restoring(*program.parts), torch.random.fork_rng(devices=[]):
        try:
            plain(*[tensor.clone() for tensor in tensors])
        except Exception:  # it raises by itself
            return False
    return True
