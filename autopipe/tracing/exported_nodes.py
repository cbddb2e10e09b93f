"""What single nodes and names of torch.export's program mean, before they are put together."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

from torch import fx, nn

from autopipe.ir.blocks import Visit
from autopipe.ir.graph import (
    READ_OP,
    Arg,
    Node,
    Ref,
    resolve,
    values_in,
)
from autopipe.ir.torch_private import writes

LOSS_SCOPE = "loss()"
"""The scope of what the loss function computes; no module can be called that."""


def scopes_of(node: fx.Node) -> tuple[str, ...]:
    """The visits of modules that a node was made in, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    calls: list[str] = []
    inside = False
    for key, (path, _) in stack.items():
        if path == "model":
            inside = True
        elif path.startswith("model."):
            inside = True
            _, at, call = key.rpartition("@")
            visit = Visit(path.removeprefix("model."), int(call) if at else 0)
            calls.append(str(visit))
    known = any(path == "" for path, _ in stack.values())
    return tuple(calls) if inside or not known else (LOSS_SCOPE,)


def is_whole_slice(op: str, args: tuple[Arg, ...]) -> bool:
    """Whether an op is `x[:]`: eager and a trace at fixed rows leave it out, a symbolic one not."""
    return (
        op == "aten.slice.Tensor"
        and args[2:3] in ((), (0,))
        and args[3:]
        in (
            (),
            (sys.maxsize,),
        )
    )


def names_by_identity(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a parameter or buffer -> all names of that tensor, the first one in front."""
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def live_nodes(nodes: Sequence[Node], outputs: tuple[Arg, ...]) -> tuple[Node, ...]:
    """The nodes that a result, a read or a write in place depends on."""
    needed = {v.node for v in values_in(outputs) if isinstance(v, Ref)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in needed or node.op == READ_OP or writes(resolve(node.op)):
            kept.append(node)
            needed.update(v.node for v in node.values() if isinstance(v, Ref))
    return tuple(reversed(kept))
