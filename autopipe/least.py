"""The fewest rows that a micro-batch may have: batch norm trains on more than one value a channel.

    x [b, 16]          b values of each channel         b >= 2
    x [b, 16, 8, 8]    64 b                             b >= 1

torch refuses one value where a model calls it. A graph's op does not: it divides by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import sympy

from autopipe.errors import ModelError
from autopipe.graph import SEQUENCE, Graph, Node, Value, at_batch, once


@dataclass(frozen=True)
class Least:
    """At least so many rows; `place` is the user's line that asks for them."""

    rows: int = 1
    place: str = ""

    def refusal(self, rows: int) -> ModelError:
        """That a micro-batch has fewer."""
        return ModelError(
            f"{self.place}: batch norm trains on more than one value of each channel, and a "
            f"micro-batch of {rows} row{'s' if rows > 1 else ''} has one",
            hint=f"micro-batches of at least {self.rows} rows: fewer of them, or a larger batch",
        )


ONE = Least()


@once
def least_rows(graph: Graph) -> Least:
    """The fewest rows that the graph can be trained with."""
    found = ONE
    for node in graph.nodes:
        if (rows := _least(graph, node)) > found.rows:
            found = Least(rows, node.place)
    return found


def check_rows(graph: Graph, rows: int) -> None:
    """Refuse micro-batches of too few rows.

    Raises:
        ModelError: names the user's line.
    """
    least = least_rows(graph)
    if rows < least.rows:
        raise least.refusal(rows)


def _least(graph: Graph, node: Node) -> int:
    """Of a batch norm in training; 1 for any other node."""
    if node.op != "aten.batch_norm.default" or not node.args[5]:
        return 1
    operand = node.args[0]
    assert isinstance(operand, Value)
    batch, _, *others = graph.spec(operand).shape
    values = sympy.sympify(batch * sympy.prod(others)).subs(SEQUENCE, 1)
    if not values.free_symbols:
        return 1
    return next(rows for rows in count(1) if at_batch(values, rows) > 1)
