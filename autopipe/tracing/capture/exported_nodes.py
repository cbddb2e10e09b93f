"""Interpret single nodes and names of torch.export's program, and put some in another order."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, InputSpec

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.blocks import Visit
from autopipe.ir.dataflow import analyse, written_by
from autopipe.ir.graph import (
    READ_OP,
    Arg,
    Graph,
    Node,
    Ref,
    State,
    arguments,
    short_name,
    values_in,
)
from autopipe.ir.torch_private import expression, is_control_flow, is_fake, writes
from autopipe.planfile.placements import BIG

LOSS_SCOPE = "loss()"
"""The scope of what the loss function computes; no module can be called that."""


def scopes_of(node: fx.Node) -> tuple[str, ...]:
    """The module calls in which a node was made, from the outermost."""
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


def check_op(node: fx.Node) -> None:
    """Refuse, with the user's line, an op that no stage can run.

    Raises:
        CaptureError: it is a loop, gives a tensor other memory, or waits for other processes.
    """
    place = user_lines.of_trace(node.stack_trace)
    if is_control_flow(node.target):
        raise CaptureError(
            f"{place}: the model uses {node.target}, control flow inside the graph that autopipe "
            "cannot split"
        )
    if str(node.target).startswith("aten.set_."):
        raise CaptureError(
            f"{place}: x.set_() gives a tensor other memory; ranks have each tensor in its own",
            hint="write in place: x.copy_(value)",
        )
    if getattr(node.target, "namespace", "").lstrip("_").startswith("c10d"):
        raise CaptureError(
            f"{place}: the model calls {str(node.target).split('.')[1]} of torch.distributed, for "
            "which it would wait: other ranks have other stages",
            hint="build the model before torch.distributed is initialised, or give the function "
            "that builds it; replicas have statistics of their own",
        )


def is_whole_slice(op: str, args: tuple[Arg, ...]) -> bool:
    """Whether an op is `x[:]`: eager and a trace at fixed rows leave it out, a symbolic one not."""
    return (
        op == "aten.slice.Tensor" and args[2:3] in ((), (0,)) and args[3:] in ((), (sys.maxsize,))
    )


def handed_back(node: fx.Node) -> fx.Node | None:
    """The argument that an op returns itself: `x.float()` of an fp32 x, `x.clamp_(0, 1)`.
    None: the op makes a new tensor.

    A trace has a node for such an op, which all later readers of x read. If it stands under
    `torch.no_grad()`, it would cut off the gradients of readers outside.

    Raises:
        CaptureError: it gives the argument another shape in place, which all its readers would see.
    """
    output, op = node.meta.get("val"), cast(Any, node.target)
    read = {n: v for n in node.all_input_nodes if isinstance(v := n.meta.get("val"), Tensor)}
    if not isinstance(output, Tensor) or not hasattr(op, "overloadpacket"):
        return None
    like = any((v.dtype, v.dim()) == (output.dtype, output.dim()) for v in read.values())
    if not like and not writes(op):
        return None  # not run, as an op with value-dependent sizes would make new symbols
    # A write in place may change the shape of its argument.
    values = {n: n.meta["val"] for n in node.all_input_nodes} | {
        n: v.detach() for n, v in read.items()
    }
    with torch.no_grad():
        again = op(
            *fx.map_arg(node.args, values.__getitem__),
            **fx.map_arg(node.kwargs, values.__getitem__),
        )
    same = next((n for n in read if values[n] is again), None)
    if same is not None and output.shape != read[same].shape:
        raise CaptureError(
            f"{user_lines.of_trace(node.stack_trace)}: a tensor is given another shape in place, "
            "under torch.no_grad()",
            hint="use the op that is not in place: x = x.unsqueeze(0)",
        )
    return same


def is_fresh_constant(nodes: Sequence[Node], arg: Arg) -> bool:
    """Whether an argument is the copy of a constant that the last of the nodes makes."""
    if not nodes or not isinstance(arg, Ref):
        return False
    return nodes[-1].name == arg.node and nodes[-1].op == "aten.lift_fresh_copy.default"


def names_by_identity(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of a parameter or buffer -> all names of that tensor, the first one in front."""
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def kind_of(exported: torch.export.ExportedProgram, spec: InputSpec) -> str:
    """The kind of an exported program's input: a leaf, a state, or a constant (all of the loss's).

    Raises:
        CaptureError: it is a parameter of the loss that could be trained.
    """
    target = str(spec.target)
    of_model = target.startswith("model.")
    if spec.kind is InputKind.PARAMETER and not of_model:
        if not exported.state_dict[target].requires_grad:  # as of a network that looks at pictures
            return "constant"
        raise CaptureError(
            f"the loss has a parameter, {target.removeprefix('loss.')!r}, which is none of the "
            "model's, so no optimizer is given it",
            hint="make it a parameter of the model, and let forward return it or the loss read "
            "it; one that is not to be trained is frozen: loss.requires_grad_(False)",
        )
    if spec.kind is InputKind.PARAMETER:
        return "parameter"
    return "buffer" if spec.kind is InputKind.BUFFER and of_model else "constant"


def constant_of(
    exported: torch.export.ExportedProgram, target: str, placeholder: fx.Node
) -> Tensor:
    """The tensor behind a placeholder that is neither a parameter nor a buffer of the model.

    Raises:
        CaptureError: it has no values.
    """
    value = (
        exported.state_dict[target] if target in exported.state_dict else exported.constants[target]
    )
    places = [user_lines.of_trace(user.stack_trace) for user in placeholder.users]
    at = f"{places[0]}: " if places and places[0] else ""
    if not isinstance(value, Tensor) or is_fake(value):
        raise CaptureError(
            f"{at}the model keeps {target.removeprefix('model.')}, which is no buffer and was "
            "computed from parameters or from a batch before",
            hint="compute it in forward, or register it with register_buffer",
        )
    return value


def check_statistics(graph: Graph) -> Graph:
    """The graph; refused if a norm in evaluation reads statistics that another one writes later.

    The first norm's backward reads the statistics again, after other micro-batches wrote them.

    Raises:
        CaptureError: one does; names both of the user's lines.
    """
    flow = analyse(graph)
    for position, node in enumerate(graph.nodes):
        if node.short not in ("batch_norm", "instance_norm") or not node.grad or written_by(node):
            continue
        given = arguments(node)
        for read in (given["running_mean"], given["running_var"]):
            written = flow.writers.get(flow.root[read], ()) if isinstance(read, State) else ()
            later = [p for p in written if p > position]
            if later:
                raise CaptureError(
                    f"{node.place}: a norm in evaluation reads {read}, which "
                    f"{graph.nodes[later[0]].place} writes later in the same forward; its backward "
                    "would read what a later micro-batch has written",
                    hint="call it first in training and then in evaluation, or give the one in "
                    "evaluation copies of its statistics",
                )
    return graph


def with_copies_beside(graph: Graph, assigned: Collection[str]) -> Graph:
    """The graph with each copy of an assigned buffer moved beside its source or its reader.

    The trace has these copies at the two ends of a module's call; for a buffer of the whole model,
    no cut would be possible in between. A copy moves neither into another module's call nor past
    another use of the buffer.
    """
    flow, nodes = analyse(graph), list(graph.nodes)
    buffers = {State(name) for name in assigned}
    for node in [n for n in graph.nodes if n.op in _COPIES and n.args[0] in buffers]:
        old = nodes.index(node)
        others = [p for p, n in enumerate(nodes) if n is not node and node.args[0] in n.values()]
        if node.op == _WRITTEN:
            source = node.args[1]
            aliases = {v for v in flow.root if flow.root[v] == flow.root.get(source)}  # type: ignore[call-overload]
            after = [p for p, n in enumerate(nodes[:old]) if aliases & {Ref(n.name), *n.values()}]
            new = max([p for p in [*after, *others] if p < old], default=-1) + 1
            while new < old and _one_call(nodes[new - 1], nodes[new], node):
                new += 1
        else:
            readers = [p for p, n in enumerate(nodes) if Ref(node.name) in n.values()]
            new = min([p for p in [*readers, *others] if p > old], default=old + 1) - 1
            while new > old and _one_call(nodes[new], nodes[new + 1], node):
                new -= 1
        nodes.insert(new, nodes.pop(old))
    return replace(graph, nodes=tuple(nodes))


_WRITTEN = "aten.copy_.default"
_COPIES = ("aten.clone.default", _WRITTEN)


def _one_call(node: Node, following: Node, copy: Node) -> bool:
    """Whether two nodes ran in one call of a module that `copy` is not in."""
    depth = len(copy.scopes)
    call = node.scopes[: depth + 1]
    return len(call) > depth and following.scopes[: depth + 1] == call


def live_nodes(nodes: Sequence[Node], outputs: tuple[Arg, ...]) -> tuple[Node, ...]:
    """The nodes that a result, a read or a write in place depends on."""
    needed = {v.node for v in values_in(outputs) if isinstance(v, Ref)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in needed or node.op == READ_OP or written_by(node):
            kept.append(node)
            needed.update(v.node for v in node.values() if isinstance(v, Ref))
    return tuple(reversed(kept))


def drawn_without_gradient(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes in which `randint_like` gives no gradient, as `torch.randint_like` does.

    The op below it, alone of those that make a tensor like another, fails in backward instead.
    """
    return tuple(replace(n, grad=False) if n.short == "randint_like" else n for n in nodes)


def keep_memory_order(module: fx.GraphModule) -> None:
    """Give the tensors that `as_strided` reads the memory order that they had in the trace.

        x.as_strided(sizes, strides)        x.permute(order).contiguous().as_strided(sizes, strides)

    The strides count elements in memory, and a tensor from another rank or stage is laid out in the
    order of its dims. Nothing is copied where the order is the same.

    Raises:
        CaptureError: it reads beyond the tensor, or writes by strides; names the user's line.
    """
    for inner in module.modules():
        for node in [*inner.graph.nodes] if isinstance(inner, fx.GraphModule) else ():
            if str(node.target).startswith("aten.as_strided"):
                _read_in_order(node)


def _read_in_order(node: fx.Node) -> None:
    aten, result = torch.ops.aten, node.meta["val"]
    if node.target is not aten.as_strided.default:  # it writes
        raise _beside(node)
    arguments: Any = node.args
    x, sizes, strides, *offset = arguments
    source = x.meta["val"]
    order = sorted(range(source.dim()), key=lambda dim: -_number(source.stride(dim)))
    begin = _number(offset[0]) - _number(source.storage_offset()) if offset else 0
    steps = zip(result.shape, result.stride(), strict=True)
    end = begin + sum((_number(size) - 1) * _number(stride) for size, stride in steps)
    within = 0 <= begin and end < _number(source.numel()) and source.permute(order).is_contiguous()
    if not within:
        raise _beside(node)
    ops: list[Any] = [(aten.permute.default, order), (aten.contiguous.default,)]
    if begin:
        ops += [(aten.flatten.using_ints,), (aten.slice.Tensor, 0, begin)]
    with node.graph.inserting_before(node):
        for op, *rest in ops:
            source = op(source, *rest)
            x = node.graph.call_function(op, (x, *rest))
            x.meta = {**node.meta, "val": source}
    node.args = (x, sizes, strides)


def _beside(node: fx.Node) -> CaptureError:
    return CaptureError(
        f"{user_lines.of_trace(node.stack_trace)}: {short_name(str(node.target))}() reads or "
        "writes memory beside the tensor that it is given, and other ranks have something else "
        "there",
        hint="call it on the whole tensor, or on x.contiguous()",
    )


def _number(size: int | torch.SymInt | fx.Node) -> int:
    """The value of a size for many rows, without a guard on their number."""
    if isinstance(size, fx.Node):
        return _number(size.meta["val"])
    if isinstance(size, int):
        return size
    found = expression(size)
    return int(found.subs(dict.fromkeys(found.free_symbols, BIG)))
