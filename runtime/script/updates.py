"""Refuses updates by a script's optimizer that train something else than plain PyTorch would.

    AdamW(model.parameters())                    of which this rank trains copies
    Muon(pipe.parameters())                      of rows of a matrix, under ZeRO or tp
    nn.utils.clip_grad_norm_(pipe.parameters())  by the norm of a part (`clipping`)
    step, step, step, step, optimizer.step()     of the last one's gradients, which are not added up

They are found where the optimizer begins, but for the first one, which is found before the next
step: another optimizer may have what it lacks.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from autopipe.errors import AutopipeError, ModelError
from autopipe.frontend import measured_optimizer as measured
from autopipe.frontend.optimizer import CUSTOM, ByName, Named
from autopipe.planfile.contents import Plan
from autopipe.runtime.script.again import NoOther, another
from autopipe.runtime.script.clipping import Clipping
from autopipe.runtime.script.drawn import WIDTH as OF_DRAWN
from autopipe.runtime.script.drawn import DrawnNumbers
from autopipe.runtime.script.lent import Untrained
from autopipe.runtime.script.own_numbers import WIDTH, OwnNumbers, Scale, numbers
from autopipe.runtime.script.part_changes import PartChanges, check_rates

NONE, OWN, OF_OTHERS = 0, 1, 2
"""Whether an optimizer has begun a step, and whether one of this rank's parameters."""


@dataclass(frozen=True)
class Since:
    """What a rank has done since the last step, to compare with other ranks'.

    Attributes:
        numbers: `NONE`, `OWN` or `OF_OTHERS`, which may be a rank's without parameters; of
            optimizers of this rank's parameters how many groups of unlike options there were, above
            a hash of them; what it has scaled (`own_numbers`), and written (`drawn`).
        check: compares the last of these, of all ranks.
    """

    numbers: tuple[int, ...] = (0,) * (2 + WIDTH + 2 * OF_DRAWN)
    check: Callable[[Sequence[Sequence[int]]], object] = len  # of a call that is no step


class Updates:
    """Looks at each update of this rank's parameters, for as long as this object lives.

    Args:
        model: the module that was given, or a bare one.
        trained: this rank's parameters, by name.
        clipping: knows whether gradients were scaled.
        untrained: knows what else a loss reads.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        trained: Mapping[str, nn.Parameter],
        clipping: Clipping,
        untrained: Untrained,
    ) -> None:
        self._plan, self._clipping, self._untrained = plan, clipping, untrained
        self._trained = {id(parameter): name for name, parameter in trained.items()}
        self._copied = {
            id(one): name
            for name, one in model.named_parameters()
            if name in trained and trained[name] is not one
        }
        self._shapes = {name: one.shape for name, one in model.named_parameters()}
        self._own, self._weights = dict(trained), PartChanges(clipping.parted, "weight")
        self._stepped: set[int] = set()
        self._own_numbers = OwnNumbers(plan)
        compared = trained if len(plan.mesh.places) > 1 else {}
        self._drawn = DrawnNumbers(compared, clipping.own, parted=plan.parted)
        self._dropped = 0
        self._moved: Scale | None = None
        self._began, self._options = NONE, set[str]()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._unclear: weakref.WeakKeyDictionary[Optimizer, ModelError]
        self._unclear = weakref.WeakKeyDictionary()
        _watch(self)

    def begins(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that begins a step.

        Raises:
            ModelError: it is to train what the graph has as a constant; or torch.amp.GradScaler
                makes it; or its rates go with the shapes of parts; or it changes a parameter by all
                of its gradient, and this rank has a part of it; or gradients were clipped by the
                norm of a part; or there were several steps since the last update.
        """
        given = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._stepped |= given
        self._untrained.check(optimizer)
        if given.isdisjoint(self._trained):
            self._began = self._began or OF_OTHERS
            return
        self._began = OWN
        self._options |= {_described(optimizer, group) for group in optimizer.param_groups}
        if scaler := _scaler():
            raise ModelError(
                f"torch.amp.GradScaler divides gradients by {scaler.get_scale():g} before an "
                "update, and pipe.step has not multiplied the loss by that",
                hint="call optimizer.step() itself; a plan with --precision fp16 scales its loss",
            )
        if self._dropped and self._clipping.are_of_one_step(self._dropped + 1):
            raise ModelError(
                f"an update begins after {self._dropped + 1} steps, and pipe.step keeps the last "
                "one's gradients alone: plain PyTorch would have added them up",
                hint="to accumulate gradients give all rows to one step, of a plan with that "
                "--batch and as many more --micro-batches; pipe.zero_grad() drops a step's",
            )
        if optimizer not in self._known:
            self._known.add(optimizer)
            if self._plan.parted:
                check_rates(optimizer, self._trained, self._shapes)
            if unclear := self._check_kind(optimizer):
                self._unclear[optimizer] = unclear
        self._clipping.check()

    def ends(self, optimizer: Optimizer) -> None:
        """Note the weights that an optimizer has made.

        Raises:
            ModelError: it is not clear what it changes together.
        """
        if optimizer in self._unclear:
            raise self._unclear[optimizer]
        if any(id(one) in self._trained for g in optimizer.param_groups for one in g["params"]):
            self._clipping.used()
            self._weights.note(self._own)
            self._drawn.note()

    def note(self) -> None:
        """Take weights as they are: a step has run, and has noted gradients."""
        self._drawn.note()

    def check(self) -> None:
        """Before a step, look at what optimizers have changed since the last one.

        Raises:
            ModelError: one of the module's is among them, of which this rank trains a copy, and
                the copy is not; or something has changed a weight since by the mean or the norm of
                a part of it.
        """
        self._weights.check(self._own)
        stepped, self._stepped = self._stepped, set()
        updated = {name for one, name in self._trained.items() if one in stepped}
        self._moved = None if updated else self._clipping.moved()
        waits = not updated and self._moved is None and self._clipping.untouched()
        self._dropped = self._dropped + 1 if waits else 0
        for one, name in self._copied.items():
            if one in stepped and name not in updated:
                raise ModelError(
                    f"an optimizer was made of the module's own {name!r}, of which this rank has "
                    "a part or a copy: the step before has not changed that",
                    hint="make it of this rank's parameters: torch.optim.AdamW(pipe.parameters())",
                )

    def since_last_step(self) -> Since:
        """What was done since this was asked last, to compare with other ranks'."""
        began, options = self._began, sorted(self._options)
        self._began, self._options = NONE, set()
        digest = hashlib.blake2b("\n".join(options).encode(), digest_size=4).digest()
        groups = len(options) << 32 | int.from_bytes(digest, "big")
        scaled = numbers(self._clipping.scaled(), self._moved or Scale())
        written = *self._drawn.numbers(), *self._clipping.written()
        return Since((began, groups, *scaled, *written), self._compare)

    def _compare(self, told: Sequence[Sequence[int]]) -> None:
        """Look at what all ranks have scaled and written, by rank."""
        self._own_numbers.check([of_rank[:WIDTH] for of_rank in told])
        self._drawn.check([of_rank[WIDTH : WIDTH + OF_DRAWN] for of_rank in told])
        self._clipping.drawn.check([of_rank[WIDTH + OF_DRAWN :] for of_rank in told])

    def _check_kind(self, optimizer: Optimizer) -> ModelError | None:
        """Refuse one that the plan was not made for, if it needs more than this rank has.

        Returns:
            The refusal of one that cannot be tried, for the end of its step: a step that fails
            itself, as the trial did, says better why.
        """
        kind, plan = type(optimizer), self._plan
        if not plan.parted or (_of_torch(kind) and plan.optimizer.lower() == kind.__name__.lower()):
            return None
        trained = {name: one for name, one in self._own.items() if _has(optimizer, one)}
        try:
            effect = _effect(optimizer, trained)
        except NoOther as error:
            if plan.optimizer == CUSTOM:  # planning has looked at it
                return None
            return ModelError(
                f"{kind.__name__} may change a parameter by more than its own gradient, of which "
                f"this rank has a part, and no second one can be made to look at: {error.message}",
                hint=_planned_for(kind),
            )
        zero = plan.zero_at_work
        split = {"zero": zero, "tp": plan.mesh.tp, "pp": plan.mesh.pp}
        if effect == measured.TENSOR:
            del split["pp"]
        parts = [f"{key}={degree}" for key, degree in split.items() if degree > (key != "zero")]
        if effect == measured.ELEMENT or not parts:
            return None
        does, instead = measured.WORDS[effect]
        raise ModelError(
            f"{kind.__name__} {does}, and the plan has {' and '.join(parts)}: of the part that a "
            "rank has it makes something else",
            hint=f"{_planned_for(kind)}; or take an optimizer that {instead}",
        )


def _scaler() -> torch.amp.GradScaler | None:
    """The scaler in whose step an optimizer's step is, if it scales."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.amp.grad_scaler.__name__:
            found = frame.f_locals.get("self")
            scales = isinstance(found, torch.amp.GradScaler) and found.get_scale() != 1.0
            return found if scales else None
        frame = frame.f_back
    return None


def _of_torch(kind: type[Optimizer]) -> bool:
    return vars(torch.optim).get(kind.__name__) is kind


def _has(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    return any(one is parameter for group in optimizer.param_groups for one in group["params"])


def _planned_for(kind: type[Optimizer]) -> str:
    """The hint for an optimizer of this class that a plan was not made for."""
    name = kind.__name__
    written = repr(name) if _of_torch(kind) else f"lambda parameters: {name}(parameters, ...)"
    return f"plan for it: autopipe.plan(..., optimizer={written})"


def _described(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """An optimizer and its numbers for a group of parameters; not those that are tensors."""
    numbers = {key: value for key, value in group.items() if isinstance(value, float | tuple)}
    return f"{type(optimizer).__name__} {sorted(numbers.items())}"


def _effect(optimizer: Optimizer, trained: Mapping[str, nn.Parameter]) -> str:
    """What an optimizer changes together, found by steps of others like it.

    Args:
        trained: this rank's parameters that it has.

    Raises:
        NoOther: no other can be made that makes steps.
    """
    kind = type(optimizer)
    closure = signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        return measured.MODEL  # it searches along a line, as LBFGS does
    if _of_torch(kind):
        return measured.named_apart(kind.__name__)

    def again(named: Iterable[Named]) -> Optimizer:
        return another(optimizer, {id(trained[name]): one for name, one in named})

    like = measured.measured_on(trained.items())
    if not like:
        return measured.ELEMENT
    try:
        return measured.stepped_apart(ByName(again), like)
    except AutopipeError as why:
        try:
            return measured.stepped_apart(lambda given: kind(given, **optimizer.defaults), like)
        except AutopipeError:
            raise NoOther(why.message) from why


_WATCHING: weakref.WeakSet[Updates] = weakref.WeakSet()


class _Hook:
    """Tells each living `Updates` of each optimizer that begins a step, or ends one.

    Torch keeps it for the life of the process. If it were removed when a pipe is collected, that
    could happen while torch goes through its hooks, which is an error.
    """

    changes_nothing = True  # read where optimizers are measured (`frontend.measured_optimizer`)

    def __init__(self, *, ends: bool) -> None:
        self._ends = ends

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        for updates in list(_WATCHING):
            if self._ends:
                updates.ends(optimizer)
            else:
                updates.begins(optimizer)


@cache
def _hooked() -> bool:
    """Set the hooks, once."""
    register_optimizer_step_pre_hook(_Hook(ends=False))
    register_optimizer_step_post_hook(_Hook(ends=True))
    return True


def _watch(updates: Updates) -> None:
    """Tell it of optimizers for as long as it lives."""
    _WATCHING.add(updates)
    _hooked()
