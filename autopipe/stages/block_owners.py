"""Find the parameters that each block of a lowered stage owns, for ZeRO-3 to gather by block.

A block owns the parameters that only its own code reads. The root owns a parameter that the code
between blocks or another block reads, too (a weight tied within the stage), and keeps it whole
while the stage runs. The root also owns the parameters of a block that writes to its inputs in
place, or whose results are written to: `fully_shard` puts its hooks on these tensors, and autograd
loses the hook of a view that is written to, or refuses the write.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import fx, nn

from autopipe.ir.graph import StateSpec
from autopipe.ir.torch_private import argument_aliases
from autopipe.stages.recompute import Recomputed

_OP = type(torch.ops.aten.clone.default)


_AGAIN = "_again"


def next_call(path: str, taken: Container[str]) -> str:
    """The name of a block's next call in a stage: `h.0`, then `h.0_again`."""
    while path in taken:
        path += _AGAIN
    return path


def home(root: nn.Module, call: str) -> str:
    """The path in the model of the block that a call by `next_call`'s name is of."""
    known = {name for name, _ in root.named_modules(remove_duplicate=False)}
    while call not in known and call.endswith(_AGAIN):
        call = call.removesuffix(_AGAIN)
    return call


def pieces(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The modules of the blocks that a stage calls, recomputed or not, by the path of the call."""
    for node in module.graph.find_nodes(op="call_module"):
        piece = module.get_submodule(str(node.target))
        yield (
            str(node.target),
            cast(fx.GraphModule, piece.block if isinstance(piece, Recomputed) else piece),
        )


def readers(root: nn.Module, module: fx.GraphModule) -> dict[str, set[str | None]]:
    """For each state's name, the blocks whose code reads it; None is the code between blocks.

    Args:
        root: a module with a submodule at every path of the model that has states.
        module: a stage made by `lower`.
    """
    found: dict[str, set[str | None]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        found.setdefault(str(node.target), set()).add(None)
    for path, piece in pieces(module):
        block = home(root, path)
        for node in piece.graph.find_nodes(op="get_attr"):
            found.setdefault(f"{block}.{node.target}", set()).add(block)
    return found


def owners(root: nn.Module, module: fx.GraphModule, names: Iterable[str]) -> dict[str, str | None]:
    """For each parameter, the path of the block that owns it; None: the root.

    Args:
        root, module: as for `readers`.
    """
    blocks = {home(root, path) for path, _ in pieces(module)}
    blocks -= {home(root, path) for path in _written_across(module)}
    reading = readers(root, module)
    owner: dict[str, str | None] = {}
    for name in names:
        innermost = max((b for b in blocks if name.startswith(f"{b}.")), key=len, default=None)
        owner[name] = innermost if reading.get(name) == {innermost} else None
    return owner


def gathered_in(states: Iterable[StateSpec]) -> torch.dtype | None:
    """The one dtype in which the parameters of a block, or of the root, are gathered.

    It is that of their copies in 16 bits, if all of them are read in it. None: each is gathered in
    the dtype in which it is held, as beside the fp32 weights of a batch norm.
    """
    read = {state.spec.dtype for state in states if state.kind == "parameter"}
    return read.pop() if len(read) == 1 else None


def _written_across(module: fx.GraphModule) -> set[str]:
    """The blocks that write to their inputs in place, or whose results are written to later."""
    graphs = dict(pieces(module))
    writes: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.find_nodes(op="call_module"):
        piece = graphs[str(node.target)].graph
        written = _written(piece, {})
        entries = zip(piece.find_nodes(op="placeholder"), node.args, strict=True)
        writes[node] = [cast(fx.Node, given) for entry, given in entries if entry in written]
    calls = [node for node, into in writes.items() if into]
    calls += [node for node in _written(module.graph, writes) if node.op == "call_module"]
    return {str(node.target) for node in calls}


def _written(graph: fx.Graph, writes: Mapping[fx.Node, Sequence[fx.Node]]) -> set[fx.Node]:
    """The arguments and module calls of a graph whose memory the graph writes to.

    Args:
        writes: for each call of a module, the arguments that it writes to.
    """
    memory: dict[fx.Node, set[fx.Node]] = {}  # of which nodes a value may be a view
    found: set[fx.Node] = set()
    for node in graph.nodes:
        memory[node] = set().union(*(memory[other] for other in node.all_input_nodes))
        if node.op in ("placeholder", "call_module"):
            memory[node].add(node)
        found = found.union(*(memory[value] for value in writes.get(node, ())))
        # A call is of an op, or of one of `lower`'s wrappers with the op among its arguments; after
        # that of a random op comes its name.
        items = (node.target, *node.args)
        place = next((i for i, v in enumerate(items) if isinstance(v, _OP)), None)
        if node.op != "call_function" or place is None:
            continue
        given = [value for value in items[place + 1 :] if not isinstance(value, str)]
        memory[node], inputs = set(), memory[node]
        for value, (shares, written) in zip(given, argument_aliases(items[place]), strict=False):
            if not shares:
                continue
            views = memory[value] if isinstance(value, fx.Node) else inputs
            memory[node] |= views
            found |= views if written else set()
    return found
