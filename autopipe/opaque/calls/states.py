"""The states that a call may read, those that it writes, and the places where they are lent.

the call of a module      all parameters and buffers of the module, though one run may not read
                          some of them (experts without rows)
the call of a method      those that are named in its code or in methods that it calls; all of the
                          module's if its code looks them up otherwise (`getattr`)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from autopipe.eager.contents import MOST_ELEMENTS
from autopipe.ir.tensors import attributes_of, bytes_of
from autopipe.ir.torch_private import lend, version
from autopipe.opaque.calls.names_in_code import words
from autopipe.opaque.calls.sites import Site, Wider, call
from autopipe.opaque.calls.sparse import is_sparse
from autopipe.planfile.regions import LOSS, WHOLE


def named(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by its identity; a sparse one is no state."""
    found: dict[int, str] = {}
    for name, tensor in named(model).items():
        if not is_sparse(tensor):
            found.setdefault(id(tensor), name)
    return found


class Homes:
    """The places of a model's parameters and buffers, where other tensors can be lent to it."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for named_tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in named_tensors(remove_duplicate=False):
                names.setdefault(id(tensor), []).append(name)

        def home(name: str) -> tuple[nn.Module, str]:
            path, _, leaf = name.rpartition(".")
            return model.get_submodule(path), leaf

        self._places = {
            name: [*map(home, alike)] for alike in names.values() for name in alike
        }  # under each of its names all places of a tensor

    def lend(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the place of the states of these names, with the states' attributes."""
        for name, tensor in tensors.items():
            for module, leaf in self._places[name]:
                vars(tensor).update(attributes_of(getattr(module, leaf)))
                lend(module, leaf, tensor)


LOOKUPS = frozenset(
    "getattr vars __dict__ get_submodule get_parameter get_buffer modules named_modules children "
    "named_children parameters named_parameters buffers named_buffers _modules _parameters "
    "_buffers".split()
)
"""Names by which code can reach any state of a module, as `getattr(self, f"head{task}")` does."""


def states_of(model: nn.Module, site: Site) -> list[str]:
    """The names of the parameters and buffers that a call may read; the loss reads none."""
    if site.method == LOSS:
        return []
    module = model.get_submodule(site.module)
    call(model, site)  # lines of a method have code of their own from now on
    prefix = f"{site.module}." if site.module else ""
    names, reads_any = first_names(model), site.method == WHOLE
    read = set[str]() if reads_any else set(words(type(module), site.method, set()))
    reads_any = reads_any or bool(read & LOOKUPS)
    return list(
        dict.fromkeys(
            names[id(tensor)]
            for name, tensor in named(model).items()
            if name.startswith(prefix)
            and id(tensor) in names
            and (reads_any or name.removeprefix(prefix).partition(".")[0] in read)
        )
    )


class ChangedStates:
    """Finds the parameters and buffers that a call has replaced or written; made before the call.

    Args:
        states: names of those that the call may read. Buffers among them are compared by value,
            as batch norm and `.data` write without a new version of the tensor.
    """

    def __init__(self, model: nn.Module, states: Sequence[str]) -> None:
        self._model = model
        tensors = named(model)
        self._versions = {name: (tensor, version(tensor)) for name, tensor in tensors.items()}
        self._values = {
            name: tensors[name].clone() for name in states if _is_small_buffer(tensors[name])
        }

    def written(self, site: Site) -> Iterator[tuple[str, Tensor, int]]:
        """The name of each, the tensor before, and its bytes.

        Raises:
            Wider: it is a parameter, is new, or has another shape than before.
        """
        for name, tensor in named(self._model).items():
            before, count = self._versions.get(name, (None, 0))
            values = self._values.get(name)
            same = before is tensor and version(tensor) == count
            if same and (values is None or torch.equal(tensor, values)):
                continue
            kept = before is not None and before.shape == tensor.shape and not is_sparse(tensor)
            if before is None or isinstance(before, nn.Parameter) or not kept:
                raise Wider(site, f"it writes {name!r}, or gives it another shape")
            yield name, before, bytes_of(tensor)


class Writable(Protocol):
    """Gives the buffers among these states that a call may write, with their bytes."""

    def __call__(self, states: Iterable[str], *, every: bool) -> dict[str, int]: ...


def writable(model: nn.Module, written: Iterable[str]) -> Writable:
    """A function that picks, of a call's states, those it may write though no measured run did.

    A micro-batch may take a branch that no measured run took: where a class has no row in them, an
    expert no token. So a call may write a buffer if one of the same name is written in a module of
    the same class; and every buffer, if nothing is known of what the call does.

    Args:
        written: the names of the buffers that calls were seen to write.
    """
    buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not is_sparse(b)}

    def kind(name: str) -> tuple[type, str]:
        path, _, leaf = name.rpartition(".")
        return type(model.get_submodule(path)), leaf

    known = {*map(kind, written)}

    def among(states: Iterable[str], *, every: bool) -> dict[str, int]:
        own = (name for name in states if name in buffers)
        return {name: bytes_of(buffers[name]) for name in own if every or kind(name) in known}

    return among


def _is_small_buffer(tensor: Tensor) -> bool:
    excluded = isinstance(tensor, nn.Parameter) or is_sparse(tensor)
    return not excluded and tensor.numel() <= MOST_ELEMENTS
