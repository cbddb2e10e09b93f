"""Every op of a run written down, from below autograd: which op, on what, and what it made.

    tape = Tape()
    given = tape.given(x)
    with tape:
        y = torch.tanh(x @ w)         mm = aten.mm(x, w);  tanh = aten.tanh(mm)
    tape.node(y)                      tanh

`torch.fx.experimental.proxy_tensor.make_fx` does the same, and much besides that nobody asks for
here: symbolic sizes, decompositions, constants that are computed, a copy of every result. Beside
ops on fake tensors, which do not compute, that is most of what a trace takes.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.fake import TorchDispatchMode, storage_key

MADE = "autopipe_made"
"""The key in a node's meta under which `Made` stands."""

_running = threading.local()


class Made:
    """What is asked of the tensors that a node has made.

    Attributes:
        storages: bytes of what they lie in, by `storage_key`; no other storage gets the key of one
            as long as this is held.
        dtype: the first tensor's; None for a node that has made none.
    """

    __slots__ = ("_held", "dtype", "storages")

    def __init__(self, value: Any) -> None:
        items = value if isinstance(value, list | tuple) else (value,)
        tensors = [item for item in items if isinstance(item, Tensor)]
        self._held = [tensor.untyped_storage() for tensor in tensors]
        self.storages = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
        self.dtype: torch.dtype | None = tensors[0].dtype if tensors else None


class Tape(TorchDispatchMode):
    """The ops that run while it is entered, in their order.

    A tensor that is neither given nor made by one of them is a constant: a `get_attr` node.

    Attributes:
        graph: a node for each op; of one that makes several tensors, also one for each of them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        # By identity, and weakly: whoever keeps a tensor makes autograd copy it.
        self._nodes = WeakTensorKeyDictionary()

    def given(self, tensor: Tensor) -> fx.Node:
        """A tensor that the ops may read."""
        return self._made(tensor, self.graph.placeholder(f"arg{len(self.graph.nodes)}"))

    def node(self, value: Any) -> Any:
        """The node that has made a tensor, or has written it last; other values as they are."""
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
        if func.namespace == "prim":  # asks where a tensor is
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        call = self.graph.create_node(
            "call_function",
            func,
            map_aggregate(tuple(args), self.node),
            map_aggregate(kwargs, self.node),
            name=name,
        )
        result = func(*args, **kwargs)
        self._made(result, call)
        if isinstance(result, list | tuple):
            for position, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._made(item, self.graph.call_function(operator.getitem, (call, position)))
        return result

    def _made(self, value: Any, node: fx.Node) -> fx.Node:
        node.meta[MADE] = Made(value)
        if isinstance(value, Tensor):
            self._nodes[value] = node
        return node


def running() -> Tape | None:
    """The tape that runs in this thread."""
    return getattr(_running, "tape", None)


@contextmanager
def marking(key: str, value: object) -> Iterator[None]:
    """Put something into the meta of what is written down meanwhile; without a tape nothing."""
    tape = running()
    nodes: Any = tape.graph.nodes if tape else ()
    before = len(nodes)
    try:
        yield
    finally:  # a block that runs again in backward may end in the middle of an op
        for node in islice(reversed(nodes), len(nodes) - before):
            node.meta[key] = value
