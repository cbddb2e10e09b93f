"""Trace a lowered stage and its backward as one graph of torch's own ops: the joint graph.

The stage runs once on fake tensors under autograd, whose backward is part of the run, while a tape
records every op (`stages.op_tape`). The graph has exactly the ops of the run: ops in place stay in
place, autocast has become casts, a read is checked by an op, and a recomputed block's second run is
part of the backward. Random ops still draw from the streams of `stages.rng`.

    lowered stage    y = linear(x, w)                  one node, differentiable
    joint graph      t = w.t();  y = mm(x, t)          forward
                     dx = mm(dy, t.t());  dw = ...     backward, from dy on
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.ir.dataflow import statistics_written
from autopipe.ir.opaque_ops import OPAQUE
from autopipe.ir.torch_private import fake_mode, quiet, views, writes, written_arguments
from autopipe.joint.uncast import uncast
from autopipe.stages.lower import Lowered, parameters_of
from autopipe.stages.node_calls import place_now
from autopipe.stages.op_tape import MADE, Tape
from autopipe.stages.precision import arithmetic, computing, wide_statistics
from autopipe.stages.recompute import Recomputed
from autopipe.stages.rng import DRAWN, draw


class CannotSplit(Exception):
    """The stage has no joint graph; autograd must run its backward in one piece."""


@dataclass(frozen=True)
class Layout:
    """A tensor without its values. `gradient`: whether backward computes its gradient."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    gradient: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        return cls(shape, strides, tensor.dtype, tensor.device, tensor.requires_grad)

    @classmethod
    def dense(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Layout:
        """The layout of a contiguous tensor."""
        strides = torch.empty(shape, device="meta").stride()
        return cls(tuple(shape), strides, dtype, torch.device(device))

    def empty(self) -> Tensor:
        """A new tensor of this layout, with arbitrary values."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(self.gradient)

    def fit(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it has this layout, else a copy that has it."""
        sizes = zip(self.shape, self.strides, tensor.stride(), strict=True)
        if all(mine == its for size, mine, its in sizes if size > 1):
            return tensor
        room = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return room.copy_(tensor)


@dataclass(frozen=True)
class JointGraph:
    """The parts of a joint graph; nodes are in the order of the run.

    Attributes:
        states: nodes of parameters and buffers, with their names.
        copies: nodes of low-precision copies of parameters, with the parameters' names and dtype.
        seeds: nodes of the gradients that backward starts from, by the position of the result.
        unseeded: positions of results that need a gradient but never get one.
        results: what the stage returns: nodes, numbers, None.
        of_arguments: the node of each argument's gradient; None: it has none.
        of_parameters: the nodes of the parameters' gradients, by name, before the cast (`uncast`).
    """

    states: Mapping[fx.Node, str]
    copies: Mapping[fx.Node, tuple[str, torch.dtype]]
    arguments: Sequence[fx.Node]
    seeds: Mapping[int, fx.Node]
    unseeded: Sequence[int]
    forward: Sequence[fx.Node]
    backward: Sequence[fx.Node]
    results: Sequence[Any]
    of_arguments: Sequence[fx.Node | None]
    of_parameters: Mapping[str, fx.Node]


def differentiate(
    lowered: Lowered,
    arguments: Sequence[Layout],
    seeds: Sequence[Layout | None],
    precision: str = "fp32",
    run: Callable[..., Any] | None = None,
) -> JointGraph:
    """Trace a stage with its backward on fake tensors; no tensor of the stage changes.

    Args:
        arguments: the layouts of the stage's arguments, and which of them need a gradient.
        seeds: for each result, the layout of its gradient; None: it never gets one. A seed of a
            result that needs no gradient is ignored, as by autograd.
        precision: "fp32", "bf16" or "fp16". A surrounding autocast is traced as well.
        run: runs the stage's module in the place of a call of it.

    Raises:
        CannotSplit: the stage has an opaque op, or an op that cannot be traced.
    """
    _refuse_opaque(lowered.module)
    seeded = {n: seed for n, seed in enumerate(seeds) if seed is not None}
    tape = Tape(place_now) if run is None else Tape()  # whoever runs it knows each node himself
    step = _Step(lowered, tuple(seeded), precision, tape, run or lowered.module)
    with fake_mode(), wide_statistics(lowered.wide), torch.enable_grad(), _uncached(), quiet():
        states = {name: _fake(state) for name, state in step.states()}
        leaves = [layout.empty() for layout in (*arguments, *seeded.values())]
        for tensor in (*states.values(), *leaves):
            tape.given(tensor)
        try:
            with tape, _segments(lowered.module, tape):
                results = torch.func.functional_call(step, states, tuple(leaves))
        except RuntimeError as error:  # torch's own, of ops and of kernels of fake tensors
            raise CannotSplit(f"{type(error).__name__}: {error}") from error
    names = [name.removeprefix("stage.") for name in states]
    return step.parts(tuple(tape.node(value) for value in results), names)


@contextmanager
def _segments(stage: nn.Module, tape: Tape) -> Iterator[None]:
    """Within, ops recorded in a block's forward or backward have the block's path as segment.

    Backward enters a block when the gradient of one of its results is complete, and leaves it when
    that of one of its arguments is.
    """
    entered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def watch(tensor: Any, segment: str | None) -> None:
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None and tensor not in entered:
            entered[tensor] = True
            hook = partial(setattr, tape, "segment", segment)
            tensor.register_hook(lambda _: hook())  # type: ignore[no-untyped-call]

    def enter(path: str, block: nn.Module, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            watch(argument, None)
        tape.segment = path

    def leave(path: str, block: nn.Module, arguments: tuple[Any, ...], results: Any) -> None:
        tape.segment = None
        for result in results:
            watch(result, path)

    blocks = {
        path: part
        for path, part in stage.named_modules()
        if path and isinstance(part, Recomputed | fx.GraphModule)
    }
    with ExitStack() as stack:
        for path, block in blocks.items():
            for handle in (
                block.register_forward_pre_hook(partial(enter, path)),
                block.register_forward_hook(partial(leave, path)),
            ):
                stack.callback(handle.remove)
        yield


@contextmanager
def _uncached() -> Iterator[None]:
    """Within, turn off autocast's cache: a cached cast would be missing from the tape."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _fake(state: Tensor) -> Tensor:
    learns, fake = state.requires_grad, Layout.of(state.detach()).empty()
    return nn.Parameter(fake, learns) if isinstance(state, nn.Parameter) else fake


def _refuse_opaque(module: nn.Module) -> None:
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            for op in map(str, (node.target, *node.args)):
                if op in OPAQUE:
                    raise CannotSplit(f"{op} reads or keeps what only its real kernel knows")


class _Step(nn.Module):
    """Runs the forward and backward of one micro-batch, and finds the parts of their trace."""

    run: Callable[..., Any]

    def __init__(
        self,
        lowered: Lowered,
        seeded: tuple[int, ...],
        precision: str,
        tape: Tape,
        run: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.tape, self.stage = tape, lowered.module
        self.__dict__["run"] = run  # no second module of the same parameters
        self.low, self.precision = lowered.low, precision
        self.seeded = seeded
        self.roots: list[int] = []
        self.unseeded: list[int] = []
        self.results = 0
        self.copied: set[fx.Node] = set()
        self.ran: set[fx.Node] = set()

    def states(self) -> list[tuple[str, Tensor]]:
        """Parameters and buffers by name."""
        return [*self.named_parameters(), *self.named_buffers()]

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Run both; returns (*results, *gradients): of states and arguments, None: it has none."""
        count = len(tensors) - len(self.seeded)
        arguments, starts = tensors[:count], tensors[count:]
        states = [state for _, state in self.states()]
        devices = [tensor.device.type for tensor in (*states, *tensors)]
        lowered = parameters_of(self.stage, self.low)
        before = set(self.tape.graph.nodes)
        numerics = arithmetic(self.precision, next(iter(devices), "cpu"), lowered)
        self.copied = set(self.tape.graph.nodes) - before
        with computing(numerics):
            results = self.run(*arguments)
        self.ran = set(self.tape.graph.nodes)
        self.results = len(results)
        live = [n for n, x in enumerate(results) if isinstance(x, Tensor) and x.requires_grad]
        roots = {n: x for n, x in zip(self.seeded, starts, strict=True) if n in live}
        self.roots = list(roots)
        self.unseeded = [n for n in live if n not in roots]
        leaves = [*states, *arguments]
        learning = [leaf for leaf in leaves if leaf.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(learning)
        if roots and learning:
            with ExitStack() as stack:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(torch.autograd.set_detect_anomaly(False))  # reads values
                for device in set(devices):  # backward runs outside of autocast
                    stack.enter_context(torch.autocast(device, enabled=False))
                grads = torch.autograd.grad(
                    [results[n] for n in roots], learning, list(roots.values()), allow_unused=True
                )
        gradients = iter(grads)
        return (*results, *(next(gradients) if x.requires_grad else None for x in leaves))

    def parts(self, outputs: Sequence[Any], names: Sequence[str]) -> JointGraph:
        """Find the parts on the tape of `forward`, whose first inputs are the states `names`."""
        graph = self.tape.graph
        given = list(graph.find_nodes(op="placeholder"))
        calls = [node for node in graph.nodes if node.op != "placeholder"]
        constant = next((node for node in calls if node.op != "call_function"), None)
        if constant is not None:
            raise CannotSplit(f"{constant.target} is a tensor that the trace has made a constant")
        states = dict(zip(given, names, strict=False))
        first = len(given) - len(self.seeded)
        starts = dict(zip(self.seeded, given[first:], strict=True))
        gradients = outputs[self.results :]
        copies = {node: node.args[0] for node in calls if node in self.copied}
        return JointGraph(
            states=states,
            copies={copy: (states[of], copy.meta[MADE].dtype) for copy, of in copies.items()},
            arguments=given[len(names) : first],
            seeds={n: starts[n] for n in self.roots},
            unseeded=self.unseeded,
            forward=_drawing([n for n in calls if n in self.ran and n not in copies]),
            backward=_drawing([n for n in calls if n not in self.ran]),
            results=outputs[: self.results],
            of_arguments=gradients[len(names) :],
            of_parameters={
                n: uncast(g) for n, g in zip(names, gradients, strict=False) if g is not None
            },
        )


def is_of_state(graph: JointGraph, node: fx.Node) -> bool:
    """Whether a node is a state, a copy of one or view (of several): readable at any time."""
    while node not in graph.states and node not in graph.copies:
        if node.target is not operator.getitem and (not views(node.target) or writes(node.target)):
            return False
        node = node.all_input_nodes[0]
    return True


def storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages that the values of these nodes lie in."""
    return {storage for node in nodes for storage in node.meta[MADE].storages}


def one_of_each(nodes: Sequence[fx.Node], besides: Collection[int]) -> list[int]:
    """Positions of the first node in each storage that is not among `besides`."""
    first: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for storage in storages([node]).difference(besides):
            first.setdefault(storage, position)
    return sorted(first.values())


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the storages of these nodes, each counted with every node."""
    return sum(sum(node.meta[MADE].storages.values()) for node in nodes)


def called(call: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The op of a call and its arguments; of a random call those of the op that draws."""
    return (call.args[0], call.args[2:]) if call.target is draw else (call.target, call.args)


def written(call: fx.Node) -> set[int]:
    """The storages that a call writes in place, running statistics among them."""
    op, args = called(call)
    found = written_arguments(op, args, call.kwargs) + statistics_written(op, args, call.kwargs)
    return storages(node for node in found if isinstance(node, fx.Node))


def _drawing(nodes: list[fx.Node]) -> list[fx.Node]:
    """Make each random call draw from the stream of the graph node it was traced for."""
    seen: set[str] = set()
    for node in nodes:
        name, tags = node.meta.get(DRAWN), getattr(node.target, "tags", ())
        if name is None or torch.Tag.nondeterministic_seeded not in tags:
            continue
        if name in seen:
            raise CannotSplit(f"{name} draws twice from its stream")
        seen.add(name)
        op: Any = node.target
        node.args = (op, name, *node.args)
        node.target = draw
    return nodes
