"""A model and its loss as one module, which is run to be looked at, and exported.

Program        the model, the batch, the loss; its forward takes the batch's tensors
.regions       calls that are ops of the trace
.found         what runs of it have found out (`Findings`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopipe.batch.arguments import forward_arguments
from autopipe.batch.tree import flatten, rebuild
from autopipe.eager import assigned_buffers, refused_effects, refused_modes
from autopipe.eager.holders import Part
from autopipe.eager.kept import left_by
from autopipe.eager.registered import AsRegistered, copies_are_values, leaving_modules_alone
from autopipe.errors import CaptureError
from autopipe.frontend import refusals, user_lines
from autopipe.frontend.construct import off_gpus, still_real
from autopipe.frontend.loss import Loss, SumCount, outputs_to_loss, plain_tree
from autopipe.frontend.transformers_adapter import EXPANDS, without_cache
from autopipe.ir.tensors import attributes_of
from autopipe.ir.torch_patches import (
    averaging_by_tensors,
    counting_rows,
    inference_without_gradients,
    not_compiling,
    one_process,
    seeing_questions,
)
from autopipe.ir.torch_private import expression
from autopipe.opaque import branches, packed, scripted
from autopipe.opaque.calls.sites import with_loss
from autopipe.opaque.regions import Running, as_ops
from autopipe.planfile.parts import InputSpec
from autopipe.planfile.regions import LOSS
from autopipe.rewriting import flex_attention
from autopipe.rewriting.extremes import chosen_by_tensors
from autopipe.rewriting.gpu_autocast import of_absent_gpus
from autopipe.tracing.capture import einsum_paths
from autopipe.tracing.capture.caught_errors import raised_at_the_end
from autopipe.tracing.capture.low_precision import SixteenBits, buffers_in, cast
from autopipe.util import dims, dtypes


@dataclass
class Findings:
    """What the runs of a program have found out about its model; each run adds some.

    Attributes:
        paths: the paths of the model's outputs.
        assigned: pairs of a buffer that the model assigns and the module in whose call it does so.
        by_loss: the same for a loss that is a module.
        caches: the buffers that the model fills in its first run (`eager.assigned_buffers`).
        unsteady: the plain attributes and caches that make a second run differ from the first.
        drawn_once: the functions by which the first run alone draws random numbers.
        left: the names of values that each run leaves in Python.
        asks_for_others: whether the model has asked for other processes, in the last run of it.
        asks_for_gpus: the user's lines that have asked whether a tensor is on a GPU.
        asks_for_one_row: the user's lines that have asked whether there is one row.
        otherwise: the error if later runs read other values than the first; else None.
        later: the words for a read that gives another value after many calls, or "".
        refuses_later: whether such a read is refused, so that its call may run as it is.
        held_twice: whether forward reads parameters from unregistered places too.
    """

    held_twice: bool
    paths: tuple[str, ...] = ()
    assigned: set[tuple[str, str]] = field(default_factory=set)
    by_loss: set[tuple[str, str]] = field(default_factory=set)
    caches: set[str] = field(default_factory=set)
    unsteady: tuple[str, ...] = ()
    drawn_once: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    asks_for_others: bool = False
    asks_for_gpus: set[str] = field(default_factory=set)
    asks_for_one_row: set[str] = field(default_factory=set)
    otherwise: CaptureError | None = None
    later: str = ""
    refuses_later: bool = True

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of pairs in `assigned` and in `by_loss`, which grow as runs find some."""
        return len(self.assigned), len(self.by_loss)


class Program(nn.Module):
    """The model and its loss as one module; its forward takes the batch's tensors in flat order.

    Args:
        outputs: whether forward also returns the tensors of the model's outputs, after the loss.
        kept: the 16-bit dtype in which the model computes; None: as its parameters are.
        eager: whether it runs as plain torch does; assignments of buffers then stay assignments.
        training: whether the model is in training mode.
        twins: modules whose tensors stand for the model's own where the loss reads them.
        lines_may_fix_rows: whether lines that fix the number of rows may run as they are.

    Attributes:
        regions: the calls that are ops of a trace (`opaque.regions`); set before a trace.
        found: what its runs have found out.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss: Loss | None,
        specs: Sequence[InputSpec],
        *,
        outputs: bool = False,
        kept: SixteenBits | None = None,
        eager: bool = False,
        training: bool = True,
        twins: tuple[nn.Module, ...] = (),
        lines_may_fix_rows: bool = False,
    ) -> None:
        super().__init__()
        self.training = training  # of the program alone: the model is set by who traces it
        self._eager = eager
        self.model = model
        self.kept = kept
        self._given_twins = self.twins = twins
        self.regions: tuple[Running, ...] = ()
        self.lines_may_fix_rows = lines_may_fix_rows
        self._still_real = still_real(model)
        # One object, which runs change: export undoes what a run sets in a module.
        self.found = Findings(held_twice=bool(self._still_real))
        self._registered = dict(model.named_parameters())
        self.specs = specs
        self.batch = batch
        self._with_outputs = outputs
        self.loss = loss
        self._fixed = {spec.path: spec.value for spec in specs if spec.dtype == "python"}
        self._tensors = [spec for spec in specs if spec.dtype != "python"]
        states = ((name, tensor, attributes_of(tensor)) for name, tensor in _states(model))
        self._attributes = {name: (tensor, set_) for name, tensor, set_ in states if set_}

    def anew(self, kept: SixteenBits | None) -> Program:
        """The program in other dtypes, without regions and without findings."""
        return Program(
            self.model,
            self.batch,
            self.loss,
            self.specs,
            outputs=self._with_outputs,
            kept=kept,
            training=self.training,
            twins=self._given_twins,
            lines_may_fix_rows=self.lines_may_fix_rows,
        )

    def forward(self, *tensors: Tensor) -> Any:
        for name, tensor in _states(self.model) if self._attributes else ():
            known, attributes = self._attributes.get(name, (tensor, {}))
            if known is not tensor:  # export's own in its place
                vars(tensor).update(attributes)
        given = {s.path: tensor for s, tensor in zip(self._tensors, tensors, strict=True)}
        batch = rebuild(self.batch, self._fixed | given)
        args, kwargs = forward_arguments(self.model, batch, self.loss)
        if self._eager:
            with self._either_way():
                return self._results(batch, args, kwargs)
        rows = self._rows(tensors)
        with (
            self._either_way(),
            as_ops(self.model, self.regions, rows),
            seeing_questions(partial(self._asked, rows)),
            leaving_modules_alone(),
            averaging_by_tensors(),
            copies_are_values(),
            counting_rows(),
            chosen_by_tensors(),
            einsum_paths.of_the_example(),
            inference_without_gradients(),
            of_absent_gpus(),
            refused_effects.RefusedCalls(),
            refused_modes.refused(),
            branches.as_ops(self.model),
            packed.as_ops(),
            scripted.functions_op_by_op(),
            self._as_registered() if self.found.held_twice else nullcontext(),
        ):
            try:
                with raised_at_the_end():
                    return self._results(batch, args, kwargs)
            except GuardOnDataDependentSymNode as error:  # export would print its graph for it
                raise refusals.takes_a_number(user_lines.of_error(error)) from error

    @contextmanager
    def _either_way(self) -> Iterator[None]:
        """Within, what traces and eager runs share holds."""
        loss = with_loss(self.model, self.loss)
        with loss, one_process() as asked, not_compiling(), flex_attention.written_out():
            try:
                yield
            finally:
                self.found.asks_for_others = bool(asked)

    def _asked(self, rows: Any, question: torch.SymBool, answer: bool, frame: FrameType) -> None:
        """Note the line of a question about the rows whose answer is another one for one row."""
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == EXPANDS:
            return
        asked = expression(question)
        symbols = expression(rows).free_symbols if isinstance(rows, torch.SymInt) else set()
        if not symbols or asked.free_symbols != symbols:
            return
        try:
            same = bool(asked.subs(dict.fromkeys(symbols, 1))) == answer
        except ZeroDivisionError:  # `1 / (b - 1) < 5`
            same = False
        if not same:
            self.found.asks_for_one_row.add(user_lines.here(alone=True))

    def _as_registered(self) -> AsRegistered:
        return AsRegistered(self.model, self._registered, self._still_real)

    def _results(self, batch: Any, args: Any, kwargs: Any) -> Any:
        if self.kept is not None:
            args, kwargs = cast((args, kwargs), torch.float32, self.kept.dtype)
        low = buffers_in(self.model, self.kept)
        with without_cache(self.model), off_gpus(), self._buffers_written(), low:
            outputs = self.model(*args, **kwargs)
        if self.kept is not None and self.loss is not None:
            outputs = cast(outputs, self.kept.dtype, torch.float32)
        left = left_by(self.model, self.twins if self.loss is not None else ())
        with left, off_gpus(), self._buffers_written_by_loss():
            loss = outputs_to_loss(outputs, batch, vars(self.model).get(LOSS), self.model)
        found = tuple(loss) if isinstance(loss, SumCount) else (loss,)
        if self._with_outputs:
            leaves = flatten(plain_tree(outputs))
            given = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
            self.found.paths = tuple(given)
            found += tuple(given.values())
        return found if len(found) > 1 else loss

    def _rows(self, tensors: Sequence[Tensor]) -> Any:
        """The rows of a batch: an integer, or export's symbol, one of all tensors from here on."""
        rows = None
        for spec, tensor in zip(self._tensors, tensors, strict=True):
            if spec.batch_dim is not None:
                factor, _ = sympy.sympify(dims.parse(spec.shape[spec.batch_dim])).as_coeff_Mul()
                size = tensor.shape[spec.batch_dim]
                rows = size // int(factor) if rows is None else rows
                assert size == rows * int(factor)
        return 1 if rows is None else rows

    @property
    def parts(self) -> tuple[Part, ...]:
        """The model, and the loss if there is one."""
        return (self.model,) if self.loss is None else (self.model, self.loss)

    @contextmanager
    def _buffers_written(self) -> Iterator[None]:
        if self._eager:
            yield
            return
        found = self.found
        with assigned_buffers.written(self.model, dict(sorted(found.assigned))) as writes:
            yield
        found.assigned |= {*writes.states.items()}
        found.caches |= writes.caches

    @contextmanager
    def _buffers_written_by_loss(self) -> Iterator[None]:
        if self._eager or not isinstance(self.loss, nn.Module):
            yield
            return
        found = self.found
        with assigned_buffers.written(self.loss, dict(sorted(found.by_loss))) as writes:
            yield
        found.by_loss |= {*writes.states.items()}
        found.caches |= {f"loss.{name}" for name in writes.caches}

    def refusal(self, error: Exception) -> CaptureError:
        """The `CaptureError` or `ModelError` for an error that a run of the model raised."""
        entries = ", ".join([*self._fixed, *(spec.path for spec in self._tensors)])
        low = dtypes.name_of(self.kept.dtype) if self.kept is not None else ""
        return refusals.of_its_own(error, self.loss, entries, low)


def _states(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
