"""Names of graph nodes: `h.0.mlp.up/linear/0` is the first `linear` in the module `h.0.mlp.up`.

A plan lists them beside names of parameters, which have no slash.
"""

from __future__ import annotations

from typing import NamedTuple


class NodeName(NamedTuple):
    """The parts of a node's name.

    Attributes:
        module: the path of the module whose code called the op; empty outside of all modules.
        op: the op's short name.
        number: how many nodes of the same module and op come before.
    """

    module: str
    op: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}/{self.op}/{self.number}".lstrip("/")

    @classmethod
    def of(cls, text: str) -> NodeName | None:
        """The parts of a name that `str` has made; None: it is the name of a parameter."""
        if "/" not in text:
            return None
        *module, op, number = text.split("/")
        return cls("/".join(module), op, int(number))
