"""From a model and a batch to its `Graph`, and to what Python read on the way.

model, batch --look--> reads, who is alike --capture--> ExportedProgram --convert--> Graph
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from autopipe import batches
from autopipe.aside import aside
from autopipe.capture import Program, capture, look
from autopipe.convert import convert
from autopipe.errors import AutopipeError
from autopipe.graph import Graph
from autopipe.likeness import Likeness
from autopipe.losses import Loss
from autopipe.plan import InputSpec, Read
from autopipe.reads import NeedsNumbers
from autopipe.standins import standing_in

SECONDS_A_MODULE = 2.5e-3
"""That a trace takes, all in all (Llama of 32 layers: 1.2 s, of 126: 3.2 s; 2-core VM, 2026-11)."""


@dataclass(frozen=True)
class Trace:
    """A graph, the description of the batch it was traced on, and the reads it stands on.

    `outputs` are the paths of the model's own outputs, if the graph gives them after the loss.
    """

    graph: Graph
    inputs: tuple[InputSpec, ...]
    reads: tuple[Read, ...]
    outputs: tuple[str, ...] = ()


def trace(
    model: nn.Module,
    batch: object,
    specs: Sequence[InputSpec],
    loss: Loss | None = None,
    *,
    training: bool = True,
    reads: Sequence[Read] | None = None,
    real: Callable[[], nn.Module] | None = None,
    symbolic: bool = True,
    outputs: bool = False,
) -> Trace:
    """Trace a model whose parameters are fake (`fake.skeleton`, `building.build_fake`).

    Args:
        batch: an example batch of at least two rows.
        specs: its description (`batches.describe`).
        loss: `loss(outputs, batch)`; None takes a scalar output or an output's `.loss`.
        training: trace in training mode; False traces evaluation.
        reads: the record of an earlier trace, to be replayed; None records them now.
        real: builds the model with its weights, if a read depends on one.
        symbolic: False fixes the rows to the example's. A dim that is `s` in the specs is a symbol
            as well (`autopipe.sequence`).
        outputs: whether the graph gives the model's own outputs too.

    Raises:
        CaptureError: the model cannot be captured; the sentence names the user's line.
        ModelError: the inputs do not fit the model.
    """
    leaves = batches.flatten(batch)
    batches.bind(model, batch, loss)
    if model.training != training:  # a model in training keeps what parts of it are set to
        model.train(training)
    program = Program(model, batch, loss, specs, outputs=outputs)
    program.training = training
    tracing = _Tracing(program, leaves, tuple(specs), symbolic)
    return tracing.recorded(real) if reads is None else tracing.replayed(reads, real)


@dataclass(frozen=True)
class _Tracing:
    """One trace in the making.

    A look is a run of the whole model on true inputs: it tells what Python reads and which modules
    are alike. Meanwhile a copy of the process presumes that all that may be alike are:

        here     look at all modules ---+-- as presumed: the copy's trace
                                        +-- else: export with the stand-ins that are right
        aside    look at the first of a kind, export with stand-ins for the others
    """

    program: Program
    leaves: Mapping[str, Any]
    specs: tuple[InputSpec, ...]
    symbolic: bool

    def recorded(self, real: Callable[[], nn.Module] | None) -> Trace:
        """The trace, and the reads of a first run."""
        likeness = Likeness(self.program.model)
        modules = sum(1 for _ in self.program.model.modules())
        # If no module is like another, the copy would have to look at all of them as well.
        seconds = SECONDS_A_MODULE * modules if likeness.presumed else 0.0
        ahead = aside(partial(self.presuming, likeness.presumed), seconds)
        try:
            reads = self.look(likeness.watching(), real)
        except NeedsNumbers:
            likeness = Likeness(self.program.model)
            reads = self.look(likeness.watching(), real, numbers=True)
        if likeness.alike != likeness.presumed:
            ahead.drop()
        elif (found := ahead.offered) is not None and found.reads == reads:
            return found
        return self.with_stand_ins(reads, likeness.alike)

    def replayed(self, reads: Sequence[Read], real: Callable[[], nn.Module] | None) -> Trace:
        """The trace by the record of an earlier one; without reads a run finds who is alike."""
        alike: Mapping[str, str] = {}
        if not reads and (likeness := Likeness(self.program.model)).candidates:
            with suppress(AutopipeError, NeedsNumbers):
                if not self.look(likeness.watching(), real):
                    alike = likeness.alike
        return self.with_stand_ins(reads, alike)

    def presuming(self, alike: Mapping[str, str]) -> Trace:
        """The trace if these are alike: the first of them run, no others."""
        return self.export(self.look(standing_in(self.program.model, alike), None), alike)

    def with_stand_ins(self, reads: Sequence[Read], alike: Mapping[str, str]) -> Trace:
        """The trace with stand-ins for who is alike, if that goes well with all else."""
        if alike:
            with suppress(Exception):  # without them it goes well, or says why in full
                return self.export(reads, alike)
        return self.export(reads, {})

    def look(
        self,
        within: AbstractContextManager[object],
        real: Callable[[], nn.Module] | None,
        *,
        numbers: bool = False,
    ) -> tuple[Read, ...]:
        """What Python reads in one run."""
        program, leaves, specs = self.program, self.leaves, self.specs
        return look(program, leaves, specs, within=within, real=real, numbers=numbers)

    def export(self, reads: Sequence[Read], alike: Mapping[str, str]) -> Trace:
        """The trace with these reads, and stand-ins for who is alike."""
        exported = capture(
            self.program, self.leaves, self.specs, reads=reads, alike=alike, symbolic=self.symbolic
        )
        graph = convert(exported, self.program.model, self.specs)
        return Trace(graph, self.specs, tuple(reads), self.program.paths)
