"""Tables of functions by names of ops, filled by a decorator on each function.

rule = entering(RULES)

@rule("mm", "bmm")
def product(...): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function")


def entering(table: dict[str, Function]) -> Callable[..., Callable[[Function], Function]]:
    """Make a decorator that enters functions in `table`; it refuses a name already in the table."""

    def rule(*names: str) -> Callable[[Function], Function]:
        def enter(function: Function) -> Function:
            for name in names:
                assert name not in table, f"two rules for {name}"
                table[name] = function
            return function

        return enter

    return rule
