"""Recompute blocks: save only a block's arguments in forward, and run it a second time in backward.

What is recomputed is a collection of names, `recompute`: of blocks, by their paths, which run again
whole, and of nodes, which run again alone. Nodes are for joint graphs (`joint.run_again`); autograd
runs blocks again, as it is done here.

                   forward                     backward
    kept           its arguments               its arguments
    in between     what it saves, numbered     run again: the same tensors by the same numbers
                   and let go                  each handed out once, and let go

Autograd saves tensors through hooks, and calls only the innermost ones. A block's own hooks hide
its saved tensors from outer hooks that count memory, so the block passes on what stays: its
arguments, and, for a moment in backward, the tensors that the second run saves. (The idea is that
of `torch.utils.checkpoint` with `use_reentrant=False`.)

The second run has the first one's arithmetic and random stream, in whichever thread backward runs
(on a GPU not the caller's). It writes copies of a batch norm's running statistics: the first run
has counted the micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from autopipe.errors import PlanError
from autopipe.frontend.refusals import as_saved
from autopipe.ir.blocks import Block, classes, owners
from autopipe.ir.dataflow import analyse, obstacle, statistics
from autopipe.ir.graph import Graph, State
from autopipe.ir.partition import Stage
from autopipe.ir.torch_private import in_graph_module, share_members, storage_key, version
from autopipe.stages import precision, rng
from autopipe.stages.op_tape import AGAIN, marking

ALL = "all"
"""The word for every block of the model."""


def words_of_option(
    option: str, value: str | Sequence[str] | None, alone: Collection[str]
) -> list[str]:
    """The words that an option was given, of which it takes several.

    Args:
        alone: words that speak for all blocks, and so contradict any other word.

    Raises:
        PlanError: one of these stands beside another word.
    """
    words = [value] if isinstance(value, str) else [*(value or ())]
    sole = next((word for word in words if word in alone), None)
    other = next((word for word in words if word != sole), None)
    if sole is not None and other is not None:
        raise PlanError(
            f"{option}={sole} was asked for, and {option}={other} too, which contradict each other",
            hint=f"leave out one of the two: {sole} stands alone",
        )
    return words


def blocks_meant(
    blocks: Sequence[Block],
    asked: Sequence[str],
    option: str = "recompute",
    others: Iterable[str] = (),
) -> tuple[str, ...]:
    """The paths of the blocks that words mean, in the graph's order.

    Args:
        asked: "all", names of block classes, or paths of blocks or of modules that contain blocks.
            A class is named after its first member; its name means all members.
        option: they are asked for.
        others: words that might have been meant, for the hint.

    Raises:
        PlanError: there is no such block or class, or no block at all.
    """
    members = classes(tuple(blocks))
    chosen: set[str] = set()
    for word in asked:
        meant = set(members.get(word, ())) or {
            block.path
            for block in blocks
            if word in (ALL, block.path) or block.path.startswith(word + ".")
        }
        check_blocks(blocks, word, option)
        if not meant:
            known = ", ".join(f"{name} ({len(paths)} of them)" for name, paths in members.items())
            raise PlanError(
                f"{option}: the model has no block and no class of blocks {word!r}",
                hint=f"{', '.join([ALL, *others])}, or of a class {known}",
            )
        chosen |= meant
    return tuple(block.path for block in blocks if block.path in chosen)


def check_blocks(blocks: Sequence[Block], word: str, what: str = "recompute") -> None:
    """Refuse a word that means something in blocks, of a model without any."""
    if not blocks:
        raise PlanError(
            f"{what}: {word!r} was asked for, and the model has no blocks: modules of one class, "
            "one after the other",
            hint=f"leave {what} out",
        )


def within(
    graph: Graph, stage: Stage, blocks: Sequence[Block], recompute: Collection[str]
) -> tuple[str, ...]:
    """The blocks of `recompute` that are in the stage, at least in part, and its nodes."""
    paths = (
        block.path
        for block in blocks
        if block.path in recompute and block.first < stage.stop and block.stop > stage.first
    )
    nodes = (graph.nodes[position].name for position in range(stage.first, stage.stop))
    return (*paths, *(name for name in nodes if name in recompute))


def runs_of(
    graph: Graph, stage: Stage, blocks: Sequence[Block]
) -> list[tuple[Block | None, list[int]]]:
    """A stage's nodes as consecutive runs, each inside one block or inside none."""
    # A local node from elsewhere is the stage's own, not a piece of a block it does not have.
    owner = owners(blocks, stage.first, stage.stop)
    runs: list[tuple[Block | None, list[int]]] = []
    for position in stage.nodes:
        block = owner.get(position)
        if not runs or runs[-1][0] is not block:
            runs.append((block, []))
        runs[-1][1].append(position)
    return [
        (block if block and _has_home(graph, block, positions) else None, positions)
        for block, positions in runs
    ]


def check_recompute(
    graph: Graph, stage: Stage, blocks: Sequence[Block], recompute: Collection[str]
) -> None:
    """Refuse blocks and nodes that are none of the stage's, or would not do the same again.

    Raises:
        PlanError: names the block or the node, and what stands in its way.
    """
    if not recompute:
        return
    unknown = sorted(set(recompute) - set(within(graph, stage, blocks, recompute)))
    if unknown:
        known = within(graph, stage, blocks, [block.path for block in blocks])
        raise PlanError(
            f"stage {stage.index}: {unknown[0]!r} is to be recomputed and is no block of the stage",
            hint=f"its blocks are {', '.join(known)}" if known else "it has none",
        )
    flow = analyse(graph)
    blocks_here = [(b, p) for b, p in runs_of(graph, stage, blocks) if b is not None]
    parts: list[tuple[str, list[int], str | None]] = [(b.path, p, b.prefix) for b, p in blocks_here]
    parts += [(graph.nodes[p].name, [p], None) for p in range(stage.first, stage.stop)]
    obstacles = ((name, obstacle(flow, p, home)) for name, p, home in parts if name in recompute)
    refused = {name: reason for name, reason in obstacles if reason is not None}
    if refused:
        first, every = next(iter(refused)), ", ".join(map(repr, refused))
        raise PlanError(
            f"stage {stage.index}: block {first!r} cannot be recomputed: {refused[first]}",
            hint=f"leave {every} out of what is recomputed",
        )


def _has_home(graph: Graph, block: Block, positions: Sequence[int]) -> bool:
    """Whether the stage has parameters under the block's path, so that a module stands there."""
    return any(
        isinstance(value, State) and value.name.startswith(block.prefix)
        for position in positions
        for value in graph.nodes[position].values()
    )


def written_again(graph: Graph, block: Block, positions: Sequence[int]) -> tuple[str, ...]:
    """The names, in a block's module, of the states of which its second run writes copies."""
    found = statistics(analyse(graph), positions, block.prefix)
    below = len(in_graph_module(block.prefix))
    return tuple(sorted(in_graph_module(state.name)[below:] for state in found))


class Recomputed(nn.Module):
    """A recomputed block; parameters keep their names, without a prefix.

    Without gradients, a call just runs the block.

    Attributes:
        block: the module inside.
        statistics: the names of its states of which the second run writes copies.
    """

    block: nn.Module

    def __init__(self, block: nn.Module, *statistics: str) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a submodule: its parts are this module's own
        self.statistics = statistics
        share_members(self, block)

    def forward(self, *arguments: Tensor) -> Any:
        """The block's results; backward recomputes the tensors that it needs."""
        if not torch.is_grad_enabled():
            return self.block(*arguments)
        run = _Run(self.block, self.statistics)
        with saved_tensors_hooks(run.number, _value):
            results = self.block(*arguments)
        run.keep(arguments)
        return results


class _Enough(BaseException):
    """Ends a second run early, once it has saved all the tensors that the first run saved.

    It is no `Exception`, since a GraphModule prints those to stderr.
    """


class _Run:
    """One forward of a block, with everything that its second run needs."""

    def __init__(self, block: nn.Module, statistics: Sequence[str]) -> None:
        self._block = block
        self._statistics = statistics
        self._arithmetic = precision.current()
        self._stream = rng.current()
        self._saved = 0
        self._arguments: _Held | None = None
        self._parameters_or_grads: tuple[nn.Parameter | bool, ...] = ()
        self._values: dict[int, tuple[Tensor | _Held, int]] = {}

    def number(self, tensor: Tensor) -> tuple[_Run, int]:
        """Replace a saved tensor by this run and the tensor's number."""
        self._saved += 1
        return self, self._saved - 1

    def keep(self, arguments: Sequence[Tensor]) -> None:
        """Keep the arguments for the second run, if backward will need it."""
        if self._saved:
            # A parameter from elsewhere is given again as itself: its copy goes by its identity.
            self._parameters_or_grads = tuple(
                tensor if isinstance(tensor, nn.Parameter) else tensor.requires_grad
                for tensor in arguments
            )
            self._arguments = _Held(*(tensor.detach() for tensor in arguments))

    def value(self, number: int) -> Tensor:
        """The saved tensor of this number; a second request recomputes the block once more."""
        if number not in self._values:
            self._values = self._saved_again()
        held, at_version = self._values.pop(number)
        return as_saved(held if isinstance(held, Tensor) else held.tensors[0], at_version)

    def _saved_again(self) -> dict[int, tuple[Tensor | _Held, int]]:
        """Run the block and take what it saves and its version, by number; the arguments are held
        already."""
        assert self._arguments is not None
        tensors = self._arguments.tensors
        arguments = [
            known if isinstance(known, nn.Parameter) else tensor.detach().requires_grad_(known)
            for tensor, known in zip(tensors, self._parameters_or_grads, strict=True)
        ]
        statistics = {name: attrgetter(name)(self._block) for name in self._statistics}
        copies = {name: state.clone() for name, state in statistics.items()}
        statistic_of = {storage_key(copies[name]): state for name, state in statistics.items()}
        saved: list[tuple[Tensor, int]] = []

        def collect(tensor: Tensor) -> None:
            # Statistics are saved, and not read: they are there without the copy.
            tensor = statistic_of.get(storage_key(tensor), tensor)
            saved.append((tensor.detach(), version(tensor)))
            if len(saved) == self._saved:
                raise _Enough

        with (
            torch.enable_grad(),
            precision.computing(self._arithmetic),
            rng.stream.resumed(self._stream),
            saved_tensors_hooks(collect, _never),
            marking(AGAIN, True),
        ):
            try:
                functional_call(self._block, copies, tuple(arguments))
            except _Enough:
                pass
        assert len(saved) == self._saved, f"{len(saved)} tensors saved again of {self._saved}"
        inputs = {storage_key(tensor) for tensor in tensors}
        return {
            number: (tensor if storage_key(tensor) in inputs else _Held(tensor), at_version)
            for number, (tensor, at_version) in enumerate(saved)
        }


def _value(numbered: tuple[_Run, int]) -> Tensor:
    run, number = numbered
    return run.value(number)


def _never(_: None) -> Tensor:
    raise AssertionError("no backward goes through a second run")


class _Saving(torch.autograd.Function):
    """Saves tensors so that outer hooks see them."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Held:
    """Tensors that outer hooks see as saved, for as long as this lives."""

    def __init__(self, *tensors: Tensor) -> None:
        with torch.enable_grad():
            carrier = torch.empty(0, requires_grad=True)
            # The result and not its `grad_fn`: up to torch 2.12 that lets go what it has saved as
            # soon as the result is gone.
            self._result: Tensor = _Saving.apply(carrier, *tensors)  # type: ignore[no-untyped-call]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        kept: tuple[Tensor, ...] = self._result.grad_fn.saved_tensors  # type: ignore[union-attr]
        return kept
