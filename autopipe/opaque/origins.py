"""Track for each tensor of a run whether a site's call made it, and which site's.

An op sees only its arguments, so a tensor that enters or leaves a site in another way would be
lost. A tensor that a call leaves in an attribute (`self.aux_loss`) becomes a result if other code
reads it. A gradient that a call takes itself must not go through anything computed outside of it:

    h = self.first(x)
    self.adapt(h):                                      first.weight has gone into h, outside
        w = self.first.weight
        g, = torch.autograd.grad((h @ w).sum(), w)      through h too: the call is too small

The op is given h and w, and cannot know that h was computed from w.

Other values that a call sets in attributes (`self.chosen = 3`) are no results: a trace does not run
the call, and would find the value before it (`SetForOthers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import watching_attributes
from autopipe.ir.torch_private import no_function_modes, version
from autopipe.opaque.calls.attributes import BeforeCall
from autopipe.opaque.calls.sites import Site, Wider
from autopipe.planfile.regions import LOSS


class Origins(TorchFunctionMode):
    """Follows the tensors of a run.

    Args:
        names: the names of the model's parameters and buffers, by identity.
        kept: the names of other kept tensors that carry gradients, by identity.

    Raises:
        Wider: a tensor enters or leaves a site otherwise than as argument or result.
        CaptureError: a site reads a tensor that was computed from parameters before the run.
    """

    def __init__(self, names: Mapping[int, str], kept: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._kept = kept
        self._outside: dict[int, Tensor] = {}
        self._inside: dict[int, tuple[Tensor, Site]] = {}
        self._left: dict[int, tuple[Tensor, str, dict[str, Tensor]]] = {}
        self._site: Site | None = None
        self._states: dict[str, None] = {}
        self._given: set[int] = set()
        self._foreign: dict[int, tuple[Tensor, int]] = {}

    @contextmanager
    def within(
        self, site: Site, given: Sequence[Tensor], states: dict[str, None]
    ) -> Iterator[None]:
        """Within, a site's call runs; the names of the states that it reads go to `states`."""
        self._site, self._states, self._given = site, states, set(map(id, given))
        self._foreign = {}
        assigning = register_module_buffer_registration_hook(self._assigned)
        try:
            yield
            if any(version(tensor) != before for tensor, before in self._foreign.values()):
                raise Wider(site, "it writes a tensor that it keeps")
        finally:
            assigning.remove()
            self._site = None

    def _assigned(self, module: nn.Module, name: str, buffer: Any) -> None:
        """Refuse a loss that assigns a buffer (`self.center = ...`): ranks would not keep it."""
        if self._site is not None and self._site.method == LOSS:
            raise Wider(self._site, "it writes a tensor that it keeps")

    def gives(
        self, results: Sequence[Tensor], left: Mapping[str, Tensor], read: dict[str, Tensor]
    ) -> None:
        """Note a call's results, and tensors it left in attributes: those read go to `read`."""
        for tensor in results:
            self._inside.pop(id(tensor), None)
            self._outside[id(tensor)] = tensor
        self._left |= {id(tensor): (tensor, name, read) for name, tensor in left.items()}

    def forget(self) -> None:
        """Let go of all tensors, after the run."""
        for known in (self._outside, self._inside, self._left, self._foreign):
            known.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._site is not None and self._site.method == LOSS:
            self._note(tensors_in((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        looks = getattr(func, "__name__", "") == "__get__" and not isinstance(result, Tensor)
        for tensor in () if looks else tensors_in((args, kwargs or {})):  # not at shapes, dtypes
            self._check(tensor)
        for tensor in tensors_in(result):
            key = id(tensor)
            if key in self._names or key in self._outside or key in self._inside:
                continue
            if self._site is None:
                self._outside[key] = tensor
            else:
                self._inside[key] = tensor, self._site
        return result

    def _note(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that the loss keeps, to see whether it writes them."""
        for tensor in tensors:
            if not any(id(tensor) in known for known in (self._given, self._inside, self._outside)):
                with no_function_modes():
                    self._foreign.setdefault(id(tensor), (tensor, version(tensor)))

    def _check(self, tensor: Tensor) -> None:
        key = id(tensor)
        if self._site is None:
            if key in self._left:
                _, name, read = self._left[key]
                read[name] = tensor
            elif key in self._inside:
                raise Wider(self._inside[key][1], "a tensor that it makes is read by other code")
        elif key in self._kept and key not in self._given:
            raise CaptureError(
                f"{user_lines.here()}: the model reads {self._kept[key]!r}, computed from "
                "parameters when the model was built; no graph has the way back to them",
                hint="compute it in forward",
            )
        elif key in self._given or key in self._inside:
            return
        elif self._site.method == LOSS and tensor.requires_grad:
            raise Wider(self._site, "it reads a parameter, or what was made of one")
        elif key in self._names:
            if self._site.method == LOSS:
                raise Wider(self._site, f"it reads the model's {self._names[key]!r}")
            self._states[self._names[key]] = None
        elif key in self._outside:
            raise Wider(self._site, "it reads a tensor of other code that it is not given")


class SetForOthers:
    """Finds attributes, other than tensors, that a site's call changes and other code then reads.

    Args:
        model: the model that runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changed: dict[tuple[int, str], Site] = {}
        self._site: Site | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the model runs.

        Raises:
            Wider: other code reads such an attribute.
        """
        read, change = nn.Module.__getattribute__, nn.Module.__setattr__

        def reading(module: nn.Module, name: str) -> Any:
            site = self._changed.get((id(module), name))
            if site is not None and self._site != site:
                raise Wider(site, f"it sets {name!r}, which other code reads")
            return read(module, name)

        def changing(module: nn.Module, name: str, value: Any) -> None:
            self._changed.pop((id(module), name), None)
            change(module, name, value)

        with watching_attributes(reading, changing, nn.Module.__delattr__):
            yield

    @contextmanager
    def within(self, site: Site, sets: set[str]) -> Iterator[None]:
        """Within, a site's call runs; the names of attributes that it changes go to `sets`."""
        before, self._site = BeforeCall(self._model, site.module), site
        try:
            yield
            for change in before.changes():
                sets.add(change.name)
                if change.replaced and not isinstance(change.value, Tensor):
                    self._changed[id(change.module), change.leaf] = site
        finally:
            self._site = None


class InnerGradients(TorchFunctionMode):
    """Within, checks the gradients that a call takes itself.

    Args:
        site: the site whose call runs.
        given: its arguments, and the parameters and buffers that it may read.

    Raises:
        Wider: a gradient would go through what was computed outside of the call.
    """

    def __init__(self, site: Site, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._site = site
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            self._check(list(tensors_in(inputs)))
        return func(*args, **kwargs)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        ids = {id(tensor) for tensor in inputs}
        ends = {_end(tensor) for tensor in self._given if id(tensor) in ids}
        for tensor in self._given:
            if id(tensor) not in ids and ends & _before(tensor):
                raise Wider(
                    self._site,
                    "it takes a gradient that goes through what is computed outside of it",
                )


def _end(tensor: Tensor) -> object:
    """The point at which a gradient by this tensor ends: a leaf, or the function that made it."""
    return id(tensor) if tensor.grad_fn is None else tensor.grad_fn


def _before(tensor: Tensor) -> set[object]:
    """The ends (`_end`) of a tensor and of all tensors that it was computed from."""
    if tensor.grad_fn is None:
        return {id(tensor)}
    found, pending = set[object](), [tensor.grad_fn]
    while pending:
        function = pending.pop()
        if function not in found:
            found |= {function, id(getattr(function, "variable", None))}
            pending += [before for before, _ in function.next_functions if before is not None]
    return found
