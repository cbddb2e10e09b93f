"""Bytes of one stage on one device: a lower bound, an estimate, and whether they fit.

    function     what it is for                           what it reads
    bound        rule out a mesh before its cuts          sums over units: no cuts, no transfers
    estimate     search: every range of units at once     sums over ranges (`range_tables.Tables`)
    exact        the plan that is written                 the plan's programs, instruction by
                                                          instruction (`costs.plan_memory`)

    bound - ROUNDED <= estimate            for every range, and every set of recomputed blocks

The exact bytes need a dry run of the model, so they are computed elsewhere. Where they are above
a device's limit, the search is repeated with less room on every device (`Problem.beyond`), by what
was too much and by enough to rule out that very plan. All three are compared with a device's limit
by `excess`.

**Estimate.** Let stage s hold the units [i, j), n of m micro-batches being in flight. Over that
range `Tables` has W trainable, Z frozen and C constant bytes, A bytes saved for backward, R bytes
received and S bytes sent; R' and S' are those of them whose gradient goes the other way.

    W + L + Z                  parameters, and copies in 16 bits of those that are masters
    G                          gradients: W, or W - L where those of masters are of 16 bits
    optimizer_factor * W       optimizer state
    C                          buffers
    n * (A - D + R)            activations: what is received is kept until its backward
    k * H                      what the first half of a backward leaves for the second
    max(d, g) + v              what backward makes; what is on its way to the host
    min(window, m) * R         receives posted ahead
    min(window + 1, m) * S'    the same for gradients, and the one that backward is using
    S + min(2, m) * R'         sends under way: one leaving, and a gradient that is being made
    g' + l                     a gradient made beside its sum; bytes within a loss's backward

H are bytes of a micro-batch that is between the halves of its backward, k of the n, beyond those of
one before them (`planners.saved.between_halves`). D are the bytes that recomputed blocks do not
save and that blocks offload, d the bytes of the largest block, held once while it is recomputed
(`planners.model.recompute_sets`), v those of two blocks that offload
(`planners.model.offload_ways`), g those that the backward of a compiled stage makes
(`joint.fullest_call`): of gradients of logits, mostly. Of others, g' are those of the largest
gradient, if m > 1, and l those of gradients of logits (`costs.loss_bytes`). ZeRO-1 divides the
optimizer state by dp, and masters, 2 L of W, which are a part of it; ZeRO-2 gradients too, and has
the buckets that are scattered (`scattered_bytes`) beside them; ZeRO-3 also parameters, Z too, and
has what it gathers (`gathered_bytes`) in the place of L.

**Bound.** A stage holds at least a sum over its units,

    sum over its units u of  w_u + n * a_u

    w_u     states that u is the first unit to use, with their gradients and optimizer state
    a_u     what u is the first unit to save, unless a block saves it that may be recomputed or
            offloaded
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopipe.planfile.parts import BUCKET_BYTES
from autopipe.planners.model.problem import Config, Problem, splits
from autopipe.planners.model.range_tables import Bytes, Tables, Times

ROUNDED = 16
"""Bytes that a stage's estimate may lie below its bound, whose parts are not rounded."""


Held = TypeVar("Held", int, Bytes, Times)


def excess(held: Held, limit: int) -> Held:
    """Bytes held beyond a limit; 0 or less means that they fit.

    Args:
        held: bytes of one stage or device, or an array of them.
        limit: bytes that the device may hold.
    """
    return held - limit


class EstimatedBytes(NamedTuple):
    """Bytes on one device by purpose, for every range of units: fields of `planfile.parts.Memory`.

    Each is an array of the shape of the ranges, but for `buffers` and others that are one number
    where all ranges have the same.
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    activations: Bytes
    transfers: Bytes
    passing: Bytes

    @property
    def peak(self) -> Bytes:
        """The sum of all parts: linear in the micro-batches in flight."""
        return np.asarray(sum(self[1:], start=self[0]))


def estimate(
    ranges: Tables,
    problem: Problem,
    config: Config,
    in_flight: int | Bytes,
    dropped: int | Bytes = 0,
    held: int | Bytes = 0,
    moving: int | Bytes = 0,
    waiting: int = 0,
) -> EstimatedBytes:
    """Estimated bytes on one device by purpose.

    Args:
        ranges: the ranges of units, in any shape; each result has that shape.
        in_flight: micro-batches whose activations the stage holds at once.
        dropped: D, bytes of a micro-batch that recomputed blocks do not save, or are offloaded.
        held: d, bytes held once while a block is recomputed.
        moving: v, bytes held once while offloaded tensors are on their way.
        waiting: k, micro-batches between the halves of their backward.
    """
    micro_batches, dp, zero = config.micro_batches, config.dp, config.zero
    posted, arriving = (min(problem.window + n, micro_batches) for n in (0, 1))
    leaving = min(2, micro_batches)
    trainable, share = ranges.trainable, -(-ranges.trainable // dp)
    if config.fully_sharded:
        frozen = -(-ranges.frozen // dp)
        parameters = share + frozen + gathered_bytes(ranges.block, ranges.tied, dp)
    else:
        masters = -(-2 * ranges.copies // (dp if zero else 1))
        parameters = ranges.read + masters + ranges.frozen
    updated = share if zero else trainable
    return EstimatedBytes(
        parameters=parameters,
        gradients=share if config.scatters else ranges.summed,
        optimizer=np.rint(problem.optimizer_factor * updated).astype(np.int64),
        buffers=ranges.constants,
        activations=np.asarray(in_flight) * (ranges.saved - dropped + ranges.received)
        + waiting * ranges.waiting
        + np.maximum(held, ranges.made)
        + moving,
        transfers=posted * ranges.received
        + arriving * ranges.sent_gradient
        + ranges.sent
        + leaving * ranges.received_gradient,
        passing=_passing(ranges, config),
    )


def _passing(ranges: Tables, config: Config) -> Bytes:
    """Bytes of gradients that exist only within a backward."""
    if config.scatters:
        return ranges.passing + scattered_bytes(ranges.summed, ranges.largest, config.dp)
    # From the second micro-batch on.
    return ranges.passing + (ranges.added if config.micro_batches > 1 else 0)


def gathered_bytes(block: ArrayLike, tied: ArrayLike, ranks: int) -> Bytes:
    """The most bytes that ZeRO-3 has gathered at once, as in `runtime.parameters.zero3`.

        2 T + T / n            what stays comes first, out of a table to which each rank gives rows
        T + 2 U + U / n        then a unit comes while the one before it runs

    Args:
        block: U, bytes of the largest gathered unit.
        tied: T, bytes of parameters that stay gathered.
        ranks: n, the number of ranks over which they are sharded.
    """
    unit, stays = np.asarray(block), np.asarray(tied)
    running = stays + 2 * unit + -(-unit // ranks)
    return np.asarray(np.maximum(running, 2 * stays + -(-stays // ranks)))


def scattered_bytes(summed: ArrayLike, largest: ArrayLike, ranks: int) -> Bytes:
    """Bytes of gradients in the buckets of ZeRO-2 and 3 during a backward, as in
    `runtime.parameters.zero2`.

    Args:
        summed: bytes of a stage's gradients.
        largest: bytes of the largest of them.
        ranks: n, the number of ranks over which they are sharded.
    """
    bucket = np.minimum(summed, np.maximum(largest, BUCKET_BYTES))
    return np.asarray(2 * bucket + -(-bucket // ranks))


@dataclass(frozen=True, eq=False)
class Bound:
    """Bytes that units hold at least, as sums from the first unit on: shape (units + 1,).

    Args:
        states: entry u is the sum of w over the units before u.
        saved: entry u is the sum of a over the units before u.
    """

    states: Times
    saved: Times

    def bytes(self, first: int, end: int, in_flight: int) -> float:
        """Bytes that a stage of the units [first, end) holds at least."""
        sums = self.upto(in_flight)
        return float(sums[end] - sums[first])

    def upto(self, in_flight: int) -> Times:
        """Bytes that the units before each unit hold at least, by micro-batches in flight."""
        return np.asarray(self.states + in_flight * self.saved)


def bound(problem: Problem, config: Config) -> Bound:
    """The lower bound on the bytes of every stage that a config may have."""
    rows = config.microbatch_rows(problem.batch)
    saved = _saved_anyway(problem, rows, not splits(problem, config.schedule))
    return Bound(_states(problem, config.dp, config.zero), saved)


@lru_cache(maxsize=64)
def _states(problem: Problem, dp: int, zero: int) -> NDArray[np.float64]:
    """Bytes of the states that units before each unit are the first to use, as a rank holds them:
    shape (units + 1,)."""
    # The shares that a rank has of optimizer state, gradients and parameters.
    optimizer, gradients, own = (1 / dp if zero >= stage else 1.0 for stage in (1, 2, 3))
    factor, fully = problem.optimizer_factor, zero == 3 and dp > 1
    held = own + gradients + factor * optimizer
    low = problem.low_gradients and gradients == 1
    sizes = np.zeros(problem.units + 1)
    for states, times in (
        (problem.parameters, held),
        (problem.frozen, own),
        (problem.constants, 1.0),
        # Beside the masters, which are in `held`, or in their place, and shards of them.
        (problem.copies, 0.0 if fully else 2 * optimizer - 1 - low),
    ):
        for state in states:
            sizes[state.units[0] + 1] += times * state.bytes
    return np.cumsum(sizes)


@lru_cache(maxsize=64)
def _saved_anyway(problem: Problem, rows: int, may_drop: bool) -> NDArray[np.float64]:
    """Bytes of a micro-batch that units before each unit save, whatever is recomputed or offloaded:
    shape (units + 1,)."""
    asked = problem.constraints
    fixed = None
    if asked.recompute is not None:
        fixed = {*(again.block for again in asked.recompute), *(asked.offload or ())}
    profile = problem.profile(rows)
    sizes = np.zeros(problem.units + 1)
    handed: Counter[tuple[int, int]] = Counter()
    for saved in profile.saved:
        unit, maker = saved.savers[0], saved.producer
        if saved.block is not None and (may_drop if fixed is None else saved.block in fixed):
            continue
        if maker is None or maker == unit:
            sizes[unit + 1] += saved.bytes
        else:
            handed[maker, unit] += saved.bytes
    crossing: Counter[tuple[int, int]] = Counter()
    for tensor in profile.crossings:
        crossing[tensor.producer, tensor.consumers[0]] += tensor.bytes
    # A tensor of an earlier unit is saved or received: whichever is less.
    for way, size in (handed & crossing).items():
        sizes[way[1] + 1] += size
    return np.cumsum(sizes)
