"""When two stages do the same: the same ops on values that look the same, under other names.

    stage 3   h.6/linear/0 = linear(h.5/add/1, [h.6.weight])      op 0 = linear(received 0, state 0)
    stage 4   h.8/linear/0 = linear(h.7/add/1, [h.8.weight])      the same

Deep models are cut into stages of few kinds, and what is learnt of one holds for all of its kind.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from autopipe.blocks import Block
from autopipe.graph import Arg, Graph, Input, Ref, State, Value
from autopipe.partition import Stage


def kind_of(
    graph: Graph, stage: Stage, blocks: Sequence[Block], recompute: Collection[str], *, last: bool
) -> Hashable:
    """What equals another stage's only if both are lowered to the same modules, but for names.

    Args:
        recompute: paths of the blocks that run again in backward.
        last: whether the stage makes the graph's results.
    """
    places: dict[Value, Hashable] = {}
    for number, (received, _) in enumerate(stage.receives):
        places[received] = ("received", number, received in stage.copied)
    for number, path in enumerate(stage.inputs):
        places[Input(path)] = ("input", number, graph.inputs[path])
    for number, name in enumerate(stage.states):
        state = graph.states[name]
        places[State(name)] = ("state", number, state.spec, state.kind, state.trainable)
    owner = {p: block for block in blocks for p in range(block.first, block.stop)}
    numbers: dict[str, int] = {}
    home = ""

    def told(arg: Arg) -> Hashable:
        if isinstance(arg, State):
            return places[arg], bool(home) and arg.name.startswith(home)
        if isinstance(arg, Value):
            return places[arg]
        if isinstance(arg, tuple):
            return tuple(told(item) for item in arg)
        return type(arg), arg  # 1 is not 1.0

    made: list[Hashable] = []
    for position in stage.nodes:
        node = graph.nodes[position]
        block = owner.get(position) if stage.first <= position < stage.stop else None
        home = block.path.partition("@")[0] + "." if block else ""
        inside = block and (numbers.setdefault(block.path, len(numbers)), block.path in recompute)
        kwargs = tuple((key, told(arg)) for key, arg in sorted(node.kwargs.items()))
        around = node.outputs, node.packed, node.grad, node.autocast, inside
        made.append((node.op, told(node.args), kwargs, around))
        for number in range(len(node.outputs)):
            places[Ref(node.name, number)] = (len(made) - 1, number)
    home = ""
    results = tuple(told(output) for output in graph.outputs) if last else None
    return tuple(made), tuple(places[ref] for ref in stage.outgoing), results, len(stage.states)
