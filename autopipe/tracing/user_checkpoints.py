"""Turn `torch.utils.checkpoint` calls in a user's model into recomputed blocks of the plan.

    checkpoint(block, x, use_reentrant=False)

    traced      autopipe::checkpoint("model.py:31")  block's ops  autopipe::checkpoint("")
    the graph   block's nodes, `again` the user's line
    the plan    a block whose nodes are all marked is a recomputed block

torch.export inlines the function and does not record that it is checkpointed. A checkpoint with
`use_reentrant=True` is traced as one without (`opaque.custom_functions`). No trace sees what one
does with what it saves: an inner one saves its arguments through the outer one, which looks at
them under `torch.no_grad()`, and export would leave gradients off from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow, analyse, obstacle, written_by
from autopipe.ir.graph import Graph, Ref, State, Value, values_in
from autopipe.ir.torch_patches import seeing_saved_tensors_hooks
from autopipe.ir.torch_private import no_function_modes

MARK = "autopipe.checkpoint.default"

_HOME = "torch.utils.checkpoint"


@torch.library.custom_op("autopipe::checkpoint", mutates_args=())
def mark_op(nothing: Tensor, place: str) -> None:
    """Marks in a traced graph where a checkpoint begins (`place`: user's line) or ends ("")."""


@mark_op.register_fake
def _(nothing: Tensor, place: str) -> None:
    return None


@contextmanager
def marking() -> Iterator[None]:
    """Within, a trace has a mark before and after each checkpointed call.

    `mark_op` is traced where the saved-tensors hooks of a checkpoint are entered and left.
    """
    open_: list[str] = []

    def entered(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == _HOME:
            hooks.pack_hook = _unseen(hooks.pack_hook)
            open_.append(user_lines.here())
            mark_op(torch.empty(0), open_[0])

    def left(hooks: saved_tensors_hooks) -> None:
        if type(hooks).__module__ == _HOME:
            open_.pop()
            mark_op(torch.empty(0), open_[0] if open_ else "")

    with seeing_saved_tensors_hooks(entered, left):
        yield


def _unseen(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    def run(tensor: Tensor) -> object:
        with no_function_modes():
            return pack(tensor)

    return run


def written_again(flow: Dataflow) -> dict[str, str]:
    """The buffers that checkpoints write, each with the user's line.

    Eager writes them a second time in backward, as it runs a checkpoint again; a plan does not. A
    batch norm's statistics then move once a micro-batch, and nothing that is trained depends on it.
    """
    states = flow.graph.states
    return {
        root.name: node.place
        for node in flow.graph.nodes
        if node.again
        for root in map(flow.root.__getitem__, written_by(node))
        if isinstance(root, State) and states[root.name].kind == "buffer"
    }


def check_written_again(graph: Graph) -> None:
    """Refuse a model whose result depends on a buffer that a checkpoint writes.

    Raises:
        CaptureError: names the buffer and the user's line.
    """
    flow = analyse(graph)
    places = written_again(flow)
    for name, place in places.items():
        if _reaches_result(flow, State(name)):
            raise CaptureError(
                f"{place}: a checkpoint writes the buffer {name!r}; torch runs it again in "
                "backward and writes it twice, a plan once, and the loss depends on it",
                hint="write it outside of the checkpoint",
            )


def _reaches_result(flow: Dataflow, state: State) -> bool:
    """Whether a result is computed from a buffer; a norm in training reads none to compute its."""
    made: dict[str, list[Value]] = {}
    for value in flow.root:
        if isinstance(value, Ref):
            made.setdefault(value.node, []).append(value)
    reached: set[Value] = {state}
    for node in flow.graph.nodes:
        read = {flow.root[value] for value in node.values()}
        norm = node.short in ("batch_norm", "instance_norm")
        if norm:
            read -= {flow.root[value] for value in written_by(node)}
        if read & reached:
            reached |= {flow.root[value] for value in made.get(node.name, ())}
            reached |= {flow.root[value] for value in written_by(node)}
    return any(flow.root.get(value) in reached for value in values_in(flow.graph.outputs))


def wanted(
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
