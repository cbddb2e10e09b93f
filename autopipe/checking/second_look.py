"""Tell rounding that decides something from a difference: compare once more, in fp64.

    input of a ReLU     unsplit  3e-08     split  -1e-08     both are 0 to rounding
    its gradient        unsplit  1         split  0          no rounding

A plan that changes the order of sums may so be off by any share in fp32 and be right. In fp64 the
two stand on the same side of nearly every such edge: what was rounding is off by `EXACT` at most,
and what is wrong is as wrong as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopipe.checking.compare import orders_kept
from autopipe.checking.comparison import Comparison, share
from autopipe.checking.random_ops import Unmatched, Unrepeatable
from autopipe.errors import AutopipeError

EXACT = 1e-9
"""How far gradients and buffers may be off in fp64 if rounding alone has moved them; that is 4e6
units in the last place."""


def may_be_rounding(found: Comparison) -> bool:
    """Whether what differs could be right in fp64: numbers in fp32, of sums in another order."""
    plan = found.plan
    wrong = [row for row in found.rows if row.wrong]
    finite = all(math.isfinite(row.off) for row in wrong)
    return bool(wrong) and finite and plan.precision == "fp32" and not orders_kept(plan)


def second_look(found: Comparison, in_fp64: Callable[[], Comparison]) -> Comparison:
    """The comparison in fp64, if it shows that rounding alone made `found` differ; else `found`.

    Args:
        in_fp64: makes it; the model may have a dtype in its code, and refuse.
    """
    try:
        again = in_fp64()
    except (AutopipeError, Unmatched, Unrepeatable):
        return found
    exact = all(row.off <= EXACT for row in again.rows if row.what in ("gradients", "buffers"))
    if not again.right or not exact:
        return found
    row = next(row for row in found.rows if row.wrong)
    note = (
        f"in fp32, {row.what} of step {row.step} are off by {share(row.off)} of the largest entry "
        f"of {row.furthest!r}, where rounding decides, as at a ReLU of nearly 0; what is below is "
        "in fp64"
    )
    return replace(again, notes=(*again.notes, note))
