"""Modes that forward enters, and that no graph can say; each is refused with the user's line.

a TorchDispatchMode of the user's     a trace notes an op before the mode sees it
forward_ad.dual_level                 what is dual within has no name in a graph
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.forward_ad import dual_level

from autopipe.errors import Uncaptured
from autopipe.frontend import user_lines
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import TorchDispatchMode


@contextmanager
def refused() -> Iterator[None]:
    """Refuse them within.

    Raises:
        Uncaptured: names the user's line.
    """
    enter: Any = TorchDispatchMode.__enter__

    def entering(mode: TorchDispatchMode) -> Any:
        _check(mode)
        return enter(mode)

    modes = patched(TorchDispatchMode, "__enter__", entering)
    with modes, patched(dual_level, "__enter__", _dual):
        yield


def _check(mode: TorchDispatchMode) -> None:
    if type(mode).__module__.partition(".")[0] not in ("torch", "autopipe"):
        raise Uncaptured(
            f"{user_lines.here()}: forward runs under {type(mode).__name__}, a TorchDispatchMode; "
            "what it does to ops is in no graph",
            hint="make what it does ops of the forward, or a TorchFunctionMode",
            whole=True,
        )


def _dual(level: Any) -> None:
    raise Uncaptured(
        f"{user_lines.here()}: forward takes derivatives in forward mode, which are in no graph",
        hint="write the derivative out as ops of the forward",
        whole=True,
    )
