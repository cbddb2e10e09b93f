"""Refuse, with the user's line, modes that forward enters and no graph can express.

a TorchDispatchMode of the user's     a trace notes an op before the mode sees it
forward_ad.dual_level                 a graph has no dual tensors
fork_rng, set_rng_state               random ops of a graph have a stream each, and no common state
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level

from autopipe.errors import Uncaptured
from autopipe.frontend import user_lines
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import TorchDispatchMode

_CONTEXTS = contextlib.__file__


@contextmanager
def refused() -> Iterator[None]:
    """Within, refuse these modes.

    Raises:
        Uncaptured: names the user's line.
    """
    enter: Any = TorchDispatchMode.__enter__

    def entering(mode: TorchDispatchMode) -> Any:
        _check(mode)
        return enter(mode)

    set_state = torch.random.set_rng_state

    def setting(state: Tensor) -> None:
        if not _by_a_library():
            raise Uncaptured(
                f"{user_lines.here()}: forward sets the state of torch's random numbers, which is "
                "in no graph: each of its random ops draws from a stream of its own",
                hint="draw once, and use what is drawn twice",
            )
        set_state(state)

    with (
        patched(TorchDispatchMode, "__enter__", entering),
        patched(dual_level, "__enter__", _dual),
        patched(torch, "set_rng_state", setting),
        patched(torch.random, "set_rng_state", setting),
    ):
        yield


def _by_a_library() -> bool:
    """Whether torch or autopipe sets the state itself; fork_rng sets it for its caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in (torch.random.__file__, _CONTEXTS):
        frame = frame.f_back
    caller = "" if frame is None else str(frame.f_globals.get("__name__"))
    return caller.partition(".")[0] in ("torch", "autopipe")


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
        lines=True,
    )
