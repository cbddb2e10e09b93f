"""Tensors that cross a cut in parts: each tensor-parallel rank sends one, the receivers gather.

    stage 0                                              stage 1
      h         = add(...)              [b, s, 64]
      h>part(2) = convert(h, I, S(2))   [b, s, 32] ----> h>whole(1) = convert(h>part(2), S(2), I)
                                                         y          = norm(h>whole(1))

What all ranks of a tensor-parallel group have whole crosses the link between stages once, not once
from each rank, and is gathered on the group's own link, the faster one (Narayanan et al., SC 2021,
section 4.1). The two are conversions like any other, each with its dual as derivative: the gradient
comes back in parts. Of a tensor in state I the senders gather it; of one in R, whose gradient is a
partial sum on each rank, the receivers have reduce-scattered it.

Conversions to parts are the last nodes of a stage, those back the first. What comes back from later
stages is then the first summand of a tensor's gradient, as it is where the tensor goes whole: in
state I sums of three and more are the same to the bit.

Parts are of the last dim that divides by the ranks, a model's width as a rule: neither the rows of
a micro-batch nor their length change whether it does. In memory a part is runs of width / tp
elements, long enough to be copied as fast as memory is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopipe.errors import PlanError
from autopipe.ir import check
from autopipe.ir.graph import BATCH, Dim, Graph, Node, Ref, TensorSpec, Value, swap
from autopipe.ir.partition import Stage
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import PartOf
from autopipe.planfile.placements import Placement, S, local_size
from autopipe.sharding.collectives import CONVERT, TENSOR_PARALLEL

Dims = Mapping[tuple[Ref, int], int]
"""Of a tensor and a stage that receives it in parts, the dim; what is not here goes whole."""

InParts = Mapping[int, Mapping[str, int]]
"""Of each stage that receives tensors in parts, the dims that a plan has, by the tensors' names."""

HeldWhole = Mapping[Ref, Placement]
"""The tensors that each rank has whole, as `local_graph.held_whole` gives them."""


class Parted(NamedTuple):
    """A rank's graph with its conversions to parts and back.

    Attributes:
        cuts: where its stages begin, but for the first.
        parts: of each tensor that is sent as a part what it is a part of.
        added: the names of the nodes of these conversions.
    """

    graph: Graph
    cuts: tuple[int, ...]
    parts: Mapping[Ref, PartOf]
    added: frozenset[str]


def part_dim(spec: TensorSpec, ranks: int) -> int | None:
    """The dim along which a tensor is cut into a part for each rank; None: no dim divides."""
    dims = reversed(range(len(spec.shape)))
    return next((dim for dim in dims if _divides(spec.shape[dim], ranks)), None)


def all_dims(
    graph: Graph,
    stages: Sequence[Stage],
    held: HeldWhole,
    ranks: int,
    to: InParts,
) -> Dims:
    """The dims along which tensors may be sent to the stages of `to` in parts.

    The dim is the one that `to` names, if the number of ranks divides it in this graph too, else
    the last that it divides.

    Args:
        held: the tensors that each rank has whole.
        ranks: how many ranks share a stage.
    """
    dims = {}
    for stage in stages:
        named = to.get(stage.index)
        for ref, _ in stage.receives if named is not None else ():
            spec = graph.spec(ref)
            dim = named.get(str(ref)) if named else None
            if dim is None or dim >= len(spec.shape) or not _divides(spec.shape[dim], ranks):
                dim = part_dim(spec, ranks)
            if ref in held and dim is not None:
                dims[ref, stage.index] = dim
    return dims


def in_parts_of(plan: Plan) -> InParts:
    """What a plan sends in parts, to its stages, each counted once."""
    found: dict[int, dict[str, int]] = {}
    for index, stage in enumerate(plan.once):
        for transfer in stage.receives:
            if transfer.part_of is not None:
                found.setdefault(index, {})[transfer.part_of.tensor] = transfer.part_of.dim
    return found


def planned_dims(plan: Plan, graph: Graph, stages: Sequence[Stage], held: HeldWhole) -> Dims:
    """What a plan sends in parts, between the stages of the graph that it is for.

    Raises:
        PlanError: a tensor is not received, not whole on each rank, or does not divide.
    """
    dims = {}
    for index, (stage, planned) in enumerate(zip(stages, plan.once, strict=True)):
        received = {str(ref): ref for ref, _ in stage.receives}
        for slot, transfer in enumerate(planned.receives):
            part = transfer.part_of
            if part is None:
                continue
            ref, why = received.get(part.tensor), ""
            if ref is None:
                why = f"stage {index} receives no such tensor"
            elif ref not in held:
                why = "it is not whole on each tensor-parallel rank"
            else:
                shape = graph.spec(ref).shape
                if not 0 <= part.dim < len(shape):
                    why = f"it has {len(shape)} dims, and dim {part.dim} is none of them"
                elif not _divides(shape[part.dim], plan.mesh.tp, formula=True):
                    why = (
                        f"its dim {part.dim} of {shape[part.dim]} does not divide into "
                        f"{plan.mesh.tp} equal parts, whatever the rows"
                    )
            if ref is None or why:
                raise PlanError(
                    f"plan.stages[{index}].receives[{slot}].part_of: {part.tensor!r} cannot be "
                    f"sent in parts: {why}",
                    hint="plan again; `--transfers whole` sends nothing in parts",
                )
            dims[ref, index] = part.dim
    return dims


def _divides(size: Dim, ranks: int, *, formula: bool = False) -> bool:
    """Whether each rank has equally much of a dim, however many rows there are.

    Args:
        formula: take it that the plan's tokens divide, where they are a symbol.
    """
    if isinstance(size, int):
        return size > 0 and size % ranks == 0
    return formula and BATCH not in size.free_symbols


def with_parts(
    graph: Graph, stages: Sequence[Stage], dims: Dims, held: HeldWhole, ranks: int
) -> Parted:
    """The graph of one of so many ranks, which sends and receives tensors in parts.

    Args:
        stages: a partition of the graph.
    """
    nodes: list[Node] = []
    cuts: list[int] = []
    added: set[str] = set()
    sent: dict[tuple[Ref, int], Ref] = {}

    def converted(
        name: str, beside: Node, original: Ref, ref: Ref, source: Placement, target: Placement
    ) -> Ref:
        node = _conversion(name, beside.place, graph.spec(original), ref, source, target, ranks)
        nodes.append(node)
        added.add(node.name)
        return Ref(node.name)

    for stage in stages:
        cuts.append(len(nodes))
        own_nodes, to = graph.nodes[stage.first : stage.stop], stage.index
        arrived: dict[Value, Value] = {
            ref: converted(
                f"{ref}>whole({to})", own_nodes[0], ref, sent[ref, dim], S(dim), held[ref]
            )
            for ref, _ in stage.receives
            if (dim := dims.get((ref, to))) is not None
        }
        nodes += [node.reading(arrived) for node in own_nodes]
        leaving = ((ref, dims[ref, peer]) for ref, peer in stage.sends if (ref, peer) in dims)
        for ref, dim in dict.fromkeys(leaving):
            sent[ref, dim] = converted(
                f"{ref}>part({dim})", own_nodes[-1], ref, ref, held[ref], S(dim)
            )
    outputs = tuple(swap(output, arrived) for output in graph.outputs)
    parted = replace(graph, nodes=tuple(nodes), outputs=outputs)
    parts = {part: PartOf(str(ref), dim) for (ref, dim), part in sent.items()}
    return Parted(check.after("sent_parts", parted), tuple(cuts[1:]), parts, frozenset(added))


def _conversion(
    name: str,
    place: str,
    whole: TensorSpec,
    ref: Ref,
    source: Placement,
    target: Placement,
    ranks: int,
) -> Node:
    """The node that makes a part of a whole tensor, or the tensor from its parts."""
    shape = list(whole.shape)
    if target.sharded:
        shape[target.dim] = local_size(shape[target.dim], target.segments, ranks, 0)
    size: Dim = whole.shape[source.dim] if source.sharded else 0
    return Node(
        name=name,
        op=CONVERT,
        args=(ref, TENSOR_PARALLEL, source, target, size),
        kwargs={},
        outputs=(TensorSpec(tuple(shape), whole.dtype),),
        packed=False,
        scopes=(),
        place=place,
    )
