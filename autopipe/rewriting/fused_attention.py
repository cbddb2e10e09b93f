"""Put one op in the place of an attention that is written out, whose scores are then never whole.

    q, k, v, mask ── scaled_dot_product_attention ── o

The scores of 32 heads over 8192 tokens are 4 GiB a row in 16 bits. Written out, they are made
whole, go through memory at each step, and are kept for backward; the op's kernels keep the result
and one number for each query (FlashAttention, Dao et al., 2022, arXiv:2205.14135; Rabe and Staats,
2021, arXiv:2112.05682). Both compute the same up to rounding, which is what compiled stages
promise: so it is done for those, and the plan says so (`Plan.fused_attention`).

Groups of heads read their keys and values unrepeated where kernels of GPUs take them so: without a
mask, in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch

from autopipe.ir import check
from autopipe.ir.dataflow import written_by
from autopipe.ir.graph import (
    Arg,
    Graph,
    Node,
    Ref,
    TensorSpec,
    Value,
    arguments,
    short_name,
    values_in,
)
from autopipe.planfile.node_names import NodeName
from autopipe.rewriting.attentions import Attention, Mask, attentions
from autopipe.rewriting.repeated_heads import before_repeat

ATTENTION = "aten.scaled_dot_product_attention.default"

_Operand = tuple[Value, TensorSpec]


def fused(graph: Graph) -> Graph:
    """The graph with its attentions as single ops, of keys and values that are not repeated.

    The node with an attention's result keeps its name. A graph without attentions is returned as it
    is.
    """
    names, replacements = set(graph.index), dict[str, list[Node]]()
    for attention in attentions(graph):
        replacements[attention.last.name] = _as_one(graph, attention, names)
    graph = _replaced(graph, replacements) if replacements else graph
    replacements = dict(_in_groups(graph))
    return _replaced(graph, replacements) if replacements else graph


def _replaced(graph: Graph, replacements: dict[str, list[Node]]) -> Graph:
    """The graph with some nodes replaced, by name; nodes that only those have read are dropped."""
    read_before = {name for node in graph.nodes for name in _read(node.values())}
    read = set(_read(values_in(graph.outputs)))
    nodes: list[Node] = []
    backwards = (
        new for old in reversed(graph.nodes) for new in reversed(replacements.get(old.name, [old]))
    )
    for node in backwards:
        if node.name in read or node.name not in read_before or written_by(node):
            nodes.append(node)
            read.update(_read(node.values()))
    return check.after("fused_attention", replace(graph, nodes=tuple(reversed(nodes))))


def _read(values: Iterable[Value]) -> Iterator[str]:
    """The names of the nodes that make values."""
    return (value.node for value in values if isinstance(value, Ref))


def _in_groups(graph: Graph) -> Iterator[tuple[str, list[Node]]]:
    """The replacements of attentions whose keys and values are repeated."""
    for node in graph.nodes:
        if node.op != ATTENTION:
            continue
        given = arguments(node)
        query, key, value, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
        if mask is not None or graph.spec(query).dtype not in (torch.bfloat16, torch.float16):
            continue
        grouped = given["enable_gqa"]
        fewer = None if grouped else before_repeat(graph, key, value, grad=node.grad)
        if fewer is not None:
            args = (query, *fewer, None, given["dropout_p"], given["is_causal"])
            kwargs = {"scale": given["scale"], "enable_gqa": True}
            yield node.name, [replace(node, args=args, kwargs=kwargs)]


def _as_one(graph: Graph, attention: Attention, names: set[str]) -> list[Node]:
    """The nodes that replace an attention."""
    last, mask, dropout = attention.last, attention.scores.mask, attention.dropout
    new, output = _NewNodes(last, names), last.outputs[0]
    assert output is not None
    values = (attention.query, attention.key, attention.value)
    operands = [(value, graph.spec(value)) for value in values]
    if mask is not None:
        mask_operand, keyless = new.mask(mask, graph.spec(mask.value))
        operands.append(mask_operand)
        if keyless is not None:
            query, look = operands[0]
            operands[0] = new.add("aten.masked_fill.Scalar", (query, keyless[0], 0.0), look)
    lifted = len(output.shape) == 3
    if lifted:  # kernels want four dims
        operands = [new.lifted(*operand) for operand in operands]
    args: list[Arg] = [value for value, _ in operands] + [None] * (4 - len(operands))
    args += [arguments(dropout)["p"] if dropout is not None else 0.0, False]
    extra: dict[str, Any] = {"kwargs": {"scale": attention.scores.scale}}
    if dropout is not None:
        extra["stream"] = dropout.stream or dropout.name
    look = TensorSpec((1, *output.shape), output.dtype) if lifted else output
    result = new.add(ATTENTION, tuple(args), look, **extra)
    if lifted:
        new.add("aten.squeeze.dim", (result[0], 0), output)
    *before, end = new.nodes
    return [*before, replace(end, name=last.name)]


@dataclass
class _NewNodes:
    """Collects new nodes to stand before `last`, with names that no other node has."""

    last: Node
    names: set[str]
    nodes: list[Node] = field(default_factory=list)

    def add(self, op: str, args: tuple[Arg, ...], look: TensorSpec, **how: Any) -> _Operand:
        """Add a node whose result has this shape and dtype."""
        last_name = NodeName.of(self.last.name)
        assert last_name is not None, "a node's name has a slash"
        numbered = (str(NodeName(last_name.module, short_name(op), n)) for n in count())
        name = next(name for name in numbered if name not in self.names)
        self.names.add(name)
        fields: dict[str, Any] = {"kwargs": {}, "outputs": (look,), **how}
        self.nodes.append(replace(self.last, name=name, op=op, args=args, **fields))
        return Ref(name), look

    def mask(self, mask: Mask, look: TensorSpec) -> tuple[_Operand, _Operand | None]:
        """A mask as the op takes it, and the queries without any key, if there may be some.

        If masked scores are set to a finite number, such a query weighs all keys equally: the mask
        then lets it see all of them, and as zeros it does weigh them so.
        """
        operand = mask.value, look
        if mask.low is None:
            return operand, None
        if mask.low == -math.inf:
            return operand if mask.kept else self.denied(*operand), None
        hidden = self.denied(*operand) if mask.kept else operand
        shown = operand if mask.kept else self.denied(*operand)
        each = TensorSpec((*look.shape[:-1], 1), torch.bool)
        keyless = self.add("aten.all.dim", (hidden[0], -1, True), each)
        return self.add("aten.logical_or.default", (shown[0], keyless[0]), look), keyless

    def denied(self, value: Value, look: TensorSpec) -> _Operand:
        """The opposite of booleans."""
        return self.add("aten.logical_not.default", (value,), look)

    def lifted(self, value: Value, look: TensorSpec) -> _Operand:
        """A tensor of three dims as one of four."""
        if len(look.shape) != 3:
            return value, look
        four = TensorSpec((1, *look.shape), look.dtype)
        return self.add("aten.unsqueeze.default", (value, 0), four)
