"""Find equal modules while the model runs once, so that one trace serves all of them.

Two sibling modules are alike if all of this holds; any doubt makes a module like no other.

    before the run   the same classes, parameters, buffers, training flags and submodules inside,
                     no hooks, nor any that forward adds; nothing of it shared with the rest
    at the call      arguments that look the same, the same plain values of globals and of class
                     attributes around the code
    while it runs    the same calls of torch functions in the same order, on tensors that came from
                     the same places, with the same numbers and the same looks of results; the same
                     values of the attributes it reads (`layer_idx` may differ if nobody asks)
    after the call   results from the same calls; no attribute, argument, parameter or buffer
                     changed, no result in the memory of an argument, no value read from a tensor

Both modules have the same code, since they have the same classes. The code has seen the same
values, so it has taken the same branches. Sizes are those of the example; a formula of sizes is the
same for both modules, since its inputs are: code, shapes of arguments and parameters, attributes.

For the same reason not every sibling has to run. Once two siblings were alike, a third one that
finds the same arguments, globals and attributes is skipped: it does not run, and returns tensors
that look like theirs. So a deep model takes the time of a short one. Siblings 1, 2, 4, 8 ... and
the last one always run; in a later run of the model the first two and the last. If one of these
turns out unlike a sibling that began as it did (a layer that asks an iterator), the skipped ones
may be unlike too, and the model runs again without skipping any.

What a module leaves behind for code around it (`LOSSES.append(h)`, in whatever place) is in none of
these logs. So the model runs once more with all but the first sibling skipped, as it will be
exported: if the calls around the siblings are others then (a sum of fewer losses), none are alike.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from autopipe.eager.frozen import INTERNAL
from autopipe.errors import OtherCalls
from autopipe.ir.torch_patches import watching_attributes
from autopipe.ir.torch_private import no_function_modes
from autopipe.planfile.parts import Read
from autopipe.tracing.capture.module_makes import (
    alike_siblings,
    attached_to,
    candidates_of,
    siblings_among,
)
from autopipe.tracing.looks import Within
from autopipe.tracing.module_calls import CallsAroundCandidates, ModuleCall
from autopipe.util import shortcuts

Looked = TypeVar("Looked")


class Likeness:
    """Compares the calls of siblings during a run, and has the result after it.

    Args:
        skip: whether siblings may be skipped.
        later: whether the model has been looked at before, so that fewer siblings have to run.

    Attributes:
        alike: the path of a module -> that of the first sibling that it equals.
        candidates: the modules that are compared, by path, each with its make.
        wrongly_skipped: whether a sibling may have been skipped wrongly: do not use `alike` then.
        skipped: how many calls were skipped.
        around: the calls of torch functions, in candidates and around them.
    """

    def __init__(self, model: nn.Module, *, skip: bool = True, later: bool = False) -> None:
        self.alike: dict[str, str] = {}
        self.wrongly_skipped = False
        self.running: ModuleCall | None = None
        self.candidates = candidates_of(model) if shortcuts.on("same modules") else {}
        self._owners = {
            id(inner): path
            for path, (module, _) in self.candidates.items()
            for inner in module.modules()
            if inner is not module
        }
        self._calls: dict[str, list[Hashable]] = defaultdict(list)
        self._skip = skip
        self._later = later
        self.skipped = 0
        paths = {id(module): path for path, (module, _) in self.candidates.items()}
        self.around = CallsAroundCandidates(paths, lambda: self.running)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the model runs, once."""
        if not self.candidates:
            yield
            return
        with ExitStack() as until:
            until.callback(register_module_forward_pre_hook(self._called).remove)
            for siblings in siblings_among(self.candidates):
                kinds: list[ModuleCall] = []
                for number, path in enumerate(siblings):
                    module, _ = self.candidates[path]
                    must_run = number in (0, 1, len(siblings) - 1)
                    must_run |= not self._later and number & (number - 1) == 0
                    module.forward = self._forward(path, module, kinds, must_run)
                    until.callback(delattr, module, "forward")
                    attached: list[int] = []
                    begin, end = self._begin(path, attached), self._end(path, kinds, attached)
                    before = module.register_forward_pre_hook(begin, with_kwargs=True)
                    after = module.register_forward_hook(end, with_kwargs=True)
                    until.callback(before.remove)
                    until.callback(after.remove)
                    attached.append(attached_to(module))
            until.enter_context(self._watching_attributes())
            until.enter_context(self.around)
            yield
        self.alike = alike_siblings(
            {
                path: (make, *self._calls[path])
                for path, (_, make) in self.candidates.items()
                if len(self._calls[path]) == 1
            }
        )

    def _begin(self, path: str, attached: list[int]) -> Callable[..., None]:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.running is not None:  # one candidate runs another
                self.running.doubt()
                self._calls[path].append(object())
                return
            as_before = attached == [attached_to(module)]
            with no_function_modes():  # looking at values here is no call of the model's
                self.running = ModuleCall(module, (args, kwargs))
            if not as_before:  # forward has added a hook, which may collect what blocks make
                self.running.doubt()

        return begin

    def _end(self, path: str, kinds: list[ModuleCall], attached: list[int]) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self.running
            if call is None or call.module is not module:
                return
            self.running = None
            if attached != [attached_to(module)]:
                call.doubt()
            with no_function_modes():
                done = call.finish(output)
                self.around.returned(path, output)
            self._calls[path].append(done)
            known = next((kind for kind in kinds if kind.done == done), None)
            if known is not None:
                known.proved = True
            elif call.tree is not None:
                kinds.append(call)
            if self._skip and call.likely and known not in call.likely:
                self._skip = False
                self.wrongly_skipped = self.skipped > 0

        return end

    def _forward(
        self, path: str, module: nn.Module, kinds: list[ModuleCall], must_run: bool
    ) -> Callable[..., Any]:
        """A forward for a module: it is skipped if it can be, unless it `must_run`."""
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call, self.running = self.running, None  # reads of attributes here are not the module's
            if self._skip and call is not None and call.module is module:
                with no_function_modes():
                    likely = self._likely(path, call, kinds, must_run)
                    results = likely.results_like() if likely is not None else None
                if likely is not None and results is not None:
                    self.skipped += 1
                    self.running = call
                    return call.take_over(likely, results)
            self.running = call
            return original(*args, **kwargs)

        return forward

    def _likely(
        self, path: str, call: ModuleCall, kinds: Sequence[ModuleCall], must_run: bool
    ) -> ModuleCall | None:
        """The sibling's call whose results a module's call is to return; None: it is to run."""
        call.likely = [kind for kind in kinds if call.begins_like(kind)]
        only = call.likely[0] if len(call.likely) == 1 and not must_run else None
        return only if only is not None and only.proved else None

    def _called(self, module: nn.Module, args: Any) -> None:
        """Note a module's call; in a candidate it has to be inside the candidate's own call."""
        owner = self._owners.get(id(module))
        if owner is not None:
            call = self.running
            if call is None or call.module is not self.candidates[owner][0]:
                self._calls[owner].append(object())

    @contextmanager
    def _watching_attributes(self) -> Iterator[None]:
        get, change, remove = (
            nn.Module.__getattribute__,
            nn.Module.__setattr__,
            nn.Module.__delattr__,
        )

        def reading(module: nn.Module, name: str) -> Any:
            call = self.running
            if call is not None and name not in INTERNAL:
                call.reads(module, get(module, "__dict__"), name, sys._getframe(1).f_globals)
            return get(module, name)

        def changing(module: nn.Module, name: str, value: Any) -> None:
            if self.running is not None:
                self.running.doubt()
            change(module, name, value)

        def removing(module: nn.Module, name: str) -> None:
            if self.running is not None:
                self.running.doubt()
            remove(module, name)

        with watching_attributes(reading, changing, removing):
            yield


class _StandIns(Likeness):
    """As `Likeness`, of a run in which modules that are alike are skipped but for the first.

    Args:
        alike: of the modules that are skipped, as `Likeness.alike`.
    """

    def __init__(self, model: nn.Module, alike: Mapping[str, str]) -> None:
        super().__init__(model)
        self._first = {path: model.get_submodule(first) for path, first in alike.items()}

    def _likely(
        self, path: str, call: ModuleCall, kinds: Sequence[ModuleCall], must_run: bool
    ) -> ModuleCall | None:
        first = self._first.get(path)
        call.likely = [kind for kind in kinds if kind.module is first]
        return call.likely[0] if call.likely else None


Glance = Callable[[Within], Sequence[Read]]
"""Runs the model once; takes what makes the `with` block of the run; returns what Python reads."""


def with_alike(
    model: nn.Module, looked: Callable[[Within], Looked], glanced: Glance
) -> tuple[Looked, Mapping[str, str]]:
    """The result of a look at a model, and the modules that are alike in the look's first run.

    If a sibling may have been skipped wrongly, the look is made again without skipping any.

    Args:
        looked: looks at the model; takes what makes the `with` block of each run of it.
    """
    for skip in (True, False):
        try:
            result, likeness = _looked(model, looked, skip=skip)
        except OtherCalls:
            if skip and _differs_again(model, looked):
                continue
            raise
        if likeness.wrongly_skipped:
            continue
        if _same_around(model, likeness, glanced) or _same_in_glances(model, likeness, glanced):
            return result, likeness.alike
        if not likeness.skipped:
            break
    return result, {}


def _differs_again(model: nn.Module, looked: Callable[[Within], object]) -> bool:
    """Whether a look finds other calls in its second run once more, as where siblings are skipped
    in one run and not in another: a number that moves on by itself makes them differ once."""
    try:
        _looked(model, looked, skip=True)
    except OtherCalls:
        return True
    return False


def alike_if_read(model: nn.Module, glanced: Glance, reads: Sequence[Read]) -> Mapping[str, str]:
    """The modules that are alike in one run; none if Python reads other values in it.

    Args:
        reads: the values that Python read when the model was planned.
    """
    for skip in (True, False):
        likeness = Likeness(model, skip=skip)
        if not likeness.candidates:
            break
        try:
            found = glanced(likeness.watching)
        except Exception:  # whatever the user's model raises: the trace that follows says it
            break
        if [*map(_answer, found)] != [*map(_answer, reads)]:
            break
        if not likeness.wrongly_skipped:
            return likeness.alike if _same_around(model, likeness, glanced) else {}
    return {}


def _same_around(model: nn.Module, likeness: Likeness, glanced: Glance) -> bool:
    """Whether the calls around modules that are alike stay the same if these are skipped."""
    if not likeness.alike:
        return True
    short = _StandIns(model, likeness.alike)
    try:
        glanced(short.watching)
    except Exception:  # the model's code misses what the skipped modules leave behind
        return False
    return likeness.around.of_others(likeness.alike) == short.around.of_others(())


def _same_in_glances(model: nn.Module, likeness: Likeness, glanced: Glance) -> bool:
    """As `_same_around`, of a run that is no first one: that may fill caches, and find buffers."""
    later = Likeness(model)
    try:
        glanced(later.watching)
    except Exception:  # as above
        return False
    same = later.alike == likeness.alike and not later.wrongly_skipped
    return same and _same_around(model, later, glanced)


def _answer(read: Read) -> tuple[str, str]:
    """A read's kind and, if it is checked, its value as text, in which nan equals nan."""
    return read.kind, repr(read.value) if read.checked else ""


def _looked(
    model: nn.Module, looked: Callable[[Within], Looked], *, skip: bool
) -> tuple[Looked, Likeness]:
    """The result of a look, and the likenesses that its first run has found."""
    runs: list[Likeness] = []  # the first run, and a second one that is compared with it

    def within() -> AbstractContextManager[None]:
        runs.append(Likeness(model, skip=skip, later=bool(runs)))
        return runs[-1].watching()

    return looked(within), runs[0]
