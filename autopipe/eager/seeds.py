"""Refuse random numbers that a model seeds itself: in a plan each op has its own stream of them.

torch.manual_seed(3)                    numbers of torch's own generator, from its seed on
torch.randn(8, generator=self.own)      numbers of a generator of the model's
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.torch_private import TorchDispatchMode

SEED = int.from_bytes(b"autopipe")
"""The seed of torch's generator during a watched run: one that no model is likely to set itself."""


@contextmanager
def known() -> Iterator[None]:
    """Within, torch's generator begins at `SEED`; afterwards it is as before."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        yield


class RefusedSeeds(TorchDispatchMode):
    """Refuses random ops that the model itself has seeded; entered inside the block of `known`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = kwargs.get("generator") is not None
            if given or torch.initial_seed() != SEED:
                which = (
                    "from a generator of its own" if given else "after a seed that it sets itself"
                )
                raise CaptureError(
                    f"{user_lines.here()}: the model draws random numbers {which}; in a plan every "
                    "random op draws anew from a seed of run, step and micro-batch",
                    hint="draw fixed numbers once, in __init__, and keep them with register_buffer",
                )
        return func(*args, **kwargs)
