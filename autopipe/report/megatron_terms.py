"""Describe a sharding in the words of Megatron-LM.

    column        a weight's outputs are sharded; each rank makes a part of the result
    row           a weight's inputs are sharded; each rank makes a part of the sum
    vocabulary    an embedding's words, or a loss's classes
    hidden        an embedding's columns
    sequence      the tokens, between the layers
    replicated    all else

(Shoeybi et al., 2019, arXiv:1909.08053, section 3; Korthikanti et al., 2022, arXiv:2205.05198.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopipe.planfile.contents import Plan
from autopipe.planfile.node_names import NodeName
from autopipe.planfile.parts import Collective, WrittenPlacement
from autopipe.planfile.placements import Placement, parse

_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "addmm": 1, "conv1d": 0, "conv2d": 0, "conv3d": 0}
"""Of the inputs of a product, which is not a parameter."""

_TOKENWISE = ("layer_norm", "rms_norm", "dropout", "add")


def word(sharding: WrittenPlacement) -> str | None:
    """Megatron-LM's word for a node's sharding; None: there is no word."""
    node = NodeName.of(sharding.name)
    op = node.op if node is not None else ""
    output, inputs = parse(sharding.state), [parse(text) for text in sharding.inputs]
    if op in _PRODUCTS and len(inputs) > _PRODUCTS[op]:
        if output.kind == "P":
            return "row"
        if output.sharded and not inputs[_PRODUCTS[op]].sharded:
            return f"column{_segments(output)}"
    elif op == "embedding" and output.kind == "P":
        return "vocabulary"
    elif op == "embedding" and output.sharded:
        return "hidden" if inputs[0].sharded else "sequence"
    elif op == "cross_entropy_loss" and any(placement.sharded for placement in inputs):
        return "vocabulary"
    elif op in _TOKENWISE and output.sharded and output.dim == 1:
        return "sequence"
    return None


def _segments(placement: Placement) -> str:
    many = placement.segments
    if isinstance(many, tuple):
        return f", in segments of {'+'.join(map(str, many))}"
    return "" if many == 1 else f", in {many} segments"


def describe(plan: Plan) -> Iterator[str]:
    """The lines of an explanation; empty for a plan without tensor parallelism."""
    if plan.mesh.tp == 1:
        return
    yield f"tensor parallel over {plan.mesh.tp} ranks; what is not named is replicated"
    for block in plan.blocks:
        if len(block.members) == 1:
            title = f"block {block.name}"
        else:
            title = f"{len(block.members)} blocks, each as {block.name}"
        yield from _part(title, block.states, block.collectives)
    yield from _part("outside blocks", plan.states, plan.collectives)


def _part(
    title: str, states: Sequence[WrittenPlacement], collectives: Sequence[Collective]
) -> Iterator[str]:
    named = {
        node.module or "itself": found
        for sharding in states
        if (node := NodeName.of(sharding.name)) and (found := word(sharding))
    }
    if not named and not collectives:
        return
    yield f"{title}:"
    width = max((len(name) for name in named), default=0)
    for name, found in named.items():
        yield f"  {name:<{width}}  {found}"
    for way in ("forward", "backward"):
        counts = Counter(getattr(collective, way) for collective in collectives)
        sent = [f"{count} {name}" for name, count in counts.items() if name]
        where = [c.tensor for c in collectives if getattr(c, way)]
        if sent:
            yield f"  {way}: {', '.join(sent)} ({', '.join(where)})"
