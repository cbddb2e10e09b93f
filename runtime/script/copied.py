"""Finds out that somebody has written the weights of a module of which this rank trains copies.

    pipelines, ZeRO-1 and 2 in fp32      the module's own tensors, which a script may write
    tp, ZeRO-3, 16 bits, another device  copies: some rows or columns, or another dtype

`for p in model.parameters(): p.data.clamp_(-0.01, 0.01)` between two steps changes what plain
PyTorch trains. It would not change a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from autopipe.ir.torch_private import is_fake, version

LOOKED_AT = 1024
"""So many elements of a tensor are compared from step to step. A write through `.data` leaves no
other trace, and to read all weights in every step would take long."""


@dataclass(frozen=True)
class _Weight:
    """A tensor of a module, by its name there; `copied`: this rank reads a copy of it."""

    model: nn.Module
    name: str
    copied: bool


@dataclass(frozen=True)
class Sight:
    """A look at a tensor: which one it is, how often it was written, and some of its elements."""

    tensor: Tensor | None
    written: int = 0
    some: Tensor | None = None

    def same(self, before: Sight) -> bool:
        """Whether the tensor and its elements are those of an earlier look."""
        if self.tensor is not before.tensor or self.tensor is None:
            return self.tensor is before.tensor
        if self.some is None or before.some is None:
            return True
        return self._equals(before) and (self.written == before.written or self._whole())

    def alike(self, before: Sight) -> bool:
        """Whether it is the `same`, or another tensor that has the same elements, of few."""
        one, other = self.tensor, before.tensor
        if one is None or other is None or one is other:
            return self.same(before)
        if (one.dtype, one.device, one.shape) != (other.dtype, other.device, other.shape):
            return False
        return self._equals(before) and self._whole()

    def _equals(self, before: Sight) -> bool:
        """Whether the elements are, bit by bit: NaN is itself."""
        if self.some is None or before.some is None:
            return False
        return torch.equal(self.some.view(torch.uint8), before.some.view(torch.uint8))

    def _whole(self) -> bool:
        """Whether all elements were looked at."""
        if self.some is None or self.tensor is None:
            return False
        return self.some.numel() == self.tensor.numel()

    def unwritten_since(self, before: Sight) -> bool:
        """Whether it is the `same`, and nothing has written it, not even the values that it had."""
        return self.same(before) and self.written == before.written


class Copied:
    """The tensors of modules that this rank has copies of, looked at between two steps.

    Args:
        models: the module that was given, and those that the user's files keep.
        held: what the rank reads, by name.
    """

    def __init__(self, models: Iterable[nn.Module], held: Mapping[str, Tensor]) -> None:
        self._places = [
            _Weight(model, name, held[name] is not tensor)
            for model in models
            for name, tensor in values_of(model).items()
            if name in held
        ]
        self._looks, self._trained = self._now(), False

    def note(self) -> None:
        """Take the present values as unchanged: a step has run, and its copies may have been
        trained. From now on a write of the values that a parameter has is one, too: plain PyTorch
        would go on from them."""
        self._looks, self._trained = self._now(), True

    def written(self) -> tuple[str, bool] | None:
        """The first tensor that was written, or replaced by another one, since the last call of
        this, or since this object was made: its name, and whether this rank reads a copy of it;
        None: there is none."""
        before, self._looks = self._looks, self._now()
        same = Sight.unwritten_since if self._trained else Sight.same
        pairs = zip(self._places, before, self._looks, strict=True)
        changed = (place for place, old, new in pairs if not same(new, old))
        return next(((place.name, place.copied) for place in changed), None)

    def _now(self) -> list[Sight]:
        found = present((place.model, place.name) for place in self._places)
        return [_look(one, place) for one, place in zip(found, self._places, strict=True)]


def copies_of(model: nn.Module, held: Mapping[str, Tensor]) -> list[str]:
    """The names of a module's tensors of which a rank holds others."""
    return [n for n, one in values_of(model).items() if n in held and held[n] is not one]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers that have values."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: one for name, one in named if not (is_fake(one) or one.is_meta)}


def present(places: Iterable[tuple[nn.Module, str]]) -> list[Tensor | None]:
    """The tensors that modules have by these names now; each module is gone through once."""
    asked = [*places]
    states = {model: values_of(model) for model in {model for model, _ in asked}}
    return [states[model].get(name) for model, name in asked]


def _look(tensor: Tensor | None, place: _Weight) -> Sight:
    """A look at a tensor of a module.

    Another trace writes buffers and restores them, so writes of a buffer are not counted.
    """
    trained = isinstance(tensor, nn.Parameter)
    # Whether a buffer was replaced by another tensor is looked at by `Between`.
    if tensor is None or not (place.copied or trained):
        return Sight(None)
    if not place.copied:
        return Sight(tensor)
    sight = look_at(tensor)
    return sight if trained else replace(sight, written=0)


def look_at(tensor: Tensor) -> Sight:
    """The tensor, the number of writes to it, and some of its elements."""
    return Sight(tensor, version(tensor), some_of(tensor, LOOKED_AT).clone())


def look_at_any(tensor: Tensor) -> Sight:
    """The same of a tensor of any kind: of one without a memory of its own, which one it is."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or is_fake(tensor) or tensor.is_meta or tensor.is_quantized:
        return Sight(tensor)
    written = 0 if tensor.is_inference() else version(tensor)
    return Sight(tensor, written, some_of(tensor, LOOKED_AT).clone())


def some_of(tensor: Tensor, count: int) -> Tensor:
    """About so many elements of a tensor, evenly taken in the order of its memory: a view."""
    dims = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(dims).reshape(-1)
    # An odd step: one that divides a row would see the same column of each.
    return flat[:: flat.numel() // count | 1]
