"""The fewest rows that a micro-batch may have: batch norm needs two values per channel to train.

    x [b, 16]              b values of each channel         b >= 2
    x [b, 16, 8, 8]        64 b                             b >= 1
    if x.shape[0] == 1:    the graph is that of no          b >= 2

torch's own function refuses one value per channel. The graph's op does not: it divides by zero.
torch.export takes each dim to be two and more, and has no note of a question whether it is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import sympy

from autopipe.errors import ModelError
from autopipe.ir.graph import SEQUENCE, Graph, Node, Value, arguments, at_batch, once


@dataclass(frozen=True)
class Least:
    """A lower limit on the rows of a micro-batch; `place` is the user's line that causes it.

    `asked`: the line asks whether there is one row, and the graph is that of more.
    """

    rows: int = 1
    place: str = ""
    asked: bool = False

    def refusal(self, rows: int) -> ModelError:
        """The error for micro-batches of `rows` rows, fewer than the limit."""
        at = f"{self.place}: " if self.place else ""
        if self.asked:
            return ModelError(
                f"{at}the model asks whether there is one row, its graph is that of more, and "
                f"these micro-batches have {rows}",
                hint="micro-batches of at least 2 rows; or --micro-batch-size 1, if the loss of "
                'each is its own (loss_over = "micro-batch"): the graph is then one of one row',
            )
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


def or_two(least: Least, asking: Sequence[str]) -> Least:
    """A limit, or two rows where lines of the user's (`asking`) ask whether there is one."""
    return Least(2, asking[0], asked=True) if asking and least.rows < 2 else least


def check_rows(least: Least, rows: int) -> None:
    """Refuse micro-batches with fewer rows than the graph can be run with.

    Raises:
        ModelError: names the user's line.
    """
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
