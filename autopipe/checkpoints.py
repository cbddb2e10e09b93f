"""`torch.utils.checkpoint` in a user's model: run this again in backward. What becomes of it.

    checkpoint(block, x, use_reentrant=False)

    traced      autopipe::checkpoint("model.py:31")  block's ops  autopipe::checkpoint("")
    the graph   block's nodes, `again` the user's line
    the plan    a block all of whose nodes are to run again is a recomputed block

torch.export follows the function and forgets that it should run again. With `use_reentrant=True`
there is no such function to follow, and the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopipe import places
from autopipe.blocks import Block
from autopipe.dataflow import Dataflow
from autopipe.recompute import obstacle

MARK = "autopipe.checkpoint.default"

_HOME = "torch.utils.checkpoint"


@torch.library.custom_op("autopipe::checkpoint", mutates_args=())
def mark_op(nothing: Tensor, place: str) -> None:
    """Stands in a traced graph where a checkpoint begins, at the user's line, or ends, at none."""


@mark_op.register_fake
def _(nothing: Tensor, place: str) -> None:
    return None


@contextmanager
def marking() -> Iterator[None]:
    """Within, a trace has marks around what the model wants to run again.

    A checkpoint hides what is saved in it behind hooks of its own. They are seen here: of the
    function itself users and libraries have copies.
    """
    enter, leave = saved_tensors_hooks.__enter__, saved_tensors_hooks.__exit__
    open_: list[str] = []

    def entered(self: saved_tensors_hooks) -> None:
        if type(self).__module__ == _HOME:
            open_.append(places.here())
            mark_op(torch.empty(0), open_[0])
        enter(self)

    def left(self: saved_tensors_hooks, *error: Any) -> None:
        leave(self, *error)
        if type(self).__module__ == _HOME:
            open_.pop()
            mark_op(torch.empty(0), open_[0] if open_ else "")

    saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]
    saved_tensors_hooks.__exit__ = left  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
        saved_tensors_hooks.__exit__ = leave  # type: ignore[method-assign]


def wanted(
    flow: Dataflow, blocks: Sequence[Block], say: Callable[[str], None]
) -> tuple[str, ...] | None:
    """The paths of the blocks that a model itself asks to run again; None: it asks for nothing.

    Args:
        say: is told of the checkpoints that no block is for: what they save is kept.
    """
    nodes = flow.graph.nodes
    asked = {position: node.again for position, node in enumerate(nodes) if node.again}
    if not asked:
        return None
    again: list[str] = []
    kept: dict[str, str] = {}
    for block in blocks:
        own = range(block.first, block.stop)
        part = [position for position in own if position in asked]
        reason = obstacle(flow, own)
        if len(part) == len(own) and reason is None:
            again.append(block.path)
        elif part:
            what = "a part of " if len(part) < len(own) else ""
            because = f", which cannot: {reason}" if reason is not None else ""
            kept.setdefault(asked[part[0]], f"{what}block {block.path!r}{because}")
        for position in part:
            del asked[position]
    for place in dict.fromkeys(asked.values()):
        kept.setdefault(place, "what is no block of the model")
    for place, what in kept.items():
        say(f"{place}: torch.utils.checkpoint asks to run {what} again; its activations are kept")
    if again:
        number = f"{len(again)} block" + "s" * (len(again) > 1)
        say(f"recompute: {number}, as the model asks by torch.utils.checkpoint")
    return tuple(again)
