"""Find parameters that forward divides by their norms and writes back.

    w = weight.data.clone();  weight.copy_(F.normalize(w, dim=1))       SwAV's prototypes

    norm       linalg_vector_norm(w, 2, [1], True)
    at least   clamp_min(norm, 1e-12);  expand_as(w)                    both may be missing
    made       div(w, at least), or div_

A second division, by norms of 1, changes at most the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Arg, Node, Ref, State, Value, arguments

DIVISION, IN_PLACE = "aten.div.Tensor", "aten.div_.Tensor"

_NO_NORM = 1e-6
"""What is divided by a larger number, and by less than 1, is longer the second time."""


@dataclass(frozen=True)
class Normalized:
    """A parameter divided by its norms.

    Attributes:
        rest: the order of the norm, its dims, and its least value.
        within: the names of the nodes before the division; nothing else reads their results.
    """

    weight: State
    rest: tuple[Arg, ...]
    within: frozenset[str]


def normalizations(flow: Dataflow) -> Mapping[str, Normalized]:
    """The divisions of trained parameters by their norms, by the names of their nodes."""
    found = {}
    for node in flow.graph.nodes:
        normalized = _normalized(flow, node) if node.op in (DIVISION, IN_PLACE) else None
        if normalized is not None:
            found[node.name] = normalized
    return found


def _normalized(flow: Dataflow, division: Node) -> Normalized | None:
    tensor, by = division.args[:2]
    chain = list(_back(flow, by))
    if not chain or chain[-1].op != "aten.linalg_vector_norm.default":
        return None
    given = arguments(chain[-1])
    divided, normed = _weight(flow, tensor), _weight(flow, given["self"])
    if divided is None or normed is None or divided[0] != normed[0] or not given["keepdim"]:
        return None
    weight, spec = divided[0], flow.graph.spec(divided[0])
    least = next((node.args[1] for node in chain if node.short == "clamp_min"), 0.0)
    if given["dtype"] not in (None, spec.dtype) or not isinstance(least, int | float):
        return None
    within = divided[1] | normed[1] | {node.name for node in chain}
    users = {user for name in within for user in flow.users.get(Ref(name), ())}
    others = {flow.graph.nodes[user].name for user in users} - within - {division.name}
    if others or _NO_NORM < least < 1:
        return None
    over = tuple(sorted(dim % len(spec.shape) for dim in given["dim"] or range(len(spec.shape))))
    return Normalized(weight, (given["ord"], over, least), frozenset(within))


def _back(flow: Dataflow, value: Arg) -> Iterator[Node]:
    """The nodes that make a value, back to a norm."""
    while isinstance(value, Ref):
        node = flow.graph.nodes[flow.position(value)]
        yield node
        if node.short not in ("clamp_min", "expand", "expand_as"):
            return
        value = node.args[0]


def _weight(flow: Dataflow, value: Arg) -> tuple[State, set[str]] | None:
    """The trained parameter that a value is, or is an unwritten copy of; and the nodes between."""
    between = set[str]()
    while isinstance(value, Ref):
        node = flow.graph.nodes[flow.position(value)]
        if node.short not in ("clone", "detach") or flow.root[value] in _written(flow):
            return None
        between |= {node.name} if node.short == "clone" else set()
        value = node.args[0]
    trained = isinstance(value, State) and flow.graph.states[value.name].trainable
    return (value, between) if trained and isinstance(value, State) else None


def _written(flow: Dataflow) -> set[Value]:
    return {root for root in flow.writers if isinstance(root, Ref)}
