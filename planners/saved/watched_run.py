"""Run a lowered graph, and note which of its nodes make and which save each storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopipe.errors import ModelError
from autopipe.ir.dataflow import Dataflow, analyse
from autopipe.ir.graph import Node, shape_at
from autopipe.ir.partition import partition
from autopipe.ir.repeats import Short
from autopipe.ir.torch_private import fake_mode, storage_key
from autopipe.joint.joint_graph import JointGraph, Layout, differentiate
from autopipe.joint.split_backward_layouts import seeds_of_loss
from autopipe.stages.dry_run import fake_state
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.node_calls import NODE_NAME
from autopipe.stages.op_tape import SEGMENT, marking
from autopipe.stages.precision import Arithmetic, arithmetic, current, saves_wide, wide_statistics
from autopipe.util.progress import Done

POSITION = "autopipe_position"
"""The key in a tape's node's meta of the position of the graph's node that it was recorded for."""


class _Packed(NamedTuple):
    """A tensor that autograd saves: its storage and the bytes of that, and the node that saves it.

    `tensor` is gone once autograd keeps it no longer.
    """

    storage: int
    bytes: int
    saver: int
    tensor: weakref.ref[Tensor]


@dataclass
class KeptStorage:
    """A saved storage: the node that makes it, and the nodes that save it."""

    bytes: int
    made: int
    savers: list[int]


class TensorLook(NamedTuple):
    """A tensor's metadata; `carries`: whether it requires a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    carries: bool


class Watch(fx.Interpreter):
    """Interprets a lowered graph and notes which nodes make and which save each storage."""

    def __init__(
        self,
        flow: Dataflow,
        module: fx.GraphModule,
        owned: set[int],
        segments: Sequence[str | None],
        done: Done,
    ) -> None:
        super().__init__(module)
        self.looks: dict[int, tuple[TensorLook | None, ...]] = {}
        self.extra_traceback = False  # torch would add its own names of nodes to a sentence
        self._nodes, self._index = flow.graph.nodes, flow.graph.index
        self._owned = owned
        self._made: dict[int, int] = {}
        self._packed: list[_Packed] = []
        self._writing = {p for positions in flow.writers.values() for p in positions}
        self._alive: list[torch.UntypedStorage] = []  # one that is gone would lend its address
        self._position = 0
        self._done = done
        self._segments = segments

    def run_node(self, n: fx.Node) -> Any:
        name = n.meta.get(NODE_NAME)
        if name is not None:
            self._position = self._index[name]
        with ExitStack() as stack:
            stack.enter_context(marking(POSITION, self._position))
            stack.enter_context(marking(SEGMENT, self._segments[self._position]))
            try:
                result = super().run_node(n)
            except RuntimeError as error:
                if name is None or not current().autocast:  # else a bug
                    raise
                raise _refused(self._nodes[self._position], error) from error
        self._done()
        made = result if isinstance(result, list | tuple) else [result]
        if name is not None:
            self.looks[self._position] = tuple(map(_look, made))
        for tensor in made:
            if isinstance(tensor, Tensor):
                key = storage_key(tensor)
                self._alive.append(tensor.untyped_storage())
                # A stage that writes a received tensor writes a copy; the write makes that copy.
                if key not in self._made or self._position in self._writing:
                    self._made[key] = self._position
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key in self._owned:
            return tensor
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._made.setdefault(key, self._position)
        kept = tensor.detach()
        packed = _Packed(key, storage.nbytes(), self._position, weakref.ref(kept))
        self._packed.append(packed)
        return kept

    def kept(self) -> dict[int, KeptStorage]:
        """The storages that autograd still keeps, now that the graph has run.

        What only a branch without a gradient had saved is gone, as in the runtime: the scores
        that groups of experts are picked by, say.
        """
        found: dict[int, KeptStorage] = {}
        for key, size, position, tensor in self._packed:
            if tensor() is not None:
                storage = found.setdefault(key, KeptStorage(size, self._made[key], []))
                storage.savers.append(position)
        return found


def _look(made: Any) -> TensorLook | None:
    if not isinstance(made, Tensor):
        return None
    return TensorLook(tuple(made.shape), made.stride(), made.dtype, made.requires_grad)


@dataclass
class WatchedStage:
    """A short graph as one stage on tensors without memory, to be run within `watched_stage`."""

    flow: Dataflow
    lowered: Lowered
    inputs: list[Tensor]
    arithmetic: Arithmetic
    precision: str
    segments: Sequence[str | None]
    owned: set[int]

    def watch(self, done: Done = lambda: None) -> Watch:
        """The `Watch` for a run."""
        return Watch(self.flow, self.lowered.module, self.owned, self.segments, done)

    def joint(self, watch: Watch) -> JointGraph:
        """The joint graph of the whole model, its nodes marked by position and block.

        Raises:
            CannotSplit: the graph cannot be differentiated.
        """
        layouts = [Layout.of(x) for x in self.inputs]
        seeds = seeds_of_loss(self.flow.graph)
        return differentiate(self.lowered, layouts, seeds, self.precision, watch.run)


@contextmanager
def watched_stage(
    short: Short, precision: str, rows: int, segments: Sequence[str | None]
) -> Iterator[WatchedStage]:
    """Lower a short graph for a number of rows.

    Args:
        segments: the block of each node; empty: there are no blocks.
    """
    graph = short.graph
    flow = analyse(graph)
    (whole,) = partition(flow, ())
    with fake_mode(), wide_statistics(saves_wide(graph.nodes, precision)):
        states = {name: fake_state(graph, name) for name in whole.states}
        inputs = [
            torch.empty(shape_at(graph.inputs[path], rows), dtype=graph.inputs[path].dtype)
            for path in whole.inputs
        ]
        lowered = lower(graph, whole, (), states, None, rows, last=True, precision=precision)
        how = arithmetic(precision, "cpu", [states[name] for name in lowered.low])
        owned = {storage_key(t) for t in (*states.values(), *inputs, *how.copies.values())}
        inside = segments or [None] * len(graph.nodes)
        yield WatchedStage(flow, lowered, inputs, how, precision, inside, owned)


def _refused(node: Node, error: RuntimeError) -> ModelError:
    """The error for an op that torch refuses for the dtypes that autocast gives its arguments."""
    return ModelError(
        f"{node.place or node.name}: under autocast {node.short} raises {type(error).__name__}: "
        f"{str(error).splitlines()[0]}",
        hint="compute it in fp32, as torch.autocast asks for: x.float(); or plan with --precision "
        "fp32",
    )
