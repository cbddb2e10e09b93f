"""A plan's seconds and bytes at other sizes, as formulas: data for JSON and a page's script.

    Sheet
    +-- costs        seconds of one micro-batch in a stage, on a link, of a sum: in b, s and w
    +-- sizes        bytes of one micro-batch that a stage keeps, sends ...: in b and s
    +-- ranks        what each holds whatever the size, and how much it may hold
    +-- counts       by number of micro-batches
        +-- paths    the step is the longest of them: how often each of the costs is on it
        +-- moments  of each rank: how often it holds each of the sizes

b are the rows of a micro-batch, s the tokens of a row, w bytes a second of the farthest link.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.scaling.expressions import Expression

Form = tuple[tuple[int, float], ...]
"""A sum of costs or of sizes: the number of each in its table, and how often it counts."""


@dataclass(frozen=True)
class StageStates:
    """The bytes that a stage holds beside those that `Sheet.sizes` count.

    Attributes:
        held: its states, copies of them, and what ZeRO-3 gathers.
        added: its largest gradient, which is made beside the sum that it is added to; none with a
            single micro-batch.
        passing: bytes that exist only within its loss's backward; beside the sizes, in b and s.
        bucket: what a sum over ranks copies at the end, or the optimizer gets in fp32, when the
            rest is gone.
    """

    held: int
    added: int
    bucket: int
    passing: Expression


@dataclass(frozen=True)
class RankBytes:
    """A rank of the pipeline: its stages, by their numbers, and the bytes that it may hold."""

    stages: dict[int, StageStates]
    room: int


Moment = dict[int, Form]
"""What a rank holds at one instruction, of each of its stages."""


@dataclass(frozen=True)
class Count:
    """The paths and moments of a plan with one number of micro-batches.

    Attributes:
        paths: of which the longest is the step.
        moments: of each rank, those at which it may hold most.
    """

    paths: tuple[Form, ...]
    moments: tuple[tuple[Moment, ...], ...]


@dataclass(frozen=True)
class Sheet:
    """A plan at other sizes; see the module's picture.

    Attributes:
        pp, dp, tp, schedule, zero: of the plan.
        again: blocks that run a second time in backward.
        devices: those with a rank.
        rows, tokens, micro_batches: those that it was planned for; 0 tokens: rows are no sequences.
        computing: the seconds for which the mean rank computes in a micro-batch.
        flops: model FLOPs of b rows of s tokens.
        peak: operations a second of all devices; 0 where it is not known.
        binding: what keeps the step from being faster, as planned.
    """

    pp: int
    dp: int
    tp: int
    schedule: str
    zero: int
    again: int
    devices: int
    rows: int
    tokens: int
    micro_batches: int
    costs: tuple[Expression, ...]
    computing: Form
    sizes: tuple[Expression, ...]
    ranks: tuple[RankBytes, ...]
    counts: dict[int, Count]
    flops: Expression
    peak: float
    binding: str


@dataclass(frozen=True)
class Point:
    """The sizes to evaluate a sheet at: a batch of `batch` rows, micro-batches of `rows` rows."""

    batch: int
    rows: int
    tokens: int
    bandwidth: float


@dataclass(frozen=True)
class PlanAt:
    """A plan at a point: seconds of a step, the share in which the mean rank does not
    compute, and the bytes of each rank when it is fullest."""

    step_seconds: float
    bubble: float
    peaks: tuple[int, ...]
