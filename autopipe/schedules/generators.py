"""The schedules: which micro-batch a rank computes when, each as a short function with its picture.

A generator is a pure function of the number of ranks and of micro-batches. It writes compute alone;
`schedules.transfers` adds transfers. If each rank has one stage, rank r has stage r.

All schedules run the backwards of a stage, and its backwards for weights, in the order of the
micro-batches. Gradients are sums of floats, so the order is part of the result: every schedule
gives the same bits, and so does one process that runs the micro-batches in turn.

In the pictures a forward takes 1 and a backward 2, its two halves 1 each. If a rank has two stages,
the later one is in lower case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from autopipe.errors import ScheduleError
from autopipe.schedules.instructions import Entries, Instruction, Kind, Program, Programs


def naive(ranks: int, micro_batches: int) -> Programs:
    """Stop and wait: a micro-batch goes all the way there and back before the next one starts.

        rank 0: F0                   B0--- F1                   B1---
        rank 1:    F0          B0---          F1          B1---
        rank 2:       F0 B0---                   F1 B1---

    One rank works at a time. It is what a pipeline is compared with, and where to look first when
    a result is wrong.

    Raises:
        ScheduleError: there is no rank or no micro-batch.
    """
    _at_least_one(ranks, micro_batches)
    programs = []
    for rank in range(ranks):
        f, b = (_row(kind, rank, micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD))
        programs.append(tuple(_turns(micro_batches, f, b)))
    return tuple(programs)


def gpipe(ranks: int, micro_batches: int) -> Programs:
    """All forwards, then all backwards: simple, and holds every micro-batch's activations.

        rank 0: F0 F1 F2 F3                   B0--- B1--- B2--- B3---
        rank 1:    F0 F1 F2 F3          B0--- B1--- B2--- B3---
        rank 2:       F0 F1 F2 F3 B0--- B1--- B2--- B3---

    From "GPipe" (Huang et al., 2019, arXiv:1811.06965), with the backwards in the order of the
    micro-batches instead of the reverse.

    Raises:
        ScheduleError: there is no rank or no micro-batch.
    """
    _at_least_one(ranks, micro_batches)
    programs = []
    for rank in range(ranks):
        f, b = (_row(kind, rank, micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD))
        programs.append((*f, *b))
    return tuple(programs)


def one_f_one_b(ranks: int, micro_batches: int) -> Programs:
    """Forwards until the first micro-batch reaches the last rank, then one backward a forward.

        rank 0: F0 F1 F2             B0--- F3 B1--- F4 B2---    B3---    B4---
        rank 1:    F0 F1       B0--- F2 B1--- F3 B2--- F4 B3---    B4---
        rank 2:       F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---

    It takes as long as GPipe, but rank i of p holds the activations of only p - i micro-batches,
    whatever their number. From PipeDream-Flush (Narayanan et al., 2021, arXiv:2006.09503).

    Raises:
        ScheduleError: there is no rank or no micro-batch.
    """
    return eager_one_f_one_b(ranks, micro_batches, (0,) * (ranks - 1))


def eager_one_f_one_b(ranks: int, micro_batches: int, depths: Sequence[int]) -> Programs:
    """1F1B that runs further ahead, so that links with latency are hidden too.

    Depths of 1 at both boundaries:

        rank 0: F0 F1 F2 F3 F4       B0---    B1---    B2---    B3---    B4---
        rank 1:    F0 F1 F2    B0--- F3 B1--- F4 B2---    B3---    B4---
        rank 2:       F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4---

    Rank i of p holds p - i micro-batches, and depths[j] more for each boundary j|j+1 from it to the
    last rank. Transfers take no time in the picture, so nothing is gained. Where one takes c, two
    neighbours pass depths[j] + 2 micro-batches there and back in 2 (F + B + c), or one in

        max(F + B, 2 (F + B + c) / (depths[j] + 2))

    and the link is hidden from depths[j] = 2c / (F + B) on. Named so in "On Optimizing the
    Communication of Model Parallelism" (Zhuang et al., 2023, arXiv:2211.05322).

    Args:
        ranks, micro_batches: how many.
        depths: of each of the ranks - 1 boundaries, at least 0.

    Raises:
        ScheduleError: there is no rank or no micro-batch, or the depths do not fit the boundaries.
    """
    _at_least_one(ranks, micro_batches)
    if len(depths) != ranks - 1:
        raise ScheduleError(
            f"expected a depth for each of {ranks - 1} boundaries, found {len(depths)}",
            hint="a depth of 0 at every boundary is 1f1b",
        )
    for boundary, depth in enumerate(depths):
        if depth < 0:
            raise ScheduleError(
                f"expected a depth of at least 0 at boundary {boundary}|{boundary + 1}, "
                f"found {depth}"
            )
    programs = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank + sum(depths[rank:])
        f, b = (_row(kind, rank, micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD))
        programs.append((*_turns(ahead, f), *_turns(micro_batches, f, b)))
    return tuple(programs)


def one_f_one_b_in_turns(turns: Sequence[int], micro_batches: int) -> Programs:
    """1F1B where ranks take turns at a stage that takes longer than the others.

    Turns of 1 and 2, the second stage taking twice as long, 1 being stage 1 on one rank and 2 on
    the other:

        rank 0: F0 F1 F2             B0--- F3 B1--- F4 B2---    B3---    B4---
        rank 1:    F0--- B0--------- F2--- B2--------- F4--- B4---------
        rank 2:       F1--- B1---------       F3--- B3---------

    Each entry of a stage has a number of its own: the i-th of n runs micro-batches i, i + n, ...
    How many micro-batches a rank holds is in `held_in_turns`. With one rank each it is
    `one_f_one_b`. From "PipeDream" (Narayanan et al., SOSP 2019, sections 3.2 and 3.3), with a
    flush after every step.

    Args:
        turns: of each stage the number of ranks.
        micro_batches: how many; each rank needs one.

    Raises:
        ScheduleError: a stage has no rank, or more ranks than there are micro-batches.
    """
    for stage, ranks in enumerate(turns):
        _at_least_one(ranks, micro_batches)
        if ranks > micro_batches:
            raise ScheduleError(
                f"{ranks} ranks take turns at stage {stage}, and there are {micro_batches} "
                "micro-batches",
                hint=f"at least {ranks} micro-batches, or fewer ranks",
            )
    programs: list[Program] = []
    for ranks, held in zip(turns, held_in_turns(turns, micro_batches), strict=True):
        for turn in range(ranks):
            own_microbatches, entry = range(turn, micro_batches, ranks), len(programs)
            f, b = (
                iter([Instruction(kind, entry, k) for k in own_microbatches])
                for kind in (Kind.FORWARD, Kind.BACKWARD)
            )
            programs.append((*_turns(held - 1, f), *_turns(len(own_microbatches), f, b)))
    return tuple(programs)


def held_before(behind: int, ranks: int) -> int:
    """The micro-batches that each of a stage's ranks holds.

    Each rank holds one, and its share of all that the ranks of the next stage hold together:

        h_s = 1 + ceil(n_{s+1} h_{s+1} / n_s)         1 on the ranks of the last stage

    With this number, ranks that are equally busy never wait once the pipeline is full. (PipeDream
    has ceil(sum of n from the stage on / n_s), which may be less, and then ranks wait.) If each
    stage has one rank, it is p - s.

    Args:
        behind: the micro-batches that all ranks of the next stage hold together; 0: it is the last.
        ranks: the number of the stage's ranks.
    """
    return 1 + -(-behind // ranks)


def held_in_turns(turns: Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """The micro-batches that each rank of a stage holds, by `one_f_one_b_in_turns`."""
    held: list[int] = []
    behind = 0
    for ranks in reversed(turns):
        held.append(min(held_before(behind, ranks), -(-micro_batches // ranks)))
        behind = ranks * held[-1]
    return tuple(reversed(held))


def interleaved(ranks: int, micro_batches: int, chunks: int) -> Programs:
    """1F1B with several chunks of the model on each rank: stage s is on rank s % ranks.

        rank 0: F0 F1 f0 f1 F2    b0--- F3 b1--- f2 B0--- f3 B1---    b2---    b3--- B2--- B3---
        rank 1:    F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3---

    Micro-batches go in rounds of p: a rank takes a round through its first chunk, then through the
    next one, and backward the other way about. Filling and draining takes a v-th of the time of
    1F1B, v being the chunks, and every micro-batch crosses between ranks v times as often. Rank i
    holds (v - 1) p + 2 (p - i) - 1 chunks' activations. From "Efficient Large-Scale Language Model
    Training on GPU Clusters" (Narayanan et al., SC21, section 2.2, arXiv:2104.04473).

    The paper needs full rounds. Here the first round may be short: the program is that of full
    rounds without the missing micro-batches. It can run, since micro-batches depend on each other
    only by their order in a program.

    Raises:
        ScheduleError: there is no rank, no micro-batch or no chunk.
    """
    _at_least_one(ranks, micro_batches, chunks)
    short = -micro_batches % ranks  # what the first round lacks
    programs = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        f, b = (
            iter(
                [
                    Instruction(kind, stage, k)
                    for first in range(-short, micro_batches, ranks)
                    for stage in order
                    for k in range(first, first + ranks)
                ]
            )
            for kind, order in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1]))
        )
        ahead = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        full = (*_turns(ahead, f), *_turns((short + micro_batches) * chunks, f, b))
        programs.append(tuple(i for i in full if i.microbatch >= 0))
    return tuple(programs)


def zb_h1(ranks: int, micro_batches: int) -> Programs:
    """1F1B with backward in two halves: the one for weights, W, waits and fills the bubble.

        rank 0: F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1:    F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2:       F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

    Rank i runs W i micro-batches behind I, so every rank holds p micro-batches, as the first one
    does under 1F1B, and a bubble of (p - 1)(F + I - W) is left of (p - 1)(F + I + W). From "Zero
    Bubble Pipeline Parallelism" (Qi et al., 2024, arXiv:2401.10241, section 2.3).

    Raises:
        ScheduleError: there is no rank or no micro-batch.
    """
    _at_least_one(ranks, micro_batches)
    programs = []
    for rank in range(ranks):
        f, i, w = (_row(kind, rank, micro_batches) for kind in _SPLIT)
        warm_up = (*_turns(ranks - 1 - rank, f), *_turns(rank, f, i))
        programs.append((*warm_up, *_turns(micro_batches, f, i, w)))
    return tuple(programs)


def zb_v(ranks: int, micro_batches: int) -> Programs:
    """Two chunks on each rank, down the ranks and up again: the last stage is on rank 0 as well.

        rank 0: F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3
        rank 1:    F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3

    Rank r has stages r and 2p - 1 - r. Once filled it runs F I W of one chunk and of the other in
    turn, and always finds its next one ready: with F = I = W and at least 2p micro-batches no rank
    ever waits between its first instruction and its last. No rank holds more than 2p chunks'
    activations, which are the p micro-batches of 1F1B's first rank. From "Pipeline Parallelism with
    Controllable Memory" (Qi et al., 2024, arXiv:2405.15362).

    With fewer micro-batches than 2p it is the program of 2p without the missing ones.

    Raises:
        ScheduleError: there is no rank or no micro-batch.
    """
    _at_least_one(ranks, micro_batches)
    filled = max(micro_batches, 2 * ranks)
    programs = []
    for rank in range(ranks):
        f0, i0, w0 = (_row(kind, rank, filled) for kind in _SPLIT)  # down
        f1, i1, w1 = (_row(kind, 2 * ranks - 1 - rank, filled) for kind in _SPLIT)  # and up
        full = (
            *_turns(2 * (ranks - rank) - 1, f0),  # until F0 of the other chunk is here
            *_turns(rank, f1, f0),
            *_turns(ranks - rank, f1, i1, w1),  # until I0 of this chunk is here
            *_turns(filled - ranks, f0, i0, w0, f1, i1, w1),
            *_turns(rank, i0, i1),
            *_turns(ranks - rank, i0, w0),
            *w1,
            *w0,
        )
        programs.append(tuple(i for i in full if i.microbatch < micro_batches))
    return tuple(programs)


def forward_only(holders: Sequence[int], micro_batches: int, turns: Sequence[int] = ()) -> Programs:
    """Evaluation: forwards alone, nothing is kept.

    Two ranks with stages 0 and 2, and 1 and 3:

        rank 0: F0 F1 f0 f1 F2 F3 f2 f3
        rank 1:    F0 F1 f0 f1 F2 F3 f2 f3

    Micro-batches go in rounds of as many as there are ranks, through one stage of a rank after the
    other: a round comes back to a rank for its next stage just when that is free.

    Args:
        holders: the rank of each stage.
        micro_batches: how many.
        turns: of each stage the number of its entries in `holders`, which take turns.

    Raises:
        ScheduleError: there is no rank or no micro-batch.
    """
    ranks = 1 + max(holders, default=-1)
    _at_least_one(ranks, micro_batches)
    entries = Entries.at(turns or (1,) * len(holders))
    return tuple(
        tuple(
            Instruction(Kind.FORWARD, stage, k)
            for first in range(0, micro_batches, ranks)
            for stage, holder in enumerate(holders)
            if holder == rank
            for k in entries.taken(stage, range(first, min(first + ranks, micro_batches)))
        )
        for rank in range(ranks)
    )


_SPLIT = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def _row(kind: Kind, stage: int, micro_batches: int) -> Iterator[Instruction]:
    """One stage's instructions of a kind, for each micro-batch in turn."""
    return iter([Instruction(kind, stage, k) for k in range(micro_batches)])


def _turns(times: int, *rows: Iterator[Instruction]) -> Sequence[Instruction]:
    """Take the next instruction of each row, `times` times; a row that has ended is skipped."""
    turns = itertools.zip_longest(*(itertools.islice(row, times) for row in rows))
    return [instruction for turn in turns for instruction in turn if instruction is not None]


def _at_least_one(ranks: int, micro_batches: int, chunks: int = 1) -> None:
    for count, name in ((ranks, "rank"), (micro_batches, "micro-batch"), (chunks, "chunk")):
        if count < 1:
            raise ScheduleError(f"a schedule needs at least 1 {name}, found {count}")
