"""Tables of functions by the names of ops, each entered where it is written.

rule = entering(RULES)

@rule("mm", "bmm")
def product(...): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function")


def entering(table: dict[str, Function]) -> Callable[..., Callable[[Function], Function]]:
    """The decorator that enters functions in `table`; a name that is there already is refused."""

    def rule(*names: str) -> Callable[[Function], Function]:
        def enter(function: Function) -> Function:
            for name in names:
                assert name not in table, f"two rules for {name}"
                table[name] = function
            return function

        return enter

    return rule
