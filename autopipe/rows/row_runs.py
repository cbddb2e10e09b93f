"""Run a part of a graph on a few rows, and on each half of them: node by node, in float64.

    whole    x [4, d] --linear--> h [4, d] --mean--> [4]         h of a half: two rows of h, or what
    halves   x [2, d] --linear--> h [2, d] --mean--> [2]         makes a row reads the rows beside

Neither the model nor its weights are needed. Parameters, buffers, and the results of some nodes are
made up. They are drawn once for all rows, and each half gets its rows of them. Inputs are those of
an example. In float64 rounding cannot explain a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor

from autopipe.batch.tree import Leaf
from autopipe.ir.graph import (
    REGION_OP,
    Arg,
    Graph,
    Input,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    bytes_at,
    resolve,
    shape_at,
)
from autopipe.rows.row_dims import rows_in
from autopipe.tracing.source import keeping_default_dtype
from autopipe.util import dims

ROWS = 4
"""Rows of the whole: halves of two rows, since one row cannot be compared with another."""

HALF = ROWS // 2

Leaves: TypeAlias = Mapping[str, Leaf]
Make: TypeAlias = Callable[..., Tensor]
Draw: TypeAlias = Callable[[Value, TensorSpec], Tensor]


@dataclass(frozen=True)
class Ran:
    """What a run computed.

    Attributes:
        values: of the inputs and states that were read, and of all nodes.
        outputs: the graph's: the loss, or a sum and a count, and what is counted beside.
    """

    values: Mapping[Value, Any]
    outputs: tuple[float, ...] = ()


@dataclass(frozen=True)
class RowRuns:
    """Nodes of a graph in their order; the results of those in `given` are made up."""

    graph: Graph
    nodes: tuple[Node, ...]
    given: frozenset[str]

    def bytes(self, node: Node) -> int:
        """Upper limit on the bytes of a node's results for all rows, in float64."""
        return sum(bytes_at(spec, ROWS) * 8 // spec.dtype.itemsize for spec in node.outputs if spec)

    def runs(
        self,
        leaves: Leaves,
        halves: Sequence[Leaves],
        made_up: Make,
        *,
        minor: bool = False,
        seed: int = 0,
        outputs: bool = True,
    ) -> tuple[Ran, Ran, Ran]:
        """The run of all rows, and those of its halves.

        Args:
            made_up: draws the values that are made up: `torch.randn` or `torch.rand`.
            minor: whether in a dim of 3*b the rows come last: `[3, b]` and not `[b, 3]`.
            seed: of the generator of the values that are made up.
            outputs: whether the nodes compute the graph's outputs.

        Raises:
            RowsUnknown: the rows of a value that is made up cannot be separated.
        """
        generator = torch.Generator().manual_seed(seed)
        whole: dict[Value, Tensor] = {}

        def draw(value: Value, spec: TensorSpec) -> Tensor:
            if value not in whole:
                whole[value] = drawn(shape_at(spec, ROWS), spec.dtype, made_up, generator)
            return whole[value].clone()

        def part(first: int) -> Draw:
            rows = (ROWS, first, HALF)
            return lambda value, spec: rows_in(whole[value], spec, rows, minor).clone()

        with keeping_default_dtype():
            torch.set_default_dtype(torch.float64)  # of what the graph makes from numbers
            return (
                self._run(ROWS, leaves, draw, outputs),
                self._run(HALF, halves[0], part(0), outputs),
                self._run(HALF, halves[1], part(HALF), outputs),
            )

    @torch.no_grad()
    def _run(self, rows: int, leaves: Leaves, draw: Draw, outputs: bool) -> Ran:
        known: dict[Value, Any] = {}

        def read(value: Input | State) -> Any:
            if isinstance(value, Input):
                return _copied(leaves[value.path])
            constant = self.graph.constants.get(value.name)
            return draw(value, self.graph.spec(value)) if constant is None else _copied(constant)

        def value(arg: Arg) -> Any:
            if isinstance(arg, Input | State) and arg not in known:
                known[arg] = read(arg)
            if isinstance(arg, Value):
                return known[arg]
            if isinstance(arg, tuple):
                return tuple(map(value, arg))
            if isinstance(arg, sympy.Basic):
                return dims.number_at(arg, rows)
            if isinstance(arg, torch.dtype) and arg.is_floating_point:
                return torch.float64
            return torch.device("cpu") if isinstance(arg, torch.device) else arg

        for node in self.nodes:
            refs = [Ref(node.name, number) for number in range(len(node.outputs))]
            if node.name in self.given:
                known.update({r: draw(r, s) for r, s in zip(refs, node.outputs, strict=True) if s})
                continue
            args = [value(arg) for arg in node.args]
            if "dropout" in node.op:
                args[2] = False  # (input, p, train)
            if node.op == REGION_OP:
                args[-1] = self.graph.called(node).key
            result = resolve(node.op)(*args, **{key: value(a) for key, a in node.kwargs.items()})
            results = result if node.packed else (result,)
            if node.op == REGION_OP:
                results = map(_copied, results)  # it computes in the dtypes that it has recorded
            known.update(zip(refs, results, strict=True))
        ends = self.graph.outputs if outputs else ()
        return Ran(known, tuple(float(value(output)) for output in ends))


def off(expected: Tensor, found: Tensor, close: float) -> bool:
    """Whether two values differ by more than rounding; False too where one is no number.

    Args:
        close: the tolerance, as a share of the largest entry.
    """
    if expected.shape != found.shape:
        return True
    if torch.equal(expected, found) or not expected.numel():
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return True
    return bool((expected - found).abs().max() > close * expected.abs().max())


def drawn(
    shape: Sequence[int],
    dtype: torch.dtype,
    made_up: Make,
    generator: torch.Generator,
) -> Tensor:
    """A made-up value, floats in float64; of whole numbers zeros, of truth values ones."""
    if dtype.is_floating_point:
        return made_up(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    return torch.full(shape, dtype == torch.bool, dtype=dtype)


def _copied(leaf: Any) -> Any:
    """A copy of a tensor, since it may be written in place; floats become float64."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(torch.float64, copy=True) if leaf.is_floating_point() else leaf.clone()
