"""The fewest rows that a micro-batch may have: batch norm needs two values per channel to train.

    x [b, 16]          b values of each channel         b >= 2
    x [b, 16, 8, 8]    64 b                             b >= 1

torch's own function refuses one value per channel. The graph's op does not: it divides by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import sympy

from autopipe.errors import ModelError
from autopipe.ir.graph import SEQUENCE, Graph, Node, Value, arguments, at_batch, once


@dataclass(frozen=True)
class Least:
    """A lower limit on the rows of a micro-batch; `place` is the user's line that causes it."""

    rows: int = 1
    place: str = ""

    def refusal(self, rows: int) -> ModelError:
        """The error for micro-batches of `rows` rows, fewer than the limit."""
        at = f"{self.place}: " if self.place else ""
        return ModelError(
            f"{at}batch norm trains on more than one value of each channel, and a "
            f"micro-batch of {rows} row{'s' if rows > 1 else ''} has one",
            hint=f"micro-batches of at least {self.rows} rows: fewer of them, or a larger batch",
        )


ONE = Least()


@once
def least_rows(graph: Graph) -> Least:
    """The largest lower limit over all nodes of the graph."""
    found = ONE
    for node in graph.nodes:
        if (rows := _least(graph, node)) > found.rows:
            found = Least(rows, node.place)
    return found


def check_rows(graph: Graph, rows: int) -> None:
    """Refuse micro-batches with fewer rows than the graph can be trained with.

    Raises:
        ModelError: names the user's line.
    """
    least = least_rows(graph)
    if rows < least.rows:
        raise least.refusal(rows)


def _least(graph: Graph, node: Node) -> int:
    """The fewest rows of a batch norm in training; 1 for any other node."""
    if node.op != "aten.batch_norm.default" or not arguments(node)["training"]:
        return 1
    operand = node.args[0]
    assert isinstance(operand, Value)
    batch, _, *others = graph.spec(operand).shape
    values = sympy.sympify(batch * sympy.prod(others)).subs(SEQUENCE, 1)
    if not values.free_symbols:
        return 1
    return next(rows for rows in count(1) if at_batch(values, rows) > 1)
