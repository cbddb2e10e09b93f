"""Run a model with its weights on a few rows, to measure the calls that will run as they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import AutopipeError, CaptureError
from autopipe.frontend import batch as batches
from autopipe.frontend import second_run
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.torch_patches import replacing
from autopipe.opaque.measure import Fails, Runs, measured
from autopipe.opaque.sites import Site
from autopipe.planfile.parts import InputSpec
from autopipe.planfile.regions import Region
from autopipe.tracing.export import Program
from autopipe.tracing.low_precision import parameters_in
from autopipe.tracing.module_makes import restoring


@dataclass
class Measuring:
    """The model with its weights, once it is needed.

    Attributes:
        program: the one that is traced.
        leaves, specs: an example batch of a few rows, and its description.
        real: builds the model with its weights.
    """

    program: Program
    leaves: Mapping[str, Any]
    specs: Sequence[InputSpec]
    real: Callable[[], nn.Module]

    def measure(self, sites: Sequence[Site], why: Mapping[Site, str]) -> tuple[Region, ...]:
        """The regions of all calls of the sites, as `opaque.measure.measured`.

        Raises:
            CaptureError: a call computes something else when it is made again.
        """
        program, model = self.program, self._model
        eager = Program(
            model, program.batch, program.loss, self.specs, kept=program.kept, eager=True
        )
        rows = batches.rows_of(self.specs, self.leaves)
        ends = [
            self._joined([batches.slice_rows(self.specs, self.leaves, n, n + 1)] * rows)
            for n in (0, rows - 1)
        ]
        negated = {path: _negated(leaf) for path, leaf in self.leaves.items()}
        first, twice, *others = (
            self._run(eager, leaves)
            for leaves in (self.leaves, self._joined([self.leaves] * 2), *ends, negated)
        )
        runs = Runs(rows, first, twice, others)
        with (
            restoring(model),
            parameters_in(model, program.kept),
            eager_branches(),
            libraries_hushed(heard=False),
            second_run.restored(),
            replacing(torch.cond, _as_code),
        ):
            if model.training != program.training:
                model.train(program.training)
            self._check_again(eager)
            try:
                return measured(model, sites, runs, why)
            except Fails as failed:
                raise eager.refusal(failed.error) from failed

    @cached_property
    def _model(self) -> nn.Module:
        return self.real()

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of the rows of several ones."""
        found = dict(parts[0])
        for spec in self.specs:
            if spec.batch_dim is not None:
                found[spec.path] = torch.cat([part[spec.path] for part in parts], spec.batch_dim)
        return found

    @contextmanager
    def _run(self, eager: Program, leaves: Mapping[str, Any]) -> Iterator[Callable[[], object]]:
        with restoring(*eager.parts), torch.random.fork_rng(devices=[]):
            yield partial(self._once, eager, leaves)

    def _once(self, eager: Program, leaves: Mapping[str, Any]) -> None:
        wanted = [leaves[spec.path] for spec in self.specs if spec.dtype != "python"]
        eager(*(leaf.clone() for leaf in wanted if isinstance(leaf, Tensor)))

    def _check_again(self, eager: Program) -> None:
        """Refuse a model that keeps something in plain attributes, and computes with it."""
        run = partial(self._once, eager, self.leaves)
        with restoring(*eager.parts) as changed:
            logs = []
            for _ in range(2):
                with torch.random.fork_rng(devices=[]):
                    logs.append(self._calls_of(run, eager))
            names = changed()
        if names and logs[0] != logs[1]:
            raise CaptureError(
                f"the model keeps {', '.join(names)} from one call to the next, and then computes "
                "something else",
                hint="keep it in a buffer, register_buffer, and write that in place",
            )

    def _calls_of(self, run: Callable[[], None], eager: Program) -> tuple[Hashable, ...]:
        try:
            return second_run.calls_of(run)
        except AutopipeError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise eager.refusal(error) from error


def _as_code(chosen: Any, first: Any, second: Any, operands: Sequence[Any]) -> Any:
    """What torch.cond gives; torch's own does not run where anybody looks."""
    return first(*operands) if chosen else second(*operands)


def _negated(leaf: Any) -> Any:
    """Other values where any are as good: integers may be positions in a table."""
    return -leaf if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
