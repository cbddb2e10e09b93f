"""The names in the code of a model's methods: what a method may read, without running it.

    def route(self, x): return self.experts[self.gate(x)]      route: experts, gate

A name counts wherever it stands: no type says of which object it is an attribute.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from autopipe.frontend.user_lines import codes_in


def classes(objects: Iterable[object]) -> set[type]:
    """The classes of modules and a loss, but the bases of all modules."""
    return {base for each in objects for base in type(each).__mro__} - {*nn.Module.__mro__}


def loads(functions: Iterable[object], attribute: str) -> bool:
    """Whether the code of functions or methods loads an attribute of this name."""
    plain = (inspect.unwrap(_plain(function)) for function in functions)
    codes = (code for function in plain for code in codes_in(getattr(function, "__code__", None)))
    loads = (
        instruction
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith("LOAD_")  # getattr(self, "mode") too
    )
    return any(load.argval == attribute for load in loads)


def _plain(method: Any) -> Any:
    """The function of a property, a static or a class method."""
    return getattr(method, "fget", None) or getattr(method, "__func__", method)


def words(kind: type, method: str, known: set[str]) -> Iterator[str]:
    """The names and texts in the code of a method and of the methods whose names are in it."""
    known.add(method)
    for inner in codes_in(getattr(getattr(kind, method, None), "__code__", None)):
        yield from (text.partition(".")[0] for text in inner.co_consts if isinstance(text, str))
        for word in inner.co_names:
            yield word
            if word not in known and callable(getattr(kind, word, None)):
                yield from words(kind, word, known)
