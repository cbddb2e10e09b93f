"""Write a sharding to a plan, by block class, and read it back.

    blocks[0].members   h.0, h.1, ... h.11
    blocks[0].states    mlp.up.weight    S(0)                     a parameter
                        mlp.up/linear/0  S(2)  from R, S(0)       a node, and what it reads
    states              head.weight      S(0)                     outside blocks

The runtime reads this and decides nothing, so ranks cannot disagree. A tensor that the plan does
not name is replicated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from autopipe.errors import PlanError
from autopipe.ir.blocks import Block, Visit
from autopipe.ir.dataflow import Dataflow, gradient_values
from autopipe.ir.graph import Graph, at_batch
from autopipe.planfile.contents import Plan
from autopipe.planfile.node_names import NodeName
from autopipe.planfile.parts import BlockClass, Collective, WrittenPlacement
from autopipe.planfile.placements import Placement, Sharding, parse
from autopipe.sharding.local_graph import blocks_of, sent_by, whole_bytes
from autopipe.sharding.strategies import check_possible, possible_in


def write_down(
    graph: Graph, blocks: Sequence[Block], sharding: Sharding | None, local: Graph, rows: int
) -> tuple[tuple[BlockClass, ...], tuple[WrittenPlacement, ...], tuple[Collective, ...]]:
    """The plan's block classes with their placements, and the placements outside blocks.

    Blocks of one structure with different shardings, as the first often has, are two classes;
    each is named after its first member.

    Args:
        graph: the traced graph.
        sharding: None: nothing is sharded.
        local: the graph of the first rank, with the conversions.
        rows: rows of a micro-batch.
    """
    inside: dict[str, list[WrittenPlacement]] = defaultdict(list)
    outside: list[WrittenPlacement] = []
    home = {node.name: b.path for b in blocks for node in graph.nodes[b.first : b.stop]}
    if sharding is not None:
        paths = {block.prefix: block.path for block in reversed(blocks)}
        for name, placement in sharding.states.items():
            prefix = next((p for p in paths if name.startswith(p)), None)
            if prefix is None:
                outside.append(WrittenPlacement(name, str(placement)))
            else:
                inside[paths[prefix]].append(
                    WrittenPlacement(name.removeprefix(prefix), str(placement))
                )
        for name, (inputs, output) in sharding.nodes.items():
            texts = tuple(map(str, inputs))
            if name in home:
                name_inside = name.removeprefix(home[name]).removeprefix(".")
                inside[home[name]].append(WrittenPlacement(name_inside, str(output), texts))
            else:
                outside.append(WrittenPlacement(name, str(output), texts))
    members: dict[tuple[str, tuple[WrittenPlacement, ...]], list[str]] = defaultdict(list)
    for block in blocks:
        members[block.kind, tuple(inside[block.path])].append(block.path)
    sent = _sent(local, sharding.ranks if sharding is not None else 1, rows, blocks)
    classes = (
        BlockClass(paths[0], tuple(paths), states, tuple(sent[paths[-1]]))
        for (_, states), paths in members.items()
    )
    return tuple(classes), tuple(outside), tuple(sent[""])


def _sent(
    local: Graph, ranks: int, rows: int, blocks: Sequence[Block]
) -> dict[str, list[Collective]]:
    """The collectives in each block, by the block's path; "": those outside all blocks."""
    carrying = gradient_values(local)
    inside = {
        node.name: block.path
        for block in blocks_of(local, blocks)
        for node in local.nodes[block.first : block.stop]
    }
    collectives: dict[str, list[Collective]] = defaultdict(list)
    for node in local.nodes:
        sends, sends_back = sent_by(node, carrying)
        if sends is None and sends_back is None:
            continue
        path, tensor = inside.get(node.name, ""), str(node.args[0])
        if path:
            tensor = tensor.removeprefix(path).removeprefix(".")
        forward, backward = (move.name if move is not None else "" for move in (sends, sends_back))
        size = at_batch(whole_bytes(local, node, ranks), rows)
        collectives[path].append(Collective(tensor, forward, backward, size))
    return collectives


def read_back(plan: Plan) -> Sharding:
    """Read the sharding of a plan.

    Raises:
        PlanError: a text is no placement; names its field in the plan.
    """
    states: dict[str, Placement] = {}
    nodes: dict[str, tuple[tuple[Placement, ...], Placement]] = {}
    for where, prefix, written in _all(plan):
        try:
            output, inputs = parse(written.state), tuple(map(parse, written.inputs))
        except ValueError as error:
            raise PlanError(f"plan.{where}: {error}") from error
        if NodeName.of(written.name) is not None:
            between = "" if written.name.startswith("/") or not prefix else "."
            nodes[f"{prefix}{between}{written.name}"] = inputs, output
        else:
            home = f"{Visit.of(prefix).module}." if prefix else ""
            states[f"{home}{written.name}"] = output
    return Sharding(plan.mesh.tp, states, nodes)


def fitted(
    sharding: Sharding,
    plan: Plan,
    flow: Dataflow,
    length: int | None = None,
    *,
    other: bool = False,
) -> Sharding:
    """The sharding of a plan for one of its graphs.

    Args:
        flow: of the graph.
        length: tokens of a row, if the sequence is a symbol.
        other: whether the graph is not the plan's, but in evaluation or of shorter rows.

    Raises:
        PlanError: the plan was changed by hand, and ranks would compute something else.
    """
    if other:
        return possible_in(flow, sharding)
    if plan.edited or not plan.made:
        check_possible(flow, sharding, length)
    return sharding


def _all(plan: Plan) -> Iterator[tuple[str, str, WrittenPlacement]]:
    for index, written in enumerate(plan.states):
        yield f"states[{index}]", "", written
    for number, block in enumerate(plan.blocks):
        for index, written in enumerate(block.states):
            for member in block.members:
                yield f"blocks[{number}].states[{index}]", member, written
