"""Run a model with its weights on a few rows, to measure the calls that will run as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.description import count_rows
from autopipe.eager import second_run
from autopipe.eager.assigned_buffers import as_before, buffers_of, frozen_as_before
from autopipe.eager.counts import Counts
from autopipe.eager.draws import Generators
from autopipe.eager.frozen import numbered
from autopipe.eager.kept import caches_put_back, restoring
from autopipe.errors import AutopipeError, CaptureError
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.training_mode import put_into
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.torch_patches import replacing
from autopipe.ir.torch_private import version
from autopipe.opaque import branches
from autopipe.opaque.calls.sites import Site, Wider, with_loss
from autopipe.opaque.measure import Fails, Runs, measured
from autopipe.planfile.parts import InputSpec
from autopipe.planfile.regions import Region
from autopipe.tracing import left_behind
from autopipe.tracing.capture.low_precision import parameters_in
from autopipe.tracing.capture.program import Program

_Gradients = list[Tensor | None]
_Pass = tuple[tuple[second_run.Call, ...], _Gradients]
"""A way there and back: the calls of torch of a forward, and the gradients."""


@dataclass
class Measuring:
    """Measures calls of a model, which it builds with its weights when they are first needed.

    Attributes:
        program: the program that is traced.
        leaves, specs: an example batch of a few rows, and its description.
        real: builds the model with its weights.
        others: makes the tensors of as many other rows, for which sizes have to be the same.
        context: context variables as they were before the model ran.
    """

    program: Program
    leaves: Mapping[str, Any]
    specs: Sequence[InputSpec]
    real: Callable[[], nn.Module]
    others: Callable[[], Sequence[Tensor]] | None = None
    context: Context = field(default_factory=copy_context)

    def measure(self, sites: Sequence[Site], why: Mapping[Site, str]) -> tuple[Region, ...]:
        """The regions of all calls of the sites, as `opaque.measure.measured`.

        Raises:
            Wider: as `measured`; or other code computes with what a call leaves elsewhere than in
                its results and in tensors of attributes.
            CaptureError: a second run of the model computes something else.
        """
        program, model = self.program, self._model
        eager = Program(
            model, program.batch, program.loss, self.specs, kept=program.kept, eager=True
        )
        rows = count_rows(self.specs, self.leaves)
        ends = [self._alone(row, rows) for row in (0, rows - 1)]
        negated = {path: _negated(leaf) for path, leaf in self.leaves.items()}
        other_rows = [] if self.others is None else [self._with(self.others())]
        first, twice, *others = (
            self._run(eager, leaves)
            for leaves in (
                self.leaves,
                self._joined([self.leaves] * 2),
                *other_rows,
                *ends,
                negated,
            )
        )
        drawn = [self._run(eager, self.leaves, draws) for draws in second_run.DRAWS]
        runs = Runs(rows, first, twice, others, drawn)
        with (
            restoring(model),
            caches_put_back(*eager.parts),
            parameters_in(model, program.kept),
            eager_branches(),
            libraries_hushed(heard=False),
            Generators().restored(),
            replacing(torch.cond, branches.plain),
            with_loss(model, program.loss),
            frozen_as_before(model),
        ):
            put_into(model, program.training)
            self._check_again(eager)
            unlike = other_rows or ends
            try:
                regions = measured(model, sites, runs, why)
                run, *other_runs = (
                    partial(self._run, eager, each) for each in (self.leaves, *unlike)
                )
                left_behind.check(eager, regions, run, other_runs, self.context)
                self._check_backward(eager, unlike)
                return regions
            except Fails as failed:  # the model has just run, without anybody looking
                raised = f"it raises {type(failed.error).__name__} where it is measured"
                raise Wider(failed.site, raised) from failed

    @cached_property
    def _model(self) -> nn.Module:
        return self.real()

    def _alone(self, row: int, count: int) -> dict[str, Any]:
        """A batch of the same row, `count` times."""
        return self._joined([slice_rows(self.specs, self.leaves, row, row + 1)] * count)

    def _joined(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A batch of the rows of several ones."""
        found = dict(parts[0])
        for spec in self.specs:
            if spec.batch_dim is not None:
                found[spec.path] = torch.cat([part[spec.path] for part in parts], spec.batch_dim)
        return found

    def _with(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """The batch with these tensors in the place of its own."""
        paths = [spec.path for spec in self.specs if spec.dtype != "python"]
        return {**self.leaves, **dict(zip(paths, tensors, strict=True))}

    @contextmanager
    def _run(
        self, eager: Program, leaves: Mapping[str, Any], *draws: second_run.Draws
    ) -> Iterator[Callable[[], object]]:
        with ExitStack() as until:
            until.enter_context(restoring(*eager.parts))
            until.enter_context(torch.random.fork_rng(devices=[]))
            for draw in draws:
                until.enter_context(second_run.other_draws(*draw))
            yield partial(self._once, eager, leaves)

    def _once(self, eager: Program, leaves: Mapping[str, Any]) -> Any:
        leaves_of_tensors = [leaves[spec.path] for spec in self.specs if spec.dtype != "python"]
        return eager(*(leaf.clone() for leaf in leaves_of_tensors if isinstance(leaf, Tensor)))

    def _check_again(self, eager: Program) -> None:
        """Refuse a model that keeps a value from one run to the next and computes with it.

        A cache is allowed: a first run fills it (a table for a size), and later runs leave out the
        calls of torch that have filled it, on these rows and on others.
        """
        with restoring(*eager.parts) as changed:
            first = self._forward_backward(eager, self.leaves)
            names = changed()
            if not names:
                return
            second, *later = self._others_ahead(eager)
        if all(_same(second, other) for other in later):
            if _same(first, second) or _leaves_out(first, second) and self._fills(eager):
                return
        raise CaptureError(
            f"the model keeps {', '.join(names)} from one call to the next, and then computes "
            "something else",
            hint="keep it in a buffer that __init__ registers, and write that in place; what a "
            "first call is to initialise, call the model once for in model()",
        )

    def _check_backward(self, eager: Program, others: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a backward that computes with what the last forward has left in Python.

        In a pipeline forward has run on later rows by then. What a call sets in attributes of
        modules stands there again in its backward, as other values that are kept do not.
        """
        expected, found = self._gradients(eager, ()), self._gradients(eager, others)
        if expected is None or found is None or _equal(expected, found):
            return
        raise CaptureError(
            "the model's backward, in a hook or a custom Function, computes with what its forward "
            "leaves in Python: in a pipeline forward has run on later rows by then",
            hint="let the hook close over a variable of forward, and a Function keep it in ctx "
            "(ctx.mean = mean, ctx.save_for_backward), instead of a global or a list",
        )

    def _gradients(self, eager: Program, between: Sequence[Mapping[str, Any]]) -> _Gradients | None:
        """The gradients of the loss, if forward runs on some other rows before backward does;
        None: it fails."""
        parameters = list(eager.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            with restoring(*eager.parts), frozen_as_before(self._model), suppress(Exception):
                with torch.random.fork_rng(devices=[]):
                    found = self._once(eager, self.leaves)
                    attributes = [(vars(m), {**vars(m)}) for m in self._model.modules()]
                    for leaves in between:
                        with as_before(*eager.parts, holders=()), frozen_as_before(self._model):
                            with torch.random.fork_rng(devices=[]), suppress(Exception):
                                self._once(eager, leaves)
                    for now, values in attributes:
                        now.update(values)
                    loss = found[0] if isinstance(found, tuple) else found
                    loss.backward()
                return [parameter.grad for parameter in parameters]
            return None
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _others_ahead(self, eager: Program) -> Iterator[_Pass | str]:
        """A second run, and runs with counts far ahead (`Counts.runs`)."""
        counts = Counts(*eager.parts)
        yield self._forward_backward(eager, self.leaves)
        yield from counts.runs(partial(self._forward_backward, eager, self.leaves))

    def _fills(self, eager: Program) -> bool:
        """Whether other rows give the same in a second run as in a first one."""
        count = count_rows(self.specs, self.leaves)
        last_row = self._alone(count - 1, count)
        others = last_row if self.others is None else self._with(self.others())
        with restoring(*eager.parts):
            fresh = self._forward_backward(eager, others)
        with restoring(*eager.parts):
            self._forward_backward(eager, self.leaves)
            return _leaves_out(fresh, self._forward_backward(eager, others))

    def _forward_backward(self, eager: Program, leaves: Mapping[str, Any]) -> _Pass:
        """The calls of torch in a forward, and the gradients of its backward, in which a custom
        Function may read values that forward has changed. Buffers and frozen parameters are put
        back."""
        parameters, found = list(eager.parameters()), []
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            with as_before(*eager.parts), frozen_as_before(self._model):
                with torch.random.fork_rng(devices=[]):
                    calls = second_run.calls_of(
                        lambda: found.append(self._once(eager, leaves)),
                        numbered(parameters),
                    )
                loss = found[0][0] if isinstance(found[0], tuple) else found[0]
                buffers = buffers_of(self._model)
                before = {name: version(buffer) for name, buffer in buffers.items()}
                if loss.requires_grad:
                    loss.backward()
                for name in (n for n, buffer in buffers.items() if version(buffer) != before[n]):
                    raise _written(name)
            return calls, [parameter.grad for parameter in parameters]
        except AutopipeError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise eager.refusal(error) from error
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def _written(name: str) -> CaptureError:
    return CaptureError(
        f"the buffer {name!r} is written in backward, by a hook, a custom Function or a checkpoint "
        "that runs forward again: in a pipeline later micro-batches have read it by then",
        hint="write buffers in forward, outside of checkpoints",
    )


def _same(first: _Pass | str, second: _Pass | str) -> bool:
    if isinstance(first, str) or isinstance(second, str):  # it has failed
        return False
    return first[0] == second[0] and _equal(first[1], second[1])


def _leaves_out(first: _Pass, second: _Pass | str) -> bool:
    """Whether another run gives the same gradients, and makes the same calls or fewer."""
    if isinstance(second, str):
        return False
    return second_run.leaves_out(first[0], second[0]) and _equal(first[1], second[1])


def _equal(first: _Gradients, second: _Gradients) -> bool:
    return all(
        a is b if a is None or b is None else torch.equal(a.to_dense(), b.to_dense())
        for a, b in zip(first, second, strict=True)
    )


def _negated(leaf: Any) -> Any:
    """Negated values of floats; integers stay, since they may be positions in a table."""
    return -leaf if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
