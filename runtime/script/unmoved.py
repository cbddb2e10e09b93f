"""Refuse a step if other code has changed a value that the model reads and its graph contains.

`model.tau = 0.5` in a script's loop, or `ANNEAL["beta"] = step / 1_000` in `batches`, is a Python
number: plain PyTorch reads it in each step, while a graph has its value at the time of the trace.
Another trace shows whether the value is in the graph.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend.loss import Loss
from autopipe.frontend.user_module import OF_FILES
from autopipe.ir.fingerprint import fingerprint, first_difference
from autopipe.ir.graph import Graph
from autopipe.planfile.contents import Plan
from autopipe.runtime.script.between import Between, MovedValue
from autopipe.runtime.script.clipping import Clipping
from autopipe.runtime.script.copied import Copied, copies_of
from autopipe.runtime.script.gradient_hooks import GradientHooks
from autopipe.runtime.script.lent import Lent, Untrained
from autopipe.runtime.script.moved_frozen import MovedFrozen
from autopipe.runtime.script.stale import Stale
from autopipe.runtime.script.switched import Switched
from autopipe.runtime.script.updates import Since, Updates
from autopipe.tracing.source import Source, bare, trace_as_planned
from autopipe.util import seeding
from autopipe.util.stopwatch import Stopwatch

SECONDS, SHARE = 5.0, 0.02
"""Traces to look for changes may take so long, or this share of the run so far."""


class Unmoved:
    """Checks the values that a model reads before each step; changes by steps themselves are fine.

    Args:
        model: the model as the user has given it.
        skeleton: the model without values.
        example: the rows that it was traced with.
        held: the tensors that the rank reads, by name.
        trained: what its optimizer is to update, by name.
        clipping: the rank's.
        graph: what the model was traced to.
        speaks: whether this rank says what is not refused.
    """

    def __init__(
        self,
        model: Source,
        skeleton: nn.Module,
        example: Any,
        loss: Loss | None,
        plan: Plan,
        held: Mapping[str, Tensor],
        trained: Mapping[str, nn.Parameter],
        clipping: Clipping,
        graph: Graph,
        *,
        speaks: bool = True,
    ) -> None:
        self._model, self._skeleton, self._example = model, skeleton, example
        self._loss, self._plan = loss, plan
        self._looked_at = model if isinstance(model, nn.Module) else skeleton
        self._moves: Counter[str] = Counter()
        self._passed: Counter[str] = Counter()
        self._told, self._speaks = set[str](), speaks
        self._watch, self._began = Stopwatch(), time.perf_counter()
        built = not isinstance(model, nn.Module)
        losses = [loss] if loss is not None else []
        self._between = Between(self._looked_at, *losses, built=built)
        self._copied = Copied(self._between.models, held)
        self._frozen = MovedFrozen(self._between.models, parts=plan.parted, trained=trained)
        self._lent = Lent(self._between.others, graph.constants, held, parts=plan.parted)
        self._updates = Updates(plan, self._looked_at, trained, clipping, Untrained(graph))
        self._hooks = GradientHooks(plan, self._looked_at, held, trained)
        self._stale: Stale | None = None
        if isinstance(model, nn.Module) and (plan.parted or copies_of(model, held)):
            self._stale = Stale(model, _left_behind(model, held))
        # Last: this rank's own hooks are none that a script has set.
        self._switched = Switched(self._between.watched, self._between.names)

    @contextmanager
    def step(self, resumed: bool) -> Iterator[Since]:
        """Within, a step runs; values are checked before it. Gives `Updates.since_last_step`.

        Args:
            resumed: whether a checkpoint was loaded since the step before, which may have changed
                tensors that forward writes.

        Raises:
            ModelError: a value that the graph contains has changed, or a module was switched to
                evaluation, swapped or hooked; a buffer was replaced, a weight
                was written of which this rank trains a copy, or a frozen one; or a parameter is
                trained that was frozen; names it. Or weights that the loss reads of another model
                were replaced (`Lent.check`). Or an optimizer was made of the module's own
                parameters, and not of this rank's; or a hook on a gradient would not be called.
        """
        if resumed:
            self._note()
        for moved in self._between.moved_buffers():
            raise _of_buffer(moved)
        if (written := self._copied.written()) is not None:
            name, copied = written
            raise _of_copy(name, copied=copied)
        self._frozen.check()
        self._lent.check()
        self._hooks.check()
        self._updates.check()
        self._switched.check()
        for moved in (*self._switched.moved(), *self._between.moved()):
            self._moves[moved.name] += 1
            if self._is_due(self._moves[moved.name]):
                self._check(moved)
            else:
                self._pass_over(moved)
        yield self._updates.since_last_step()
        self._note()

    def _note(self) -> None:
        """Take the present values as unchanged."""
        self._between.moved()
        self._between.moved_buffers()
        self._copied.note()
        self._frozen.note()
        self._lent.note()
        self._updates.note()
        if self._stale is not None:
            self._stale.note()

    def _check(self, moved: MovedValue) -> None:
        with self._watch("traced"):
            first = self._again(moved.model)
        passed = self._passed.pop(moved.name, 0)
        if first is None:
            return
        before = f"the {passed} steps" if passed > 1 else "the step"
        trained = f", and {before} before, for which nobody looked, may have trained on it"
        raise ModelError(
            f"{moved.name.removeprefix(OF_FILES)!r} is another value than when the model was "
            "traced: batches, a scheduler, an optimizer or a script's loop has changed it, and the "
            f"graph has the old one{trained if passed else ''}. First difference: {first}",
            hint=moved.hint,
        )

    def _pass_over(self, moved: MovedValue) -> None:
        """Say, once, that a value has changed and no trace looks whether the graph has it."""
        self._passed[moved.name] += 1
        if moved.name in self._told or not self._speaks:
            return
        self._told.add(moved.name)
        moves = self._moves[moved.name]
        warnings.warn(
            f"autopipe: {moved.name.removeprefix(OF_FILES)!r} has changed {moves} times, and to "
            "see whether a step would need its new value takes another trace each time. These "
            f"have taken {self._watch.seconds['traced']:.1f} s: from now on the next one is at "
            f"change {1 << moves.bit_length()}, or once all of them are below {SHARE:.0%} of the "
            f"run. Until then a step may train on an old value. hint: {moved.hint}",
            stacklevel=2,
        )

    def _is_due(self, moves: int) -> bool:
        """Whether to trace for a value that has changed so many times.

        A count that nobody looks at yet would be traced for in every step. So it is traced for at
        its 1st, 2nd, 4th ... change, and whenever all such traces together have taken little.
        """
        so_far = time.perf_counter() - self._began
        spent = self._watch.seconds["traced"]
        return moves.bit_count() == 1 or spent < max(SECONDS, SHARE * so_far)

    def _again(self, kept: nn.Module | None) -> str | None:
        """The first difference of a new trace's graph from the old one; None: there is none.

        Args:
            kept: a model of the user's file that has the value.
        """
        model = kept if kept is not None else self._model
        skeleton = bare(model) if isinstance(model, nn.Module) else self._skeleton
        with torch.random.fork_rng(devices=[]), seeding.at(seeding.places()):
            try:
                trace = trace_as_planned(model, skeleton, self._example, self._loss, self._plan)
            except ModelError as error:
                return error.message
        if fingerprint(trace.graph) == self._plan.fingerprint:
            return None
        return first_difference(trace.graph, self._plan.trail)


def _left_behind(model: nn.Module, held: Mapping[str, Tensor]) -> list[str]:
    """The trained parameters of a module that this rank holds others of, or none."""
    here = {id(tensor) for tensor in held.values()}
    named = model.named_parameters()
    return [name for name, one in named if one.requires_grad and id(one) not in here]


def _of_buffer(moved: MovedValue) -> ModelError:
    """The error for a buffer that other code has changed between two steps."""
    if moved.model is None:
        return ModelError(
            f"the buffer {moved.name!r} is another tensor than in the step before, and ranks read "
            "the one that it was",
            hint="write it where it is: model.get_buffer(name).copy_(value)",
        )
    return ModelError(
        f"the buffer {moved.name!r} was written in a model that the file keeps; a run trains "
        "another one, which model() has built for it",
        hint="give what changes from step to step in the batch, or let forward write the buffer",
    )


def _of_copy(name: str, *, copied: bool) -> ModelError:
    """The error for a weight that something between two steps has changed, and no run reads."""
    if not copied:
        return ModelError(
            f"{name!r} is another tensor than in the step before, and this rank trains the one "
            "that it was",
            hint="write it where it is: model.get_parameter(name).data.copy_(value)",
        )
    return ModelError(
        f"{name!r} was written in the module itself between two steps, and this rank trains a copy "
        "of it: a part, in another dtype, or on another device",
        hint="write what pipe.named_parameters() gives, as an optimizer does, or give all values "
        "of another module: pipe.load_state_dict(other.state_dict()); to load what was trained, "
        "take copy.deepcopy(model)",
    )
