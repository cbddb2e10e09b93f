"""Record every op of a run below autograd: the op, its arguments and its results.

    tape = Tape()
    given = tape.given(x)
    with tape:
        y = torch.tanh(x @ w)         mm = aten.mm(x, w);  tanh = aten.tanh(mm)
    tape.node(y)                      tanh

`torch.fx.experimental.proxy_tensor.make_fx` does the same and more than is needed here: symbolic
sizes, decompositions, computed constants, a copy of every result. Ops on fake tensors compute
nothing, so this extra work would be most of the time of a trace.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.ir.torch_private import TorchDispatchMode, storage_key

MADE = "autopipe_made"
"""The key of a node's `Made` in its meta."""

SEGMENT = "autopipe_segment"
"""The key of the path of the block that a node was recorded in; None: in no block."""

AGAIN = "autopipe_again"
"""The key in the meta of a node of backward that repeats what forward has computed."""

PLACE = "autopipe_place"
"""The key in a node's meta under which the user's line stands that it was traced from."""

ASKED = "autopipe_asked"
"""The key in the meta of a node of forward that a plan asks backward to repeat."""

_running = threading.local()


class Made:
    """Facts about the tensors that a node made: storages, dtype and shape.

    Attributes:
        storages: bytes of their storages, by `storage_key`; no other storage gets the same key
            while this object lives.
        dtype, shape: the first tensor's; None if the node made no tensor, or if it is not known.
    """

    __slots__ = ("_held", "dtype", "shape", "storages")

    def __init__(self, value: Any) -> None:
        items = value if isinstance(value, list | tuple) else (value,)
        tensors = [item for item in items if isinstance(item, Tensor)]
        self._held = [tensor.untyped_storage() for tensor in tensors]
        self.storages = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
        self.dtype: torch.dtype | None = tensors[0].dtype if tensors else None
        self.shape: torch.Size | None = tensors[0].shape if tensors else None

    def sized(self, sizes: Sequence[int]) -> Made:
        """The same with other bytes of its storages, in their order; the shape is not known."""
        made = Made(None)
        made._held, made.dtype = self._held, self.dtype
        made.storages = dict(zip(self.storages, sizes, strict=True))
        return made

    def again(self, renamed: Mapping[int, int], kept: Collection[int]) -> Made:
        """The same of a node that runs a second time, with keys of its own for its storages.

        Args:
            renamed: by the key of a storage that of its second one.
            kept: storages that it only looks at, as a view does, and that are still there.
        """
        made = Made(None)
        made._held, made.dtype, made.shape = self._held, self.dtype, self.shape
        for key, size in self.storages.items():
            own_key = key if key in kept else renamed[key]
            made.storages[own_key] = size
        return made


class Tape(TorchDispatchMode):
    """Records the ops that run within it, in order.

    A tensor that is neither given nor made by a recorded op is a constant: a `get_attr` node.

    Args:
        place: gives the user's line of the op that runs now; "": of none.

    Attributes:
        graph: a node for each op, and one for each tensor of an op with several results.
        segment: what the nodes recorded from now on have as `SEGMENT`.
    """

    def __init__(self, place: Callable[[], str] = str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place
        self.graph = fx.Graph()
        self.segment: str | None = None
        # By identity, and weakly: whoever keeps a tensor makes autograd copy it.
        self._nodes = WeakTensorKeyDictionary()

    def given(self, tensor: Tensor) -> fx.Node:
        """Add a tensor that the ops may read, as a placeholder node."""
        return self._made(tensor, self.graph.placeholder(f"arg{len(self.graph.nodes)}"))

    def node(self, value: Any) -> Any:
        """The node that made a tensor or wrote it last; other values are returned unchanged."""
        if not isinstance(value, Tensor):
            return value
        if value not in self._nodes:
            self._made(value, self.graph.get_attr(f"constant{len(self.graph.nodes)}"))
        return self._nodes[value]

    def __enter__(self) -> Any:
        _running.tape = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _running.tape = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # two of three calls; a fake tensor knows it
            return args[0].device
        name = func.overloadpacket.__name__
        call = self.graph.create_node(
            "call_function",
            func,
            map_aggregate(tuple(args), self.node),
            map_aggregate(kwargs, self.node),
            name=name,
        )
        call.meta[PLACE] = self._place()
        result = func(*args, **kwargs)
        self._made(result, call)
        if isinstance(result, list | tuple):
            for position, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._made(item, self.graph.call_function(operator.getitem, (call, position)))
        return result

    def _made(self, value: Any, node: fx.Node) -> fx.Node:
        node.meta[MADE] = Made(value)
        node.meta[SEGMENT] = self.segment
        if isinstance(value, Tensor):
            self._nodes[value] = node
        return node


def running() -> Tape | None:
    """The tape that records in this thread; None: there is none."""
    return getattr(_running, "tape", None)


@contextmanager
def marking(key: str, value: object) -> Iterator[None]:
    """Within, set `meta[key] = value` on each recorded node; without a tape, do nothing."""
    tape = running()
    nodes: Any = tape.graph.nodes if tape else ()
    before = len(nodes)
    try:
        yield
    finally:  # a block that runs again in backward may end in the middle of an op
        for node in islice(reversed(nodes), len(nodes) - before):
            node.meta[key] = value
