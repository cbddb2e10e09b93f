"""Tell rounding from a difference: compare once more, in a wider dtype.

fp64, where rounding may decide:

    input of a ReLU     unsplit  3e-08     split  -1e-08     both are 0 to rounding
    its gradient        unsplit  1         split  0          no rounding

So a plan that changes the order of sums may be right and differ by any share in fp32. In fp64 both
models are on the same side of nearly every such edge: a difference by rounding shrinks to `EXACT`
at most, and a real one stays.

fp32, where rounding to 16 bits may hide a difference, or make one:

    a gradient          may be off by 0.1 in bf16, where sums have another order; in fp32 by 1e-5
    of a norm's bias    a sum over tokens that nearly cancels: 0.19 at tp=2, where each rank rounds
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopipe.checking.compare import orders_kept, rounding
from autopipe.checking.comparison import Comparison, share
from autopipe.checking.random_ops import Unmatched, Unrepeatable
from autopipe.errors import AutopipeError

EXACT = 1e-9
"""How far gradients and buffers may be off in fp64 if rounding alone has moved them; that is 4e6
units in the last place."""

HIDING = ("loss", "gradients", "buffers")
"""What the forward and backward of a stage compute; a norm is summed from these."""


MOST_TIMES = 3
"""Up to so many times what 16 bits allow, a gradient's difference may be rounding. Without one of
two micro-batches or ranks it would be off by more."""


def may_be_rounding(found: Comparison) -> bool:
    """Whether differences may be rounding: the plan changes the order of sums, and is in fp32 or
    only its gradients are off, by little."""
    wrong = [row for row in found.rows if row.wrong]
    if not wrong or orders_kept(found.plan):
        return False
    if found.plan.precision == "fp32":
        return all(math.isfinite(row.off) for row in wrong)
    return all(row.what == "gradients" and row.off <= MOST_TIMES * row.allowed for row in wrong)


def second_look(found: Comparison, wider: Callable[[], Comparison]) -> Comparison:
    """Compare once more in a wider dtype: was it rounding alone that made `found` differ?

    Returns the wider comparison if it shows that, else `found`.

    Args:
        wider: compares in fp64 what was in fp32, and in fp32 what was in 16 bits; a model with
            dtypes in its code may refuse.
    """
    try:
        again = wider()
    except (AutopipeError, Unmatched, Unrepeatable):
        return found
    was = found.plan.precision
    exact = all(row.off <= EXACT for row in again.rows if row.what in ("gradients", "buffers"))
    if not again.right or (was == "fp32" and not exact):
        return found
    row = next(row for row in found.rows if row.wrong)
    edge, now = (", as at a ReLU of nearly 0", "fp64") if was == "fp32" else ("", "fp32")
    note = (
        f"in {was}, {row.what} of step {row.step} are off by {share(row.off)} of the largest entry "
        f"of {row.furthest!r}, where rounding decides{edge}; what is below is in {now}"
    )
    return _noted(again, note)


def may_be_hidden(found: Comparison) -> bool:
    """Whether rounding to 16 bits may hide a difference: not if all bits are equal, or the plan
    changes the order of no sum."""
    rounded = any(row.equal < row.tensors for row in found.rows if row.what in HIDING)
    low = found.plan.precision != "fp32" and not orders_kept(found.plan)
    return found.right and rounded and low


def closer_look(found: Comparison, in_fp32: Callable[[], Comparison]) -> Comparison:
    """Compare a 16-bit run once more in fp32, where rounding hides less.

    Returns the fp32 comparison if it shows a difference, else `found` with a note of what it has
    shown. If `found` itself differs, the question is that of `second_look`.

    Args:
        in_fp32: makes that comparison; a model with 16-bit dtypes in its code may refuse.
    """
    if not found.right:
        return second_look(found, in_fp32)
    try:
        again = in_fp32()
    except (AutopipeError, Unmatched, Unrepeatable) as error:
        return _noted(found, f"there is no closer look in fp32: {error}")
    if again.failure:
        return _noted(found, f"there is no closer look in fp32: {again.failure}")
    if not again.right:
        hidden = f"in {found.plan.precision} it is no more than rounding may do; this is in fp32"
        return _noted(again, hidden)
    limit = "" if orders_kept(again.plan) else f", which allows {rounding(again.plan):g}"
    return _noted(found, f"in fp32{limit}, it is {again.sentence}")


def _noted(found: Comparison, note: str) -> Comparison:
    return replace(found, notes=(*found.notes, note))
