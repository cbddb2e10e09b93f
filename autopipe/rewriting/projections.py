"""Rewrite projections: parameters that forward clamps, masks or normalises before it reads them.

    w.data.clamp_(-1, 1)          a Wasserstein GAN's critic
    w.data *= self.mask           PixelCNN; a pruned layer
    w.data = torch.renorm(...)    EEGNet
    w.copy_(F.normalize(w))       prototypes of SwAV (`rewriting.normalized`)

Each micro-batch would change the parameter again. A projection changes nothing the second time, so
it can be done for each reader, and to the parameter itself once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopipe.errors import CaptureError
from autopipe.ir.dataflow import analyse, written_by
from autopipe.ir.graph import Arg, Graph, Node, Ref, State, Value, arguments, short_name, swap
from autopipe.ir.tensors import NORMALIZED
from autopipe.planfile.node_names import NodeName
from autopipe.rewriting.normalized import DIVISION, IN_PLACE, normalizations
from autopipe.util import dtypes

_NUMBERS = "clamp clamp_min clamp_max relu abs nan_to_num renorm"
"""Ops of a tensor and numbers. `renorm` leaves norms 1e-7 under its argument, so that a second
time changes nothing but a last bit (aten/src/ATen/native/native: `maxnorm / (norm + 1e-7)`)."""

_MASKS = {"mul": "Tensor", "masked_fill": "Scalar"}
"""Ops of a tensor and a buffer. The runtime refuses to multiply by other numbers than 0 and 1."""

PROJECTIONS = {f"aten.{name}_.default": f"aten.{name}.default" for name in _NUMBERS.split()} | {
    f"aten.{name}_.{overload}": f"aten.{name}.{overload}" for name, overload in _MASKS.items()
}
"""Ops in place that change nothing the second time -> the same op."""

_RENORM = "aten.renorm_.default"
_IN_PLACE = {op: in_place for in_place, op in PROJECTIONS.items()}


@dataclass(frozen=True)
class _Projection:
    """A node's change of a parameter that nothing has read before: an op of `PROJECTIONS`, or
    `NORMALIZED`."""

    weight: State
    op: str
    rest: tuple[Arg, ...]


def with_projections(graph: Graph) -> Graph:
    """The graph in which a parameter that forward projects in place is projected for its readers.

        w.data.clamp_(-1, 1)            d = detach(w);  c = clamp(d, -1, 1);  v = c + (w - d)
        linear(x, w)                    linear(x, v)

    w - d is 0, so v is the projected parameter in every bit, and its gradient is that of w. The
    parameter itself is changed before the optimizer changes it (`StateSpec.projection`). Nodes
    that nothing reads any more are left in the graph.

    Raises:
        CaptureError: forward writes a trained parameter in another way; names the user's line.
    """
    projected = dict(_projected(graph))
    _check_writes(graph, projected)
    if not projected:
        return graph
    writer = _ProjectionWriter(graph)
    for node in graph.nodes:
        found = projected.get(node.name)
        if found is None:
            writer.nodes.append(node.reading(writer.values))
        else:
            writer.write_projected(node, found)
    outputs = swap(graph.outputs, writer.values)
    return replace(graph, nodes=tuple(writer.nodes), outputs=outputs, states=writer.states)


class _ProjectionWriter:
    """Writes a graph's nodes, with projected parameters for the nodes that read them.

    Attributes:
        nodes: those written so far.
        values: a parameter, or what a replaced node made -> what later nodes read instead.
        states: the graph's states, with the projections found so far.
    """

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.values: dict[Value, Value] = {}
        self.states = dict(graph.states)
        self._graph = graph
        self._ordinals = Counter((node.scopes[-1:], node.short) for node in graph.nodes)

    def write_projected(self, node: Node, found: _Projection) -> None:
        """Write the projected parameter in place of a node that projects it."""
        weight, values = found.weight, self.values
        if weight not in values:
            state = self.states[weight.name]
            self.states[weight.name] = replace(state, projection=(found.op, found.rest))
            values[weight] = self._projected(node, found)
        written = node.values()[0]
        if swap(written, values) != values[weight]:  # its .data, which has no gradient afterwards
            values[written] = self._append(node, "aten.detach.default", values[weight])
        values[Ref(node.name)] = swap(written, values)

    def _projected(self, node: Node, found: _Projection) -> Ref:
        """The value of a projected parameter, with the gradient of the parameter."""
        read = self._append(node, "aten.detach.default", found.weight)
        operands = [self._in_dtype_of(found.weight, arg, node) for arg in found.rest]
        if found.op != NORMALIZED:
            changed: Arg = self._append(node, PROJECTIONS[found.op], read, *operands)
        elif node.op == IN_PLACE:
            changed = self._append(node, DIVISION, read, swap(node.args[1], self.values))
        else:
            changed = swap(node.args[1], self.values)
        zero = self._append(node, "aten.sub.Tensor", found.weight, read)
        return self._append(node, "aten.add.Tensor", changed, zero)

    def _append(self, like: Node, op: str, *args: Arg, **changed: Any) -> Ref:
        """Write a node like another, but for its op, its arguments and what is `changed`."""
        key = like.scopes[-1:], short_name(op)
        name = str(NodeName("".join(key[0]), key[1], self._ordinals[key]))
        self._ordinals[key] += 1
        new = replace(like, name=name, op=op, args=args, kwargs={}, grad=True)
        self.nodes.append(replace(new, **changed))
        return Ref(name)

    def _in_dtype_of(self, weight: State, mask: Arg, node: Node) -> Arg:
        """A mask in the parameter's dtype, which a product in place keeps."""
        graph = self._graph
        dtype = graph.spec(weight).dtype
        if not isinstance(mask, State) or graph.spec(mask).dtype in (dtype, torch.bool):
            return mask
        spec = replace(graph.spec(mask), dtype=dtype)
        to = {"kwargs": {"dtype": dtype}, "outputs": (spec,)}
        return self._append(node, "aten._to_copy.default", mask, **to)


def sets_norms(graph: Graph) -> bool:
    """Whether a projection sets norms: repeating it may change the last bit."""
    return any((s.projection or ("",))[0] in (_RENORM, NORMALIZED) for s in graph.states.values())


def _projected(graph: Graph) -> Iterator[tuple[str, _Projection]]:
    """The names of nodes that project a trained parameter which nothing has read before.

    In `w.data = w.data * mask` the parameter itself is read by the node that computes the result.
    """
    flow = analyse(graph)
    root, divisions = flow.root, normalizations(flow)
    within = {name for division in divisions.values() for name in division.within}
    written = {root[value] for node in graph.nodes for value in written_by(node)}
    fixed = {State(n) for n, s in graph.states.items() if s.kind == "buffer"} - written
    names: dict[object, State] = {
        State(n): State(n) for n, s in graph.states.items() if s.trainable
    }
    copies: dict[object, _Projection] = {}
    done: dict[State, _Projection] = {}
    read: dict[State, list[_Projection | None]] = {weight: [] for weight in names.values()}
    for node in graph.nodes:
        tensor = node.args[0] if node.args else None
        weight = names.get(tensor)
        if node.op == "aten.detach.default" and weight is not None:
            names[Ref(node.name)] = weight
            continue
        if node.op == "aten.detach.default" and tensor in copies:
            copies[Ref(node.name)] = copies[tensor]
            continue
        found = None
        divided = divisions.get(node.name)
        if divided is not None and node.op == IN_PLACE:
            found = _Projection(divided.weight, NORMALIZED, divided.rest)
        elif node.op in PROJECTIONS:
            found = _projection(node, node.op, names, fixed)
        elif node.op == "aten.copy_.default" and weight is not None:
            found = copies.get(node.args[1])
        if found is not None and found.weight == weight:
            if done.get(weight, found) == found and all(copy == found for copy in read[weight]):
                done[weight], names[Ref(node.name)] = found, weight
                _check_precision(graph, node, found)
                yield node.name, found
                continue
        copy = _projection(node, _IN_PLACE[node.op], names, fixed) if node.op in _IN_PLACE else None
        if divided is not None:
            copy = _Projection(divided.weight, NORMALIZED, divided.rest)
        if copy is not None:
            copies[Ref(node.name)] = copy
        read_here = {names[value] for value in node.values() if value in names} - done.keys()
        for reader in read_here if node.name not in within else ():
            read[reader].append(copy)


def _projection(
    node: Node, op: str, names: Mapping[object, State], fixed: Container[object]
) -> _Projection | None:
    """The projection of a node that applies numbers, or an unwritten buffer, to a parameter.

    Args:
        op: the node's op in its in-place form.
        names: the parameters, and the tensors that share their memory.
        fixed: the buffers that nothing writes.
    """
    tensor, *rest = arguments(node).values()
    if op == "aten.mul_.Tensor" and tensor in fixed:
        tensor, rest = rest[0], [tensor]
    weight = names.get(tensor)
    masks = short_name(op).removesuffix("_") in _MASKS
    if weight is None or (masks and rest[0] not in fixed):
        return None
    return _Projection(weight, op, tuple(rest))


def _check_precision(graph: Graph, node: Node, found: _Projection) -> None:
    """Refuse to set norms in 16 bits, where rounding changes the norm that was set."""
    dtype = graph.states[found.weight.name].spec.dtype
    if found.op in (_RENORM, NORMALIZED) and dtype.itemsize < 4:
        raise CaptureError(
            f"{node.place}: forward sets norms of the parameter {found.weight.name!r}, which in "
            f"{dtypes.name_of(dtype)} changes it once more in every micro-batch",
            hint="--precision bf16-autocast, which leaves parameters in fp32; or set them in "
            "the optimizer's step",
        )


def _check_writes(graph: Graph, allowed: Container[str]) -> None:
    """Refuse other writes into trained parameters, or into tensors that share their memory."""
    root = analyse(graph).root
    for node in graph.nodes:
        for written in map(root.__getitem__, written_by(node)):
            if node.name in allowed or not isinstance(written, State):
                continue
            if graph.states[written.name].trainable:
                raise CaptureError(
                    f"{node.place}: forward writes the parameter {written.name!r}, which the "
                    "optimizer trains, in place",
                    hint=_limited(node, written.name)
                    if node.short == "embedding_renorm_"
                    else "change it in the optimizer's step, or compute with a changed copy: "
                    "self.weight.clamp(...)",
                )


def _limited(node: Node, name: str) -> str:
    """The hint for `nn.Embedding(max_norm=...)`, which limits the rows that it reads."""
    _, _, most, order = node.args
    return (
        "leave max_norm out, and limit all rows before they are read: "
        f"self.{name}.data = torch.renorm(self.{name}.data, {order:g}, 0, {most:g})"
    )
