"""Blocks that keep only their arguments, and run a second time in backward for all the rest.

                   forward                     backward
    kept           its arguments               its arguments
    in between     what it saves, numbered     run again: the same tensors by the same numbers
                   and let go                  each handed out once, and let go

Autograd saves tensors through hooks, of which it asks the innermost alone. A block's own hooks
hide what it saves from whoever counts memory outside, so they show him what stays: the arguments,
and for its moment in backward what the second run has saved. (The idea is that of
`torch.utils.checkpoint` with `use_reentrant=False`.)

The second run stands where the first stood: the same arithmetic, the same random stream, in
whatever thread backward runs (on a GPU it is not the caller's).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from autopipe import precision, randomness
from autopipe.blocks import Block, classes
from autopipe.dataflow import Dataflow
from autopipe.errors import PlanError
from autopipe.fake import storage_key
from autopipe.graph import Ref, State
from autopipe.opaque import OPAQUE
from autopipe.partition import Stage

ALL = "all"
"""Asks for every block of the model."""


def blocks_to_recompute(blocks: Sequence[Block], asked: Sequence[str]) -> tuple[str, ...]:
    """The paths of the blocks meant, in the graph's order.

    Args:
        asked: "all", names of block classes, paths of blocks or of modules that blocks are in. A
            class is named after its first member, and its name means all of them.

    Raises:
        PlanError: there is no such block or class.
    """
    members = classes(tuple(blocks))
    chosen: set[str] = set()
    for word in asked:
        meant = set(members.get(word, ())) or {
            block.path
            for block in blocks
            if word in (ALL, block.path) or block.path.startswith(word + ".")
        }
        if not meant:
            known = ", ".join(f"{name} ({len(paths)} of them)" for name, paths in members.items())
            raise PlanError(
                f"recompute: the model has no block and no class of blocks {word!r}",
                hint=f"{ALL}, or of a class {known}" if known else "this model has no blocks",
            )
        chosen |= meant
    return tuple(block.path for block in blocks if block.path in chosen)


def within(stage: Stage, blocks: Sequence[Block], recompute: Collection[str]) -> tuple[str, ...]:
    """Those of the blocks to recompute of which the stage has a part."""
    return tuple(
        block.path
        for block in blocks
        if block.path in recompute and block.first < stage.stop and block.stop > stage.first
    )


def obstacle(flow: Dataflow, positions: Sequence[int]) -> str | None:
    """Why the nodes at `positions` would not do the same in a second run; None: they would."""
    inside = {flow.graph.nodes[position].name for position in positions}
    for position in positions:
        node = flow.graph.nodes[position]
        if node.op in OPAQUE:
            return f"{node.name} ({node.op}) keeps more for backward than can be foretold"
        for value in node.values():
            root = flow.root[value]
            if isinstance(root, Ref) and root.node in inside:
                continue
            for writer in flow.writers.get(root, ()):
                # A state written anywhere is another one when the next micro-batch has come by.
                if writer >= positions[0] or isinstance(root, State):
                    return f"{node.name} reads {root}, which {flow.graph.nodes[writer].name} writes"
    return None


def refuse(stage: Stage, path: str, reason: str) -> None:
    """Raise the error for a block that a second run would not make again.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        f"stage {stage.index}: block {path!r} cannot be recomputed: {reason}",
        hint=f"leave {path!r} out of what is recomputed",
    )


class Recomputed(nn.Module):
    """A block that runs again in backward; parameters keep their names, without a prefix.

    `block` is the module inside. Called without gradients this is the block and nothing else.
    """

    block: nn.Module

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a submodule: its parts are this module's own
        self._parameters = block._parameters
        self._buffers = block._buffers
        self._modules = block._modules

    def forward(self, *arguments: Tensor) -> Any:
        """The block's results; what backward needs of it is made again there."""
        if not torch.is_grad_enabled():
            return self.block(*arguments)
        run = _Run(self.block)
        with saved_tensors_hooks(run.number, _value):
            results = self.block(*arguments)
        run.keep(arguments)
        return results


class _Enough(BaseException):
    """The second run has saved all that the first had; what would follow is of no use.

    No Exception, which a GraphModule would explain on stderr.
    """


class _Run:
    """One forward of a block, and all that its second run needs."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._arithmetic = precision.current()
        self._stream = randomness.current()
        self._saved = 0
        self._arguments: Node | None = None
        self._given: tuple[nn.Parameter | bool, ...] = ()
        self._values: dict[int, Tensor | Node] = {}

    def number(self, tensor: Tensor) -> tuple[_Run, int]:
        """In the place of a saved tensor: who can make it again, and which it is."""
        self._saved += 1
        return self, self._saved - 1

    def keep(self, arguments: Sequence[Tensor]) -> None:
        """Hold what the second run starts from, if it will be needed."""
        if self._saved:
            # A parameter from elsewhere is given again as itself: its copy goes by its identity.
            self._given = tuple(
                tensor if isinstance(tensor, nn.Parameter) else tensor.requires_grad
                for tensor in arguments
            )
            self._arguments = _hold(*(tensor.detach() for tensor in arguments))

    def value(self, number: int) -> Tensor:
        """A saved tensor. Whoever asks twice has the block run once more."""
        if number not in self._values:
            self._values = self._again()
        held = self._values.pop(number)
        return held if isinstance(held, Tensor) else held.saved_tensors[0]  # type: ignore[attr-defined]

    def _again(self) -> dict[int, Tensor | Node]:
        """Run the block and take what it saves, by number; the arguments are held already."""
        assert self._arguments is not None
        kept = self._arguments.saved_tensors  # type: ignore[attr-defined]
        arguments = [
            given if isinstance(given, nn.Parameter) else tensor.detach().requires_grad_(given)
            for tensor, given in zip(kept, self._given, strict=True)
        ]
        made: list[Tensor] = []

        def collect(tensor: Tensor) -> None:
            made.append(tensor.detach())
            if len(made) == self._saved:
                raise _Enough

        with (
            torch.enable_grad(),
            precision.computing(self._arithmetic),
            randomness.stream.resumed(self._stream),
            saved_tensors_hooks(collect, _never),
        ):
            try:
                self._block(*arguments)
            except _Enough:
                pass
        assert len(made) == self._saved, f"{len(made)} tensors saved again of {self._saved}"
        held = {storage_key(tensor) for tensor in kept}
        return {
            number: tensor if storage_key(tensor) in held else _hold(tensor)
            for number, tensor in enumerate(made)
        }


def _value(numbered: tuple[_Run, int]) -> Tensor:
    run, number = numbered
    return run.value(number)


def _never(_: None) -> Tensor:
    raise AssertionError("no backward goes through a second run")


class _Hold(torch.autograd.Function):
    """Saves tensors where the hooks outside see them."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


def _hold(*tensors: Tensor) -> Node:
    """A node of its own in autograd's graph, whose `saved_tensors` these are while it lives."""
    with torch.enable_grad():
        carrier = torch.empty(0, requires_grad=True)
        node: Node = _Hold.apply(carrier, *tensors).grad_fn  # type: ignore[no-untyped-call]
    return node
