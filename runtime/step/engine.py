"""Computes one stage: forward, and backward in two halves, with the tensors kept between them.

    forward         y = stage(x)                keeps what backward needs
    backward_input  dx                          gradients for the stage before, which waits for them
    backward_weight dw += ...                   gradients of this stage's parameters

The autograd engine does both halves at once in `backward_input`, as `torch.autograd.backward` must.
Between forward and backward it holds the *edges* of the outputs, not the outputs: their memory goes
as soon as they are sent. The joint engine runs the graphs of `split_backward`: two halves, or one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopipe.ir.torch_private import written_arguments
from autopipe.joint.graph_writer import step_copy
from autopipe.joint.joint_graph import storages
from autopipe.joint.offload import OFFLOADER
from autopipe.joint.split_backward import Joint
from autopipe.runtime.comm.host_copies import HostCopies
from autopipe.runtime.parameters.accumulate import accumulate
from autopipe.runtime.parameters.zero3 import GatheredStage
from autopipe.stages.node_calls import arrived
from autopipe.stages.op_tape import MADE, SEGMENT
from autopipe.stages.precision import Arithmetic, computing, current


class Engine(Protocol):
    """The interface of a stage's engine to the executor.

    All tensors are on the rank's device. Arguments are what a stage receives, in the order of
    `stage.incoming`, then its inputs of the batch; results are `stage.outgoing`, then the graph's.
    """

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage; with gradients enabled, keep what backward needs of this micro-batch.

        The arguments stay the caller's. The results are attached to autograd's graph by the
        autograd engine, and not by the joint one: the caller detaches what it keeps.
        """

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of forward's arguments, given those of its results (None: it has none).

        The caller owns what is returned; it may be in the memory of a parameter's `.grad`.
        """

    def backward_weight(self, microbatch: int) -> None:
        """Add to the parameters' `.grad` what `backward_input` has left out."""


@dataclass
class AutogradEngine:
    """Runs a stage's module under autograd."""

    module: nn.Module
    _kept: dict[int, tuple[list[GradientEdge | None], tuple[list[Tensor], ...]]] = field(
        default_factory=dict
    )

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own = [arrived(argument) for argument in arguments]
        results: tuple[Tensor, ...] = self.module(*(tensor for tensor, _ in own))
        if torch.is_grad_enabled():
            edges = [
                get_gradient_edge(r) if isinstance(r, Tensor) and r.requires_grad else None
                for r in results
            ]
            self._kept[microbatch] = edges, tuple(found for _, found in own)
        return results

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        edges, found = self._kept.pop(microbatch)
        roots = [
            (edge, gradient)
            for edge, gradient in zip(edges, gradients, strict=True)
            if edge is not None and gradient is not None
        ]
        if roots:
            torch.autograd.backward([edge for edge, _ in roots], [seed for _, seed in roots])
        return tuple(gradient[0] if gradient else None for gradient in found)

    def backward_weight(self, microbatch: int) -> None:
        """Nothing is left: autograd has done it in `backward_input`."""


@dataclass
class GatheredEngine:
    """Runs a stage under ZeRO-3 whose code does not say where its backward reads parameters.

    All of them are whole around each call.
    """

    engine: Engine
    gathered: GatheredStage

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with self.gathered.all():
            return self.engine.forward(microbatch, arguments)

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        with self.gathered.all():
            return self.engine.backward_input(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        with self.gathered.all():
            self.engine.backward_weight(microbatch)


@dataclass
class _Flight:
    """The tensors that the joint engine holds of one micro-batch.

    `for_input` ends with the parcels that were sent to the host. `bytes` are those counted, of
    which the second half of backward needs `bytes_for_weight`.
    """

    how: Arithmetic
    for_input: list[Any]
    for_weight: list[Tensor]
    bytes: int
    bytes_for_weight: int


class JointEngine:
    """Runs the graphs that a stage's joint graph was divided into.

    Parameters take their gradients one by one as they are made, so that hooks on their sums are
    called as in a backward (`parameters.accumulate`).

    Of one micro-batch `hold` is told that so many bytes are there (the names are those of `_Flight`
    and `Joint`):

        forward            bytes                               what it has saved
        backward_input     bytes + made + fresh                at most, while it runs
                           bytes_for_weight + fresh            what the second half needs
        backward_weight    bytes_for_weight + fresh + made     at most, while it runs
                           0

    Args:
        finish: compiles each graph; None: they run as they are.
        offloader: moves the parcels that the joint graph has (`joint.offload`).

    Attributes:
        hold: told of the bytes kept for backward, more of them or (negative) fewer: forward takes
            hold, each half lets go of what no later one needs. States, arguments and the gradients
            that `backward_input` is given are somebody else's.
    """

    def __init__(
        self,
        module: nn.Module,
        joint: Joint,
        finish: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
        offloader: HostCopies | None = None,
    ) -> None:
        self.module = module
        self.hold: Callable[[int], None] | None = None
        if joint.parcels is not None:
            assert offloader is not None, "something moves the parcels"
            offloader.hold = self._count
            setattr(module, OFFLOADER, offloader)  # the name that both codes call it by
            joint = joint.moved_by(offloader)
        self.joint = joint
        weight = joint.backward_weight
        last = joint.backward_input if weight is None else weight
        last = _accumulating(module, last, joint, compiled=finish is not None)
        finish = finish or _as_it_is
        self._forward = finish(joint.forward)
        self._input = finish(last if weight is None else joint.backward_input)
        self._weight = None if weight is None else finish(last)
        self._flights: dict[int, _Flight] = {}

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the stage; without gradients, the module itself."""
        if not torch.is_grad_enabled():
            results: tuple[Tensor, ...] = self.module(*arguments)
            return results
        joint, how = self.joint, current()
        early = 0 if joint.parcels is None else joint.kept
        self._count(early)  # parcels leave beside all that is kept: the most that there can be
        with _as_traced(how):
            fitted = [layout.fit(t) for layout, t in zip(joint.arguments, arguments, strict=True)]
            made = self._forward(*fitted)
        saved = made[joint.results :]
        sent = saved[len(joint.to_input) :] if joint.parcels is not None else ()
        flight = self._flights[microbatch] = _Flight(
            how=how,
            for_input=[*(saved[n] for n in joint.to_input), *sent],
            for_weight=[saved[n] for n in joint.to_weight],
            bytes=_bytes(saved[n] for n in joint.counted),
            bytes_for_weight=_bytes(saved[n] for n in joint.counted_weight),
        )
        self._count(flight.bytes - early)
        results = made[: joint.results]
        return results

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        joint, flight = self.joint, self._flights[microbatch]
        loose = [n for n in joint.unseeded if gradients[n] is not None]
        assert not loose, f"results {loose} have a gradient that backward was not traced for"
        if all(gradients[n] is None for n in joint.seeds):  # nobody has used the results
            self._count(-self._flights.pop(microbatch).bytes)
            return (None,) * len(joint.arguments)
        with _as_traced(flight.how):
            for n, layout in joint.seeds.items():
                seed = gradients[n]
                seed = layout.empty().zero_() if seed is None else layout.fit(seed)
                flight.for_input.append(seed)
            self._count(joint.made)
            made = self._input(flight.for_input)
        stash = made[len(joint.arguments) :]
        flight.for_weight += stash
        fresh = _bytes(stash[n] for n in joint.counted_stash)
        self._count(fresh)  # beside all that was kept: the most that there can be at once
        self._count(flight.bytes_for_weight - flight.bytes - joint.made)
        flight.bytes = flight.bytes_for_weight + fresh
        returned: tuple[Tensor | None, ...] = made[: len(joint.arguments)]
        return returned

    def backward_weight(self, microbatch: int) -> None:
        flight = self._flights.pop(microbatch, None)
        if flight is None:
            return
        if self._weight is not None:
            with _as_traced(flight.how):
                made = self.joint.made if self.joint.stash else 0
                self._count(made)
                self._weight(flight.for_weight)
                self._count(-made)
        self._count(-flight.bytes)

    def _count(self, bytes: int) -> None:
        if self.hold is not None and bytes:
            self.hold(bytes)


@contextmanager
def _as_traced(how: Arithmetic) -> Iterator[None]:
    """Within, graphs run on the step's copies of parameters, without autograd and autocast, which
    were traced into them."""
    with torch.no_grad(), computing(how), torch.autocast(how.device_type, enabled=False):
        yield


def _as_it_is(graph: fx.GraphModule) -> fx.GraphModule:
    return graph


def _accumulating(
    module: nn.Module, backward: fx.GraphModule, joint: Joint, *, compiled: bool
) -> fx.GraphModule:
    """A graph that ends with the parameters' gradients, giving each away when it is complete."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(backward.graph, copies)
    assert isinstance(outputs, tuple)
    others = len(outputs) - len(joint.parameters)
    graph.output(outputs[:others])
    given, completed = [], _completed(graph)
    for name, gradient in zip(joint.parameters, outputs[others:], strict=True):
        last = completed(gradient)
        with graph.inserting_after(last):
            parameter = graph.get_attr(name)
        with graph.inserting_after(parameter):
            given.append(graph.call_function(accumulate, (parameter, gradient)))
        given[-1].meta[SEGMENT] = last.meta.get(SEGMENT)
    if not compiled:  # a compiler may return one tensor for two that are equal
        for call in _only_readers(graph, given):
            call.kwargs = {"own": True}
    return fx.GraphModule(module, graph, class_name="Backward")


def _completed(graph: fx.Graph) -> Callable[[fx.Node], fx.Node]:
    """Gives the node after which nothing writes in a node's memory, as by its views.

    rows = empty(8, 4)                  the gradient
    mul(..., out=rows[:4])
    mul(..., out=rows[4:])              complete here
    """
    writers: dict[int, fx.Node] = {}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target: Any = node.target
        for tensor in written_arguments(target, node.args, node.kwargs):
            writers.update(dict.fromkeys(storages([tensor]), node))

    def last(made: fx.Node) -> fx.Node:
        found = (writers[storage] for storage in storages([made]) if storage in writers)
        return max((made, *found), key=order.__getitem__)

    return last


def _only_readers(graph: fx.Graph, given: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The calls whose gradients lie in memory that the graph has made and nobody reads besides."""
    of_storage = defaultdict[int, set[fx.Node]](set)
    for node in graph.nodes:
        for storage in storages([node]) if MADE in node.meta else ():
            of_storage[storage].add(node)
    for call in given:
        gradient = call.args[1]
        assert isinstance(gradient, fx.Node)
        holders = {n for storage in storages([gradient]) for n in of_storage[storage]}
        made_here = all(n.op == "call_function" and n.target is not step_copy for n in holders)
        if made_here and all(holders.issuperset({*n.users} - {call}) for n in holders):
            yield call


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
