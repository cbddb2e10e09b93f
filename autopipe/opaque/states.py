"""The parameters and buffers that a call may read: some experts get no row in one run.

the call of a module      all that are in it
the call of a method      those that its code has a name for, or the methods that it calls
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn

from autopipe.opaque.sites import Site
from autopipe.opaque.sparse import is_sparse
from autopipe.planfile.regions import WHOLE


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


def state_of(model: nn.Module, name: str) -> Any:
    """The parameter or buffer of a name."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def states_of(model: nn.Module, site: Site) -> list[str]:
    """The names of the parameters and buffers that a call may read."""
    module = model.get_submodule(site.module)
    prefix = f"{site.module}." if site.module else ""
    names, whole = first_names(model), site.method == WHOLE
    words = set[str]() if whole else set(_words(type(module), site.method, set()))
    return list(
        dict.fromkeys(
            names[id(tensor)]
            for name, tensor in named(model).items()
            if name.startswith(prefix)
            and id(tensor) in names
            and (whole or name.removeprefix(prefix).partition(".")[0] in words)
        )
    )


def _words(kind: type, method: str, known: set[str]) -> Iterator[str]:
    """The names and texts in the code of a method and of the methods whose names are in it."""
    known.add(method)
    code = getattr(getattr(kind, method, None), "__code__", None)
    pending = [code] if isinstance(code, CodeType) else []
    while pending:
        one = pending.pop()
        pending += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
        yield from (text.partition(".")[0] for text in one.co_consts if isinstance(text, str))
        for word in one.co_names:
            yield word
            if word not in known and callable(getattr(kind, word, None)):
                yield from _words(kind, word, known)
