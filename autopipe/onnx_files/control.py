"""If, Loop and Scan, where a trace knows which branch is taken and how often a body runs.

    If     the branch of a condition on sizes, as exporters write a squeeze
    Loop   its body as often as a number says, and until a condition that is known ends it
    Scan   its body for each entry of a dim

A branch by the values of tensors, or a loop that they end, is refused: it fits no plan.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopipe.onnx_files.values import NodeOf, Value, as_tensor, ints, is_sizes


@dataclass(frozen=True)
class InnerGraph:
    """A graph within a node.

    Attributes:
        takes: the names of its inputs.
        gives: the names of its outputs.
        run: from all values by name, those outside included, its outputs.
    """

    takes: tuple[str, ...]
    gives: tuple[str, ...]
    run: Callable[[MutableMapping[str, Value]], list[Value]]


def control(
    node: NodeOf,
    bodies: Mapping[str, InnerGraph],
    inputs: Sequence[Value],
    values: MutableMapping[str, Value],
) -> tuple[Value, ...]:
    """The results of a node with graphs in it.

    Args:
        node: the node.
        bodies: its graphs, by the attribute.
        inputs: what it reads.
        values: all values outside, by name, which its graphs may read.

    Raises:
        ModelError: what runs depends on the values of a tensor.
    """
    if node.op == "If":
        branch = bodies["then_branch" if _holds(node, inputs[0]) else "else_branch"]
        return tuple(branch.run(values))
    if node.op == "Loop":
        return _loop(node, bodies["body"], inputs, values)
    return _scan(node, bodies["body"], inputs, values)


def _holds(node: NodeOf, value: Value) -> bool:
    if not is_sizes(value):
        raise node.refuse(
            "its condition is computed from the values of a tensor, and no plan follows it",
            "export the model for one branch, or with the loop unrolled",
        )
    return bool(value.reshape(-1)[0])


def _loop(
    node: NodeOf, body: InnerGraph, inputs: Sequence[Value], values: MutableMapping[str, Value]
) -> tuple[Value, ...]:
    most = None if inputs[0] is None else int(ints(node, inputs[0])[0])
    goes_on = len(inputs) < 2 or inputs[1] is None or _holds(node, inputs[1])
    kept, gathered, count = [*inputs[2:]], list[list[Value]](), 0
    while goes_on and (most is None or count < most):
        given = [np.array(count, dtype=object), np.array(True, dtype=object), *kept]
        condition, *made = body.run(ChainMap(dict(zip(body.takes, given, strict=True)), values))
        kept, count = made[: len(kept)], count + 1
        gathered.append(made[len(kept) :])
        goes_on = _holds(node, condition)
    return *kept, *_stacked(node, gathered, len(body.gives) - 1 - len(kept))


def _scan(
    node: NodeOf, body: InnerGraph, inputs: Sequence[Value], values: MutableMapping[str, Value]
) -> tuple[Value, ...]:
    if node.version < 9:
        raise node.refuse("before op set 9 it ran row by row, up to a length of each row")
    many = node.get("num_scan_inputs")
    kept = [*inputs[: len(inputs) - many]]
    results = len(body.gives) - len(kept)
    axes = node.get("scan_input_axes", [0] * many)
    turned = node.get("scan_input_directions", [0] * many)
    parts = [
        list(as_tensor(x).flip(axis).unbind(axis) if back else as_tensor(x).unbind(axis))
        for x, axis, back in zip(inputs[len(kept) :], axes, turned, strict=True)
    ]
    gathered: list[list[Value]] = []
    for entries in zip(*parts, strict=True):
        made = body.run(ChainMap(dict(zip(body.takes, (*kept, *entries), strict=True)), values))
        kept = made[: len(kept)]
        gathered.append(made[len(kept) :])
    stacked = _stacked(
        node,
        gathered,
        results,
        node.get("scan_output_axes", [0] * results),
        node.get("scan_output_directions", [0] * results),
    )
    return *kept, *stacked


def _stacked(
    node: NodeOf,
    gathered: Sequence[Sequence[Value]],
    results: int,
    axes: Sequence[int] = (),
    turned: Sequence[int] = (),
) -> list[Any]:
    """Each result of all runs of a body, side by side in a new dim."""
    if results and not gathered:
        raise node.refuse("its body runs no time, and the shape of its results is not known")
    runs = [gathered[::-1] if n < len(turned) and turned[n] else gathered for n in range(results)]
    return [
        torch.stack([as_tensor(run[n]) for run in runs[n]], axes[n] if axes else 0)
        for n in range(results)
    ]
