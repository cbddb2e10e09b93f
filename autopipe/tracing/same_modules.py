"""Which module calls do the same: found while the model runs once, so that one trace serves all.

Two sibling modules are alike if all of this holds; any doubt makes a module like no other.

    before the run   the same classes, parameters, buffers, training flags and submodules inside,
                     no hooks, nothing of it shared with the rest of the model
    at the call      arguments that look the same, the same plain values of globals and of class
                     attributes around the code
    while it runs    the same calls of torch functions in the same order, on tensors that came from
                     the same places, with the same numbers and the same looks of results; the same
                     values of the attributes it reads (`layer_idx` may differ if nobody asks)
    after the call   results from the same calls; no attribute, argument, parameter or buffer
                     changed, no result in the memory of an argument, no value read from a tensor

The code of both is the same, for their classes are; it has seen the same values, so it has taken
the same branches. Sizes are those of the example. A formula of sizes is the same for both, since
all that goes into it is: the code, the shapes of arguments and parameters, attributes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from autopipe.ir.torch_patches import watching_attributes
from autopipe.ir.torch_private import storage_key, version
from autopipe.tracing.module_makes import (
    FIXED,
    INTERNAL,
    VALUES,
    alike_siblings,
    attributes_of,
    candidates_of,
    distinct_tensors,
    frozen,
    look_of,
    modes,
    namespaces_of,
    plain_values,
)
from autopipe.util import shortcuts


class Doubt(Exception):
    """Something that cannot be compared; the module is like no other."""


class Likeness:
    """The proof in the making, and when the run is over its result.

    Attributes:
        alike: from the path of a module to that of the first of its siblings that it is like.
        candidates: the modules that may be, by path, each with what it is made of.
    """

    def __init__(self, model: nn.Module) -> None:
        self.alike: dict[str, str] = {}
        self.running: _Call | None = None
        self.candidates = candidates_of(model) if shortcuts.on("same modules") else {}
        self._owners = {
            id(inner): path
            for path, (module, _) in self.candidates.items()
            for inner in module.modules()
            if inner is not module
        }
        self._calls: dict[str, list[Hashable]] = defaultdict(list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The model runs in here, once."""
        if not self.candidates:
            yield
            return
        with ExitStack() as until:
            until.callback(register_module_forward_pre_hook(self._called).remove)
            for path, (module, _) in self.candidates.items():
                begin, end = self._begin(path, module), self._end(path)
                before = module.register_forward_pre_hook(begin, with_kwargs=True)
                after = module.register_forward_hook(end, with_kwargs=True)
                until.callback(before.remove)
                until.callback(after.remove)
            until.enter_context(self._watching_attributes())
            until.enter_context(_Log(self))
            yield
        self.alike = alike_siblings(
            {
                path: (make, *self._calls[path])
                for path, (_, make) in self.candidates.items()
                if len(self._calls[path]) == 1
            }
        )

    def _begin(self, path: str, module: nn.Module) -> Callable[..., None]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self.running is not None:  # one candidate runs another
                self.running.doubt()
                self._calls[path].append(object())
                return
            self.running = _Call(module, (args, kwargs))

        return begin

    def _end(self, path: str) -> Callable[..., None]:
        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self.running
            if call is not None and call.module is module:
                self.running = None
                self._calls[path].append(call.finish(output))

        return end

    def _called(self, module: nn.Module, args: Any) -> None:
        """A module runs; one inside a candidate must do so inside the candidate's call."""
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


class _Call:
    """One call of a candidate: what it has seen and done so far, in terms that two can share."""

    def __init__(self, module: nn.Module, args: Any) -> None:
        self.module = module
        self._log: list[Hashable] = []
        self._doubtful = False
        self._held: list[Tensor] = []  # a tensor that is gone would lend its id to another
        self._labels: dict[int, Hashable] = {}
        self._paths = {id(inner): path for path, inner in module.named_modules()}
        self._spaces = namespaces_of(module)
        own: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
        for name, tensor in own:
            self._hold(tensor, ("own", name))
        mine = {storage_key(tensor) for _, tensor in own}
        self._log.append(self._attempt(lambda: self._arguments(args, mine)))
        self._outside = mine | {storage_key(tensor) for tensor in self._held}
        self._versions = [version(tensor) for tensor in self._held]
        self._known = len(self._held)
        self._before = self._attempt(self._surroundings)
        self._log.append(self._attempt(lambda: plain_values(self._spaces)))

    def doubt(self) -> None:
        """What happened now cannot be compared."""
        self._doubtful = True

    def _attempt(self, make: Callable[[], Hashable]) -> Hashable:
        try:
            return make()
        except Doubt:
            self._doubtful = True
            return None

    def _hold(self, tensor: Tensor, label: Hashable) -> None:
        if id(tensor) not in self._labels:
            self._labels[id(tensor)] = label
            self._held.append(tensor)

    def _arguments(self, args: Any, mine: set[int]) -> Hashable:
        storages: dict[int, int] = {}
        for number, tensor in enumerate(distinct_tensors(args)):
            key = storage_key(tensor)
            if key in mine:
                raise Doubt
            place = storages.setdefault(key, number)
            self._hold(tensor, ("argument", number, place, look_of(tensor)))
        return self._told(args)

    def _surroundings(self) -> Hashable:
        """The attributes of all modules inside, and the globals of their code."""
        attributes = [
            (path, attributes_of(vars(inner))) for path, inner in self.module.named_modules()
        ]
        return (tuple(attributes), plain_values(self._spaces))

    def reads(
        self, module: nn.Module, own: dict[str, Any], name: str, asking: Mapping[str, Any]
    ) -> None:
        """Note that code reads an attribute of some module."""
        whose = self._paths.get(id(module), id(module))
        if name == "__dict__":
            if not str(asking.get("__name__")).startswith("torch.nn.modules."):
                self._log.append(self._attempt(lambda: (whose, attributes_of(own))))
        elif name in own:
            self._log.append(self._attempt(lambda: (whose, name, frozen(own[name]))))

    def calls(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the call of a torch function."""
        if self._doubtful:
            return

        def entry() -> Hashable:
            told = self._told((args, kwargs))
            for tensor in distinct_tensors(result):
                self._hold(tensor, (len(self._held), look_of(tensor)))
            return function, told, self._told(result), modes()

        self._log.append(self._attempt(entry))

    def _told(self, value: Any) -> Hashable:
        """A value with labels in the place of tensors."""
        if isinstance(value, Tensor):
            if id(value) not in self._labels:
                raise Doubt  # it comes from nowhere: a global, or kept from an earlier call
            return self._labels[id(value)]
        if isinstance(value, tuple | list):
            return type(value), tuple(self._told(item) for item in value)
        if isinstance(value, dict):
            return dict, tuple((key, self._told(item)) for key, item in value.items())
        if isinstance(value, slice):
            return slice, self._told((value.start, value.stop, value.step))
        found = frozen(value)
        if not isinstance(value, (*VALUES, *FIXED, float, complex)):
            raise Doubt
        return found

    def finish(self, output: Any) -> Hashable:
        """All that the call has seen and done; equal to that of another call, or to nothing."""
        self._log.append(self._attempt(lambda: self._results(output)))
        changed = any(
            version(tensor) != before
            for tensor, before in zip(self._held[: self._known], self._versions, strict=True)
        )
        if self._doubtful or changed or self._before != self._attempt(self._surroundings):
            return object()
        return tuple(self._log)

    def _results(self, output: Any) -> Hashable:
        arguments = {id(tensor) for tensor in self._held[: self._known]}
        made = [tensor for tensor in distinct_tensors(output) if id(tensor) not in arguments]
        keys = [storage_key(tensor) for tensor in made]
        if len(set(keys)) < len(keys) or not self._outside.isdisjoint(keys):
            raise Doubt
        return self._told(output)


class _Log(TorchFunctionMode):
    """Shows a call every torch function that it uses."""

    def __init__(self, likeness: Likeness) -> None:
        super().__init__()
        self._likeness = likeness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self._likeness.running
        result = func(*args, **(kwargs or {}))
        if call is not None:
            if getattr(func, "__name__", "") in UNCERTAIN:
                call.doubt()
            call.calls(func, args, kwargs or {}, result)
        return result


UNCERTAIN = frozenset(
    "__bool__ is_nonzero __contains__ equal allclose __int__ __index__ __float__ item tolist numpy "
    "tensor as_tensor asarray from_numpy frombuffer".split()
)
"""Functions that give Python a value, or make a constant of the graph from one."""
