"""A stage's bytes of a micro-batch as polynomials in rows b and tokens s, through dry runs.

    bytes(b, s) = sum of c_ij b^i s^j      (i <= 1, j <= 2; without a symbol for tokens j = 0)

The stages run without memory at a few sizes, and each of their bytes gets the polynomial through
those. One more run, of other sizes, must give what it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product as combinations
from typing import NamedTuple

import sympy

from autopipe.errors import AutopipeError
from autopipe.ir.graph import bytes_at
from autopipe.planners.costs.loss_bytes import loss_bytes
from autopipe.planners.costs.plan_memory import dry_run
from autopipe.planners.costs.tp_degrees import as_first
from autopipe.planners.formulas.from_sympy import of_sympy
from autopipe.planners.formulas.lengths import PlannedStages
from autopipe.planners.formulas.stage_seconds import NAMES
from autopipe.rewriting.for_gpus import for_gpus
from autopipe.scaling.expressions import ROWS, TOKENS, Expression, largest, product, total
from autopipe.stages.step_programs import sizes
from autopipe.util.progress import phase

Point = tuple[int, int]
"""Rows, and tokens; 0 where those are no symbol."""


Sampled = dict[str, int]
"""Bytes of a stage by what they are: those of `OWN`, and of each tensor that it sends on, by `SENT`
and its name."""

OWN = ("kept", "stash", "fresh", "made", "momentary")
SENT = "sent "


class _Ran(NamedTuple):
    """A dry run: the bytes of the stages, and whether their backwards run as compiled graphs."""

    stages: list[Sampled]
    compiled: tuple[bool, ...]


@dataclass(frozen=True)
class StageSizes:
    """Byte formulas of a stage for one micro-batch; see `schedules.peak_memory.Sizes` for others.

    Attributes:
        sends: bytes of each tensor that it sends, by name.
        passing: bytes that exist only within its loss's backward.
        largest: bytes of its largest gradient, in the dtype of the sum.
        added: bytes of that gradient if it exists beside its sum and is not counted in `made`.
        wide: additional bytes of gradients while they are cast to fp32 for the optimizer.
    """

    kept: Expression
    stash: Expression
    fresh: Expression
    made: Expression
    momentary: Expression
    sends: dict[str, Expression]
    passing: Expression
    largest: int
    added: int
    wide: int


def stage_bytes(planned: PlannedStages) -> list[StageSizes]:
    """The bytes of a plan's stages.

    Raises:
        NoPolynomial: the bytes of some stage are no polynomial.
    """
    rows = planned.plan.batch.microbatch_rows(planned.plan.mesh.dp)
    tokens = planned.traced.tokens if planned.traced.symbolic else 0
    run = cache(lambda rows, tokens: _dry_run(planned, rows, tokens))
    gpus = planned.plan.cluster.has_gpus
    with phase("bytes at other sizes"), as_first(planned.plan.mesh.tp), for_gpus(gpus):
        lengths = (tokens, tokens // 2) if tokens else (0,)
        try:  # most models' kept bytes are a straight line in the tokens, too
            return _fitted(planned, run, (rows, 2 * rows), lengths)
        except NoPolynomial:
            if not tokens:
                raise
            return _fitted(planned, run, (rows, 2 * rows), (*lengths, tokens // 4))


class NoPolynomial(AutopipeError):
    """Raised where the bytes counted at one size differ from the polynomial of the others."""


def _fitted(
    planned: PlannedStages,
    run: Callable[[int, int], _Ran],
    rows: tuple[int, int],
    lengths: tuple[int, ...],
) -> list[StageSizes]:
    """The bytes through runs of these rows, each with these lengths, checked by another run."""
    points = list(combinations(rows, lengths))
    check = rows[0] + rows[1], lengths[0] * 3 // 4
    runs = [run(*point) for point in (*points, check)]
    fit = cache(lambda values: _through(points, check, values))
    stages = []
    for index in range(len(planned.plan.stages)):
        formulas = {
            what: fit(tuple(ran.stages[index][what] for ran in runs))
            for what in runs[0].stages[index]
        }
        sends = {what.removeprefix(SENT): f for what, f in formulas.items() if what not in OWN}
        compiled = runs[0].compiled[index]
        most, wide = _gradients(planned, index)
        stages.append(
            StageSizes(
                **{what: formulas[what] for what in OWN},
                sends=sends,
                passing=_passing(planned, index, compiled=compiled),
                largest=most,
                added=0 if compiled else most,
                wide=wide,
            )
        )
    return stages


def _dry_run(planned: PlannedStages, rows: int, tokens: int) -> _Ran:
    """The bytes of all stages at one size."""
    ran = dry_run(planned.fixed(rows, tokens), repeats_equal=True, known={}).rehearsal
    sampled = []
    for stage in planned.split.stages:
        own = sizes(ran, stage)
        sent = {f"{SENT}{ref}": ran.boundaries[ref].bytes for ref, _ in stage.sends}
        sampled.append({what: getattr(own, what) for what in OWN} | sent)
    return _Ran(sampled, ran.compiled or (False,) * len(sampled))


def _through(points: Sequence[Point], check: Point, values: tuple[int, ...]) -> Expression:
    """The polynomial through values at some points.

    Raises:
        NoPolynomial: it misses the last value, at `check`.
    """
    lengths = len({tokens for _, tokens in points})
    powers = list(combinations(range(len(points) // lengths), range(lengths)))

    def row(rows: int, tokens: int) -> list[sympy.Integer]:
        return [sympy.Integer(rows) ** i * sympy.Integer(tokens) ** j for i, j in powers]

    matrix = sympy.Matrix([row(*point) for point in points])
    factors = list(matrix.LUsolve(sympy.Matrix(values[:-1])))
    predicted = sum(f * power for f, power in zip(factors, row(*check), strict=True))
    if predicted != values[-1]:
        of = f" of {check[1]} tokens" if check[1] else ""
        raise NoPolynomial(
            f"{check[0]} rows{of} keep {values[-1]} bytes, where other sizes predict {predicted}"
        )
    return total(
        *(
            product(float(factor), *_power(ROWS, i), *_power(TOKENS, j))
            for factor, (i, j) in zip(factors, powers, strict=True)
            if factor
        )
    )


def _power(name: str, power: int) -> tuple[Expression, ...]:
    return () if not power else (name,) if power == 1 else (("^", name, float(power)),)


def _passing(planned: PlannedStages, index: int, *, compiled: bool) -> Expression:
    """`StageSizes.passing`, as `costs.loss_bytes` counts it."""
    graph, stage = planned.split.graph, planned.split.stages[index]
    sizes = [*filter(None, loss_bytes(graph, stage.nodes, compiled=compiled))]
    return largest(*(of_sympy(size, NAMES) for size in sizes)) if sizes else 0.0


def _gradients(planned: PlannedStages, index: int) -> tuple[int, int]:
    """`StageSizes.largest` and `.wide`, as `costs.stage_memory.passing` counts them."""
    states = (planned.split.graph.states[name] for name in planned.split.stages[index].states)
    trained = [state for state in states if state.trainable]
    summed = [bytes_at(state.summed, 1) for state in trained]
    more = sum(bytes_at(state.held, 1) for state in trained) - sum(summed)
    return max(summed, default=0), 0 if planned.plan.deals else more
