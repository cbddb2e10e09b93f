"""A plan's cost by formulas of Galvatron (Miao et al., VLDB 2022; Hetu-Galvatron 2.4.1).

A transformer's layers are alike; each runs in a way of its own (`Way`), the embedding and the head
together in one more. With r rows per micro-batch and replica, w devices per replica, n devices that
share one gradient, P the layer's parameters in fp32:

    forward    f(r / w), a line through the measured layer times; backward 2 f, recomputed 3 f
    messages   tp: 6 gathers or scatters of r * sequence * hidden in bf16, Ulysses: 4 all-to-alls;
               half as many again if recomputed; times as measured
    gradients  2 (n - 1) / n * P / tp / 2 through the all-reduce bus, beside backward: while both go
               on, both are `OVERLAP` times slower; only in the last of the micro-batches
    ZeRO-3     half of the gradients' bytes again, beside nothing, in every micro-batch
    memory     16 bytes a parameter (4 P), sharded by ZeRO; saved bytes by w for every micro-batch
               in flight, pp - stage of them; for the vocabulary likewise, and `CONTEXT`

A stage's time c is the sum over its layers and its part of the vocabulary, without gradients. With
forward c / 3 and backward 2 c / 3, m micro-batches of 1F1B take, if stage s is the slowest,

    before s   c_0 + ... + c_{s-1}
    at s       (m - k) c_s                                             k = p - 1 - s stages behind
    behind s   max(k c_s / 3, C / 3) + max(2 k c_s / 3, 2 C / 3)       C = c_{s+1} + ... + c_{p-1}

and the step is the largest of these over s, and then the gradients still exposed. Galvatron takes
this at the first and the last stage alone, of which its even cuts make one the slowest. Here it is
taken at every stage, or a plan with other cuts would pass for quicker than it is.

The program the numbers are of: github.com/PKU-DAIR/Hetu-Galvatron, galvatron/core/cost_model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.planners.galvatron import HIDDEN, LAYERS, Costs

OVERLAP = 1.125552573612729
"""How much slower computing and an all-reduce get beside each other: the repository's
galvatron/profile_hardware/hardware_configs/overlap_coefficient.json."""

CONTEXT = 1024
"""MiB a process holds before it computes; `pytorch_context_mem`."""

SLACK = 0.003
"""Added to 1/n of what ZeRO shards over n devices: shards are a little larger than even."""

RESERVED = 0.2
"""Of a device of more than 20 GiB, kept for the caching allocator; `mem_cache`."""


@dataclass(frozen=True)
class Way:
    """How a layer runs: on `tp` * `ulysses` * `dp` devices, of tp and ulysses one being 1.

    `zero` 0, 2 or 3 as in Galvatron, or 1: the optimizer's state alone is sharded. With several
    micro-batches Galvatron's 2 holds whole gradients too and counts the same bytes.
    """

    tp: int
    ulysses: int
    dp: int
    zero: int
    recomputed: bool = False

    @property
    def width(self) -> int:
        """Devices that share one row."""
        return self.tp * self.ulysses

    @property
    def sharers(self) -> int:
        """Devices that hold the same slice of the parameters and reduce its gradient."""
        return self.dp * self.ulysses


@dataclass(frozen=True)
class Plan:
    """A way per layer and stage, and one for the vocabulary.

    `buffer` is the tp that the gathering buffer all layers share is sized for; None without tp.
    """

    stages: tuple[tuple[Way, ...], ...]
    vocabulary: Way
    micro_batches: int
    buffer: int | None


@dataclass(frozen=True)
class Score:
    """Seconds of a step, and MiB of each stage as Galvatron prints it, with what is reserved."""

    seconds: float
    memory: tuple[int, ...]


def reserved(limit: int) -> int:
    """MiB of a device of `limit` MiB that no plan may use."""
    return int(limit * RESERVED) if limit // 1024 > 20 else 0


def sharded(zero: int, devices: int, micro_batches: int) -> float:
    """The share of 16 bytes a parameter that a device holds: 2 weights, 2 gradient, 12 the rest."""
    shard = 1 / devices + SLACK
    whole = micro_batches > 1  # gradients are reduced after the last, and held whole until then
    kept = {0: 8, 1: 2, 2: 2 if whole else 1, 3: 1 if whole else 0}[zero] if devices > 1 else 8
    return ((8 - kept) * shard + kept) / 8


def layer_times(costs: Costs, way: Way, rows: int, pp: int) -> tuple[float, float]:
    """Milliseconds of a layer for a micro-batch: the one that reduces gradients, and any other."""
    forward = costs.layer(rows / way.width)
    backward = forward * (3 if way.recomputed else 2)
    bus = _bus(costs, way)
    gradients = (way.sharers - 1) / way.sharers * costs.parameters / way.tp
    besides = 0.0
    if way.width > 1:
        kind, count = (costs.gather, 6.0) if way.tp > 1 else (costs.exchange, 4.0)
        besides += kind[way.width](activation(costs, rows)) * count * (1.5 if way.recomputed else 1)
    if way.zero == 3:
        besides += gradients / 2 * bus
    if pp > 1:  # of one transfer there and back per stage, each layer's share
        besides += pp * 2 * activation(costs, rows) * costs.transfer[pp] / LAYERS
    alone = forward + backward + besides
    if way.dp == 1:  # theirs: a layer without replicas reduces nothing, under Ulysses neither
        return alone, alone
    return forward + together(backward, gradients * bus) + besides, alone


def together(computing: float, reducing: float) -> float:
    """Of both begun at once, each `OVERLAP` times slower until the shorter one is done."""
    shorter = min(computing, reducing)
    return shorter * OVERLAP + max(computing, reducing) - shorter


def activation(costs: Costs, rows: float) -> float:
    """MiB of `rows` rows of what a layer passes on, in bf16."""
    return rows * costs.sequence * HIDDEN * 2 / 2**20


def _bus(costs: Costs, way: Way) -> float:
    """Milliseconds a MiB takes through an all-reduce; tp has the neighbours."""
    if way.sharers == 1:
        return 0.0
    return costs.reduce.get((way.sharers, way.tp == 1)) or costs.reduce[way.sharers, True]


def vocabulary_times(costs: Costs, way: Way, rows: int, pp: int) -> list[tuple[float, float]]:
    """Milliseconds of embedding and head by stage, as of `layer_times`.

    Half a forward each where they are apart; a gather each. Communication is taken to hide
    computing of its own length, which is then `OVERLAP` times slower.
    """
    forward = costs.vocabulary(rows / way.width)
    messages = costs.gather[way.tp](activation(costs, rows)) if way.tp > 1 else 0.0
    bus = _bus(costs, way) * (way.sharers - 1) / way.sharers

    def part(states: float, share: float, gathers: int) -> tuple[float, float]:
        weights = states / 4 / 2 * bus  # bf16 of the 16 bytes; by half of it at a time
        fetched = weights / 2 if way.zero == 3 else 0.0
        ahead = _hidden(fetched, forward * share) + gathers * messages
        reducing = ahead + _hidden(fetched + weights / 2, 2 * forward * share)
        return reducing, ahead + _hidden(fetched, 2 * forward * share)

    if pp == 1:
        return [part(costs.alone.states[way.tp], 1, 2)]
    first, last = (part(end.states[way.tp], 0.5, 1) for end in (costs.first, costs.last))
    return [first, *[(0.0, 0.0)] * (pp - 2), last]


def _hidden(communicating: float, computing: float) -> float:
    return communicating + max(0.0, computing - communicating / OVERLAP)


def memory(costs: Costs, plan: Plan, batch: int) -> tuple[int, ...]:
    """MiB by stage, rounded up per layer as Galvatron does, without what is reserved."""
    pp = len(plan.stages)
    found = []
    for stage, ways in enumerate(plan.stages):
        flights = 1 if pp == 1 else pp - stage
        used = math.ceil(CONTEXT + _vocabulary_memory(costs, plan, batch, stage))
        if plan.buffer is not None:
            gathered = plan.vocabulary.width * plan.vocabulary.dp // plan.buffer
            used += int(activation(costs, batch / plan.micro_batches / gathered))
        for way in ways:
            rows = batch // plan.micro_batches // way.dp
            states = 4 * costs.parameters / way.tp
            states *= sharded(way.zero, way.sharers, plan.micro_batches)
            kept = costs.kept / way.width if way.recomputed else costs.saved[way.width]
            used += math.ceil(states + kept * rows * flights)
        found.append(used)
    return tuple(found)


def _vocabulary_memory(costs: Costs, plan: Plan, batch: int, stage: int) -> float:
    pp, way = len(plan.stages), plan.vocabulary
    rows = batch // plan.micro_batches // way.dp
    if pp == 1:
        part, flights = costs.alone, 1
    elif stage == 0:
        part, flights = costs.first, pp
    elif stage == pp - 1:
        part, flights = costs.last, 1
    else:
        return 0.0
    states = part.states[way.tp] * sharded(way.zero, way.sharers, plan.micro_batches)
    return states + part.saved[way.width] * rows * flights


def score(costs: Costs, plan: Plan, batch: int, limit: int) -> Score:
    """Seconds of a step of `batch` rows, and the memory on devices of `limit` MiB."""
    pp, count = len(plan.stages), plan.micro_batches
    rows = batch // count // plan.vocabulary.dp
    ends = vocabulary_times(costs, plan.vocabulary, rows, pp)
    alone, reducing = [], []
    for ways, end in zip(plan.stages, ends, strict=True):
        times = [layer_times(costs, way, batch // count // way.dp, pp) for way in ways]
        reducing.append(sum(time for time, _ in times))
        alone.append(sum(time for _, time in times) + end[1])
    exposed = max(whole - sum(alone[: stage + 1]) for stage, whole in enumerate(reducing))
    seconds = (max(bounds(alone, count)) + max(0.0, exposed)) / 1000
    used = memory(costs, plan, batch)
    return Score(seconds, tuple(mebibytes + reserved(limit) for mebibytes in used))


def bounds(alone: Sequence[float], count: int) -> Iterator[float]:
    """The step's length as each stage in turn would have it."""
    for stage, time in enumerate(alone):
        behind = len(alone) - 1 - stage
        drain = max(behind * time, sum(alone[stage + 1 :]))  # both maxima choose alike
        yield sum(alone[:stage]) + (count - behind) * time + drain
