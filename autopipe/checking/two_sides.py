"""Run both sides of a check, two steps each, and compare them.

folder --spawn--> ranks, a process each --> their steps ---.
                                                           +--compared--> rows --> Comparison
the same batches --> the unsplit model, in this process ---'
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from autopipe.checking import split, subject
from autopipe.checking.compare import FP32, TensorRow, compared, orders_kept
from autopipe.checking.comparison import Comparison
from autopipe.checking.first_node import first_node
from autopipe.checking.random_ops import RandomNodes, Unmatched, Unrepeatable, random_nodes
from autopipe.checking.sized import Sized
from autopipe.checking.subject import CheckJob
from autopipe.checking.unsplit import Unsplit, check_statistics
from autopipe.eager.kept import restoring
from autopipe.errors import AutopipeError
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.refusals import fails_by_itself
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.dataflow import is_random
from autopipe.ir.opaque_ops import FUNCTION_OP
from autopipe.planfile.contents import BATCH, ROWS
from autopipe.planners.driver.against_eager import one_thread
from autopipe.rewriting.label_counts import label_counts
from autopipe.rewriting.projections import sets_norms
from autopipe.runtime.start import trace_planned
from autopipe.tracing.traced import Trace
from autopipe.util.numbers import count
from autopipe.util.progress import Say, phase

INTERRUPTED = 128 + signal.SIGINT

MISTAKE = 2
"""The exit code of a rank that has refused what it was given, and said why."""

Spawn = Callable[[int, Sequence[str]], int]
"""Runs `autopipe` with some arguments in a number of processes; returns the first nonzero code."""

_OF_AUTOPIPE = AutopipeError, Unmatched, Unrepeatable
"""What a run of the unsplit model may raise that is no mistake of the model's."""


@dataclass(frozen=True)
class TwoSides:
    """The ranks of a case's plan, and its unsplit model."""

    case: Sized
    say: Say

    def compare(self, job: CheckJob, notes: tuple[str, ...], start: Spawn) -> Comparison:
        """Run both sides, and compare them.

        Args:
            job: what the ranks read of the case.
            notes: sentences for the comparison; the first one says how near gradients have to be.
            start: starts the ranks.

        Raises:
            Unrepeatable: the model draws random numbers that cannot be compared.
        """
        plan = self.case.plan
        found = Comparison(plan, self.case.reduced, notes)
        with TemporaryDirectory(prefix="autopipe-check-") as name:
            folder = Path(name)
            subject.write(folder, job, plan, self.case.file)
            drawn = subject.read(folder, self.case.file)[2]
            if plan.loss_over == BATCH:
                check_statistics(plan, self._traced.graph)
            try:
                self._check_draws(drawn[0])
                if code := self._run_ranks(folder, start):
                    return self._not_run(found, code, drawn[0])
                rows = self._rows(folder, drawn)
            except Unmatched:
                return self._unmatched(found)
            if orders_kept(plan) and not self._exact:
                found = replace(found, notes=(_NORMS, *found.notes[1:]))
            found = replace(found, rows=tuple(rows))
            return found if found.right else replace(found, first=self._first(rows, drawn[0]))

    @cached_property
    def _traced(self) -> Trace:
        file, plan = self.case.file, self.case.plan
        return trace_planned(file.model, file.example_for(plan), file.loss, plan).trace

    def _nodes(self) -> RandomNodes:
        return random_nodes(self._traced)

    @property
    def _exact(self) -> bool:
        """Whether every bit has to be equal."""
        return orders_kept(self.case.plan) and not sets_norms(self._traced.graph)

    def _check_draws(self, batch: Any) -> None:
        """Refuse early, before ranks start, draws that one process cannot repeat.

        Raises:
            Unrepeatable: tensor-parallel ranks may draw for their parts; and where the loss is over
                the whole batch, the unsplit model has no micro-batches to draw for.
            Unmatched: as `Unsplit.step`.
            ModelError: the unsplit model fails; has the user's line.
        """
        plan = self.case.plan
        if plan.mesh.tp > 1 or plan.loss_over == BATCH:
            with phase("looking for random numbers"), self._as_planned():
                unsplit = Unsplit(self.case.file, plan, self._nodes, None)
                with _with_users_line():
                    unsplit.step(batch, 1.0)
            if unsplit.draws:
                raise Unrepeatable

    def _run_ranks(self, folder: Path, start: Spawn) -> int:
        """Run the ranks, which write their steps into the folder; returns their exit code."""
        ranks = len(self.case.plan.mesh.places)
        number = count(ranks, "rank")
        self.say(f"two steps of {number}, and of the unsplit model")
        with phase(f"running {number}"):
            code = start(ranks, ["check", str(folder)])
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code

    def _not_run(self, found: Comparison, code: int, batch: Any) -> Comparison:
        """The comparison whose ranks have ended with an exit code.

        Raises:
            ModelError: the unsplit model fails too; has the user's line, which ranks do not know.
        """
        if code != MISTAKE:
            self._check_by_itself(batch)
        what = f"the split model does not run (exit code {code})"
        return replace(found, failure=what, refused=code == MISTAKE)

    def _check_by_itself(self, batch: Any) -> None:
        # What autopipe refuses by itself does not tell why ranks fail.
        with (
            phase("running the unsplit model"),
            self._as_planned(),
            _with_users_line(),
            suppress(*_OF_AUTOPIPE),
        ):
            Unsplit(self.case.file, self.case.plan, self._nodes, None).step(batch, 1.0)

    def _rows(self, folder: Path, batches: Sequence[Any]) -> list[TensorRow]:
        """Run the unsplit model, and compare its steps with those in the folder.

        Raises:
            Unmatched: as `Unsplit.step`.
        """
        file, plan = self.case.file, self.case.plan
        with phase("running the unsplit model"), self._as_planned():
            labels = label_counts(self._traced.graph) if plan.loss_over == ROWS else None
            unsplit, wide = Unsplit(file, plan, self._nodes, labels), None
            if plan.precision != "fp32" and not orders_kept(plan):
                in_fp32 = replace(plan, precision="fp32", grad_dtype="fp32", optimizer_dtype="fp32")
                wide = Unsplit(file, in_fp32, self._nodes, labels)
            every = split.read(folder, len(plan.mesh.places))
            return compared(unsplit, plan, batches, every, wide, exact=self._exact)

    def _unmatched(self, found: Comparison) -> Comparison:
        """The comparison of a model whose random ops differ from those of its graph.

        Raises:
            Unrepeatable: a custom function draws an unknown number of times.
        """
        nodes = self._traced.graph.nodes
        if any(is_random(node) and node.op == FUNCTION_OP for node in nodes):
            raise Unrepeatable
        why = (
            "the model does not draw random numbers once for each random node of its graph: one of "
            "them is lost, or its numbers are used by nobody"
        )
        return replace(found, failure=why)

    def _first(self, rows: Sequence[TensorRow], batch: Any) -> Any:
        with phase("looking for the first differing node"), self._as_planned():
            return first_node(rows, self._traced, self.case.plan, self.case.file, batch)

    @contextmanager
    def _as_planned(self) -> Iterator[None]:
        """Within, the unsplit model runs as in its trace: the same branches, one thread, quiet
        libraries. All runs share one loss object; values that it keeps (a mean of outputs) are put
        back."""
        loss = self.case.file.loss
        kept = nullcontext() if loss is None else restoring(loss)
        with one_thread(), eager_branches(), libraries_hushed(heard=False), kept:
            with torch.random.fork_rng(devices=[]):
                yield


_NORMS = (
    f"gradients have to be equal to {FP32:g} of their largest entry: forward sets norms of a "
    "parameter, in one process in each micro-batch again, which may change a last bit"
)


@contextmanager
def _with_users_line() -> Iterator[None]:
    """Within, an error of the unsplit model's own code becomes one with the user's line.

    Raises:
        ModelError: as `fails_by_itself` has it.
    """
    try:
        yield
    except _OF_AUTOPIPE:
        raise
    except Exception as error:  # whatever the user's model raises
        raise fails_by_itself(error) from error
