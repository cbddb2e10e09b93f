"""Which blocks of a lowered stage can be gathered and let go of by themselves, and what they own.

A block owns the parameters that its own code alone reads. What the code between blocks reads too,
or another block (a weight tied within the stage), the root owns: whole while the stage runs. So are
the parameters of a block that writes in place to what comes into it, or whose results are written
to: `fully_shard` hangs its hooks on these tensors, and autograd forgets the hook of a view that is
written to, or refuses to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import fx, nn

from autopipe.recompute import Recomputed

_OP = type(torch.ops.aten.clone.default)


def home(root: nn.Module, path: str) -> str:
    """The model's path of a block: without what `lower` adds to one that is called again."""
    known = {name for name, _ in root.named_modules(remove_duplicate=False)}
    while path not in known and path.endswith("_again"):
        path = path.removesuffix("_again")
    return path


def pieces(module: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that a stage calls, by the paths it calls them by; recomputed or not."""
    for node in module.graph.find_nodes(op="call_module"):
        piece = module.get_submodule(str(node.target))
        yield (
            str(node.target),
            cast(fx.GraphModule, piece.block if isinstance(piece, Recomputed) else piece),
        )


def readers(root: nn.Module, module: fx.GraphModule) -> dict[str, set[str | None]]:
    """The blocks whose code reads a state, by its name; None for the code between blocks.

    Args:
        root: has a module at every path of the model that has states.
        module: a stage as `lower` makes it.
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
    """The block that is gathered for each parameter; None: the root.

    Args:
        root, module: as of `readers`.
    """
    blocks = {home(root, path) for path, _ in pieces(module)}
    blocks -= {home(root, path) for path in _written_across(module)}
    reading = readers(root, module)
    owner: dict[str, str | None] = {}
    for name in names:
        innermost = max((b for b in blocks if name.startswith(f"{b}.")), key=len, default=None)
        owner[name] = innermost if reading.get(name) == {innermost} else None
    return owner


def _written_across(module: fx.GraphModule) -> set[str]:
    """The blocks that write to what comes into them, or whose results are written to after them."""
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
    """The arguments of a graph, and its calls of modules, whose memory it writes to.

    Args:
        writes: what the module that a node calls writes to.
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
        for value, formal in zip(given, items[place]._schema.arguments, strict=False):
            if formal.alias_info is None:
                continue
            views = memory[value] if isinstance(value, fx.Node) else inputs
            memory[node] |= views
            found |= views if formal.alias_info.is_write else set()
    return found
