"""Look at a model, export it, and do so again where that finds a reason to.

model, batch --look--> reads, equal modules --capture--> ExportedProgram --convert--> Graph
             <--search-- regions: calls that run as they are, found where a step refuses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopipe.batch.description import count_rows
from autopipe.eager.kept import caches_put_back, without_values
from autopipe.errors import CaptureError, LaterBranch, ModelError, OtherBranch
from autopipe.frontend import refusals
from autopipe.ir import check
from autopipe.ir.graph import SEQUENCE, arguments
from autopipe.ir.opaque_ops import FUNCTION_OP
from autopipe.opaque.calls.trees import NotPlain
from autopipe.opaque.custom_functions import check_held
from autopipe.opaque.regions import registered, with_region_names
from autopipe.opaque.search import with_regions
from autopipe.planfile.parts import InputSpec, Read
from autopipe.planfile.regions import Region
from autopipe.rewriting.second_writes import with_own_results, with_second_writes
from autopipe.tracing import kept_draws
from autopipe.tracing.capture.export import capture
from autopipe.tracing.capture.from_export import convert
from autopipe.tracing.capture.low_precision import (
    Meetings,
    SixteenBits,
    check_followers,
    check_operands,
    parameters_in,
    read_low,
    with_masters,
)
from autopipe.tracing.capture.program import Program
from autopipe.tracing.capture.stubs import BlocksDiffer
from autopipe.tracing.capture.value_guards import NeedsNumbers
from autopipe.tracing.looks import DtypesDiffer, Others, Within, glance, look
from autopipe.tracing.measuring import Measuring
from autopipe.tracing.same_modules import alike_if_read, with_alike
from autopipe.tracing.traced import Trace
from autopipe.util.progress import Say


@dataclass(frozen=True)
class Tracer:
    """One trace under construction.

    A look is a run of the whole model on real inputs: it records the values that Python reads, and
    finds equal modules. The export then runs one of the equal modules, and stubs for the others.

        traced -> recorded -> with_regions -> _recorded -> compared         look: reads, alike
               |                                        -> with_stand_ins -> export
               -> replayed -> alike_if_read                                 glance: alike
                           -> with_stand_ins -> export                      stubs, or in full
    """

    program: Program
    leaves: Mapping[str, Any]
    specs: tuple[InputSpec, ...]
    regions: tuple[Region, ...]
    symbolic: bool
    say: Say
    others: Others | None
    dtypes_first: bool

    @property
    def kept(self) -> SixteenBits | None:
        """How the model is trained in 16 bits; None: in the dtypes that it is built with."""
        return self.program.kept

    def traced(self, real: Callable[[], nn.Module] | None, reads: Sequence[Read] | None) -> Trace:
        """The trace; again, with some buffers read in 16 bits, if activations meet them in fp32."""
        program = self.program
        try:
            with parameters_in(program.model, self.kept):
                return self.recorded(real) if reads is None else self.replayed(reads)
        except CaptureError as error:
            meeting = self.meetings()
            if self.kept is not None and meeting:
                low = self.kept._replace(buffers=(*self.kept.buffers, *meeting))
                self.say(read_low(meeting, low.dtype))
                again = replace(self, program=program.anew(kept=low))
            elif isinstance(error, DtypesDiffer):
                again = replace(self, program=program.anew(kept=self.kept), dtypes_first=False)
            else:
                raise
        return again.traced(real, reads)

    def use(self, regions: Sequence[Region]) -> None:
        """Make these calls ops of the trace."""
        program = self.program
        given = program.model, program.loss
        program.regions = registered(regions, *given, training=program.training)

    def recorded(self, real: Callable[[], nn.Module] | None) -> Trace:
        """The trace, with the reads of a first run, and with regions where it needs them."""
        try:
            found = self.with_regions(real)
            if self.program.found.later:
                self.say(self.program.found.later)
            return found
        except LaterBranch:  # no call in which it is read can run as it is; the next run says so
            self.program.found.refuses_later = False
            return self.recorded(real)
        except OtherBranch as error:  # no call in which it is read can run as it is
            self.say(f"{error.message}: a micro-batch of such rows is refused in the run")
            return replace(self, others=None).recorded(real)

    def with_regions(self, real: Callable[[], nn.Module] | None) -> Trace:
        """The trace with the regions that it needs; most models need none."""
        program = self.program

        def with_these(regions: tuple[Region, ...]) -> Trace:
            self.use(regions)
            return self._recorded(real)

        tokens = any(str(SEQUENCE) in spec.shape for spec in self.specs)
        if real is None or self.regions or tokens:  # a region is a line in the rows alone
            return with_these(self.regions)
        measuring = Measuring(program, self.leaves, self.specs, real, self.others)
        found = with_regions(program.model, lambda: program.twins, with_these, measuring.measure)
        if program.found.asks_for_others:
            self.say(
                "the model asks torch.distributed for other processes, and the answer is that "
                "there are none: each replica computes its statistics by itself"
            )
        return found

    def _recorded(self, real: Callable[[], nn.Module] | None) -> Trace:
        try:
            reads, alike = self.compared(real)
        except NeedsNumbers:
            reads, alike = self.compared(real, numbers=True)
        return self.with_stand_ins(reads, alike)

    def replayed(self, reads: Sequence[Read]) -> Trace:
        """The trace with an earlier one's reads."""
        self.use(self.regions)
        return self.with_stand_ins(reads, alike_if_read(self.program.model, self.glanced, reads))

    def with_stand_ins(self, reads: Sequence[Read], alike: Mapping[str, str]) -> Trace:
        """Try to export with stubs for equal modules; fall back to a full export.

        Only a refusal of the capture leads to the second trace; any other error is a bug.
        """
        if alike:
            try:
                return self.export(reads, alike)
            except (ModelError, NotPlain, BlocksDiffer) as error:
                # Without stand-ins the trace goes well, or says why in full.
                why = str(error).partition("\n")[0]
                self.say(f"trace: repeated modules are traced one by one, not once for all: {why}")
        return self.export(reads, {})

    def compared(
        self, real: Callable[[], nn.Module] | None, *, numbers: bool = False
    ) -> tuple[tuple[Read, ...], Mapping[str, str]]:
        """The values that Python reads in a run, and the modules that are alike."""
        what = self.program, self.leaves, self.specs
        looked = partial(
            look,
            *what,
            others=self.others,
            real=real,
            numbers=numbers,
            dtypes_first=self.dtypes_first,
        )
        return with_alike(self.program.model, looked, partial(self.glanced, numbers=numbers))

    def glanced(self, within: Within, *, numbers: bool = False) -> tuple[Read, ...]:
        """The values that Python reads in one run."""
        return glance(self.program, self.leaves, self.specs, within, numbers=numbers)

    def meetings(self) -> list[str]:
        """The fp32 buffers that meet activations of 16 bits in a run, which may end early."""
        if self.kept is None:
            return []
        found = Meetings(self.program.model, self.kept.dtype)
        with suppress(Exception), parameters_in(self.program.model, self.kept):
            self.glanced(lambda: found)
        return [name for name in found.names() if name not in self.kept.buffers]

    def captured(
        self, reads: Sequence[Read], alike: Mapping[str, str]
    ) -> torch.export.ExportedProgram:
        """The exported program; once more where parameters are held twice (`eager.registered`)."""
        program = self.program
        try:
            with caches_put_back(*program.parts):
                return capture(
                    program,
                    self.leaves,
                    self.specs,
                    reads=reads,
                    alike=alike,
                    symbolic=self.symbolic,
                )
        except CaptureError as error:
            if refusals.LIFTED not in str(error.__cause__):
                raise
            if program.found.held_twice:
                outside = without_values(program.model)
                raise (refusals.kept_outside(outside) if outside else error) from error
            program.found.held_twice = True
        return self.captured(reads, alike)

    def export(self, reads: Sequence[Read], alike: Mapping[str, str]) -> Trace:
        """The trace with these reads, and with stubs for the modules in `alike`."""
        program, exported = self.program, self.captured(reads, alike)
        found = program.found
        if found.otherwise is not None:
            raise found.otherwise
        assigned = dict(found.assigned).keys()
        graph = convert(exported, program.model, self.specs, program.twins, assigned)
        for node in graph.nodes:
            if node.op == FUNCTION_OP and not found.unsteady:  # which is refused by its name
                check_held(str(arguments(node)["call"]), node.place)
        graph = with_region_names(graph, program.regions)
        kept_draws.check(graph, found.drawn_once)
        if program.training:
            graph = check.after("results of checkpoints", with_own_results(graph))
            graph = check.after("second writes", with_second_writes(graph, assigned))
        if self.kept is not None:
            check_operands(graph, self.kept.dtype)
            check_followers(graph, self.kept.dtype)
            graph = with_masters(graph, self.kept)
        return Trace(
            graph=graph,
            inputs=self.specs,
            reads=tuple(reads),
            outputs=found.paths,
            unsteady=found.unsteady,
            left=found.left,
            caches=frozenset(found.caches),
            regions=tuple(running.region for running in graph.regions.values()),
            rows=None if self.symbolic else count_rows(self.specs, self.leaves),
            asks_for_gpus=tuple(sorted(found.asks_for_gpus)),
            asks_for_one_row=tuple(sorted(found.asks_for_one_row)),
            kept=self.kept,
        )
