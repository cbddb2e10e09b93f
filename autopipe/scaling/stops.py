"""The sizes at which a page's sliders stop: each has the plan's own among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from autopipe.planfile.contents import Plan
from autopipe.scaling import links
from autopipe.scaling.expressions import BANDWIDTH, ROWS, TOKENS

SHARES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)
"""Of the plan's rows, and of the batch, what is less or more of them."""

LENGTHS = 8
"""Parts of a row of tokens, of which each number is a stop if it is a token or more."""

BANDWIDTHS = tuple(2.0 ** (half / 2) for half in range(-8, 7))
"""Times the link's bandwidth."""

MOST_MICRO_BATCHES = 256
MOST_INSTRUCTIONS = 4096
"""Computations of all ranks in a step: more take seconds to walk through."""


@dataclass(frozen=True)
class Stops:
    """The stops of each slider, ascending; with a single stop there is no slider.

    Attributes:
        rows: of a micro-batch.
        tokens: of a row; 0: rows are no sequences, or their length is no symbol.
        bandwidths: bytes a second of the farthest link.
        batches: rows of a whole batch.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    bandwidths: tuple[float, ...]
    batches: tuple[int, ...]

    def counts(self, plan: Plan) -> list[int]:
        """The numbers of micro-batches that a plan may have at them."""
        if plan.programs:
            return []
        most = min(MOST_MICRO_BATCHES, MOST_INSTRUCTIONS // len(plan.stages))
        own = plan.batch.microbatch_rows(plan.mesh.dp)
        found = {
            batch // (plan.mesh.dp * rows)
            for batch, rows in product(self.batches, (own, *self.rows))
            if batch % (plan.mesh.dp * rows) == 0
        }
        return sorted(count for count in found if count <= most)

    def corners(self) -> Iterator[dict[str, float]]:
        """The least and the most of each size, and one between."""

        def few(sizes: Iterable[float]) -> list[float]:
            first, *rest = dict.fromkeys(sizes)
            return list(dict.fromkeys([first, *rest[len(rest) // 2 :][:1], *rest[-1:]]))

        names = ROWS, TOKENS, BANDWIDTH
        for sizes in product(few(self.rows), few(self.tokens), few(self.bandwidths)):
            yield dict(zip(names, sizes, strict=True))


def stops_of(plan: Plan, tokens: int, *, symbolic: bool) -> Stops:
    """The stops around a plan's own sizes.

    Args:
        tokens: of a row, 0 where rows are no sequences.
        symbolic: whether formulas are in the tokens.
    """
    rows, batch = plan.batch.microbatch_rows(plan.mesh.dp), plan.batch.rows
    bandwidth = links.farthest(plan.cluster).link.bandwidth
    moves = len(plan.mesh.places) > 1
    return Stops(
        _whole(rows),
        _lengths(tokens) if symbolic else (tokens,),
        tuple(times * bandwidth for times in BANDWIDTHS) if moves else (bandwidth,),
        _whole(batch),
    )


def _lengths(tokens: int) -> tuple[int, ...]:
    """The parts of a row of tokens; each length once, where rows have few of them."""
    lengths = (tokens * part // LENGTHS for part in range(1, LENGTHS + 1))
    return tuple(dict.fromkeys(length for length in lengths if length))


def _whole(size: int) -> tuple[int, ...]:
    """The whole numbers among the products of a size and `SHARES`."""
    return tuple(round(size * share) for share in SHARES if size * share % 1 == 0)
