"""Find keys and values that were repeated, so that each head of the queries has its own.

    k [b, 8, t, d] --unsqueeze, expand, reshape--> [b, 32, t, d]     `repeat_interleave(4, 1)`

Heads in groups share keys (Ainslie et al., 2023, arXiv:2305.13245). An attention op that knows of
groups reads the keys unrepeated, and keeps a quarter of the bytes for backward here.
"""

from __future__ import annotations

from autopipe.ir.dataflow import Dataflow, analyse, maker
from autopipe.ir.graph import Graph, Node, Value, arguments

_RESHAPES = frozenset("reshape view _unsafe_view".split())
_REPEATING = _RESHAPES | {"clone", "contiguous", "expand", "unsqueeze"}


def before_repeat(
    graph: Graph, key: Value, value: Value, *, grad: bool
) -> tuple[Value, Value] | None:
    """Keys and values before both were repeated equally often; None: they are not.

    Args:
        key, value: [b, heads, t, d], as an attention reads them.
        grad: whether gradients are recorded there, and so must be where they are repeated.
    """
    flow = analyse(graph)
    keys, values = (_repeated(flow, read, grad=grad) for read in (key, value))
    if keys is None or values is None:
        return None
    few, many = (graph.spec(found).shape[1] for found in (keys, values))
    return (keys, values) if few == many else None


def _repeated(flow: Dataflow, value: Value, *, grad: bool) -> Value | None:
    """The value that was repeated along dim 1 to make this one; None: there is none."""
    graph = flow.graph
    node, parts, shape = maker(graph, value), list[Node](), graph.spec(value).shape
    if node is None or len(shape) != 4:
        return None
    if node.short == "repeat_interleave":
        given = arguments(node)
        each = isinstance(given["repeats"], int) and given["dim"] in (1, -3)
        return _as_it_was(flow, node, value) if each and node.grad == grad else None
    while node is not None and node.short in _REPEATING and node.grad == grad:
        parts.append(node)
        node = None if node.short == "unsqueeze" else maker(graph, node.args[0])
    shorts = [part.short for part in parts if part.short not in ("clone", "contiguous")]
    if len(shorts) != 3 or shorts[0] not in _RESHAPES or shorts[1:] != ["expand", "unsqueeze"]:
        return None
    fewer = _as_it_was(flow, parts[-1], value)
    wide = next(part.outputs[0] for part in parts if part.short == "expand")
    if fewer is None or wide is None or len(wide.shape) != 5:
        return None
    if arguments(parts[-1])["dim"] % 5 != 2:
        return None  # before the heads: all of them in turn, k0 k1 k0 k1
    b, heads, times, t, d = wide.shape
    same = graph.spec(fewer).shape == (b, heads, t, d) and shape == (b, heads * times, t, d)
    return fewer if same else None


def _as_it_was(flow: Dataflow, first: Node, repeated: Value) -> Value | None:
    """What `first` reads, if neither that nor what is made of it is written in place later."""
    fewer = first.values()[0]
    writers = {p for v in (fewer, repeated) for p in flow.writers.get(flow.root[v], ())}
    return fewer if all(p < flow.graph.index[first.name] for p in writers) else None
