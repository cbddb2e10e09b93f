"""Turn `torch.utils.checkpoint` calls in a user's model into recomputed blocks of the plan.

    checkpoint(block, x, use_reentrant=False)

    traced      autopipe::checkpoint("model.py:31 ...")  block's ops  autopipe::checkpoint("")
    the graph   block's nodes, `again` the user's line
    the plan    a block whose nodes are all marked is a recomputed block

torch.export inlines the function and does not record the checkpoint. Nor does it record that
gradients go off inside of torch.autocast; marks of their own do (`autopipe::grad`). A checkpoint
with `use_reentrant=True` is traced as one without (`opaque.custom_functions`) and noted. The hooks
by which a checkpoint saves tensors are hidden from the trace: an inner checkpoint saves its
arguments through the outer one's hooks, which run under `torch.no_grad()`, and export would leave
gradients off.

What such a function writes is written twice (`rewriting.second_writes`): a mark tells how far
backward runs it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopipe.frontend import user_lines
from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow, obstacle
from autopipe.ir.torch_patches import seeing_grad_modes, seeing_saved_tensors_hooks
from autopipe.ir.torch_private import no_function_modes, second_run_of
from autopipe.opaque.custom_functions import asked_reentrant
from autopipe.rewriting.checkpoint_calls import CheckpointCall, Until

MARK = "autopipe.checkpoint.default"

GRAD = "autopipe.grad.default"
"""Marks where gradients go on or off inside of torch.autocast."""

_HOME = "torch.utils.checkpoint"


@torch.library.custom_op("autopipe::checkpoint", mutates_args=())
def mark_op(nothing: Tensor, place: str) -> None:
    """Marks in a traced graph where a checkpoint begins or ends; `place`: the text of the
    `CheckpointCall` that the nodes behind are of, or "".
    """


@mark_op.register_fake
def _(nothing: Tensor, place: str) -> None:
    return None


@torch.library.custom_op("autopipe::grad", mutates_args=())
def grad_op(nothing: Tensor, mode: str) -> None:
    """Marks in a traced graph that gradients are "on" or "off" in an autocast, or its end ("")."""


@grad_op.register_fake
def _(nothing: Tensor, mode: str) -> None:
    return None


@contextmanager
def marking() -> Iterator[None]:
    """Within, a trace has a mark before and after each checkpointed call, and where gradients go on
    or off inside of torch.autocast.

    `mark_op` is traced where the saved-tensors hooks of a checkpoint are entered and left.
    """
    open_: list[CheckpointCall] = []
    numbers = itertools.count()

    def entered(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == _HOME:
            until = _until(hooks)
            hooks.pack_hook = _unseen(hooks.pack_hook)
            if open_:
                open_.append(replace(open_[0], nested=True))
            else:
                open_.append(CheckpointCall(user_lines.here(alone=True), str(next(numbers)), until))
            mark_op(torch.empty(0), str(open_[-1]))

    def left(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == _HOME:
            open_.pop()
            mark_op(torch.empty(0), str(open_[-1]) if open_ else "")

    def changed(enabled: bool | None) -> None:
        grad_op(torch.empty(0), "" if enabled is None else "on" if enabled else "off")

    with seeing_saved_tensors_hooks(entered, left), seeing_grad_modes(changed):
        yield


def _until(hooks: saved_tensors_hooks) -> Until:
    """How far backward runs a checkpointed function again, read from the checkpoint's hooks."""
    if asked_reentrant.get():
        return "end"
    stops_early, in_a_context = second_run_of(hooks.pack_hook)
    if in_a_context:
        return "otherwise"
    return "last saved" if stops_early else "end if saved"


def _unseen(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def run(tensor: Tensor) -> object:
        with no_function_modes():
            return pack(tensor)

    run.__dict__ = pack.__dict__  # a checkpoint notes the hooks around it there, and removes them
    return run


def checkpointed_blocks(
    flow: Dataflow, blocks: Sequence[Block], say: Callable[[str], None]
) -> tuple[str, ...] | None:
    """The paths of the blocks that the model itself checkpoints; None: it has no checkpoint.

    Args:
        say: receives a line for each checkpoint that covers no whole block; it is not recomputed.
    """
    nodes = flow.graph.nodes
    asked = {position: node.again for position, node in enumerate(nodes) if node.again}
    if not asked:
        return None
    again: list[str] = []
    kept: dict[str, str] = {}
    for block in blocks:
        positions = range(block.first, block.stop)
        part = [position for position in positions if position in asked]
        reason = obstacle(flow, positions, block.prefix)
        if len(part) == len(positions) and reason is None:
            again.append(block.path)
        elif part:
            what = "a part of " if len(part) < len(positions) else ""
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
