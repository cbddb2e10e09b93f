"""The row of one model split one way, and the row of an error that a trial raised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from autopipe.errors import AutopipeError

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """What came of one model split one way.

    Attributes:
        outcome: right, refused, wrong, crashed, timeout, or not built.
        cause: the sentence of a refusal; what differs of a wrong one.
        gradient: the worst difference of a gradient, as a share of its largest entry.
        bitwise: whether loss, gradients and buffers are equal in every bit.
        unexplained: what is not, though no sum of it has another order: of pipelines alone.
        dealt: of the bytes of parameters, the share that tensor-parallel ranks have a part of.
        reference: what it was held to: "eager", or for random models "graph", the unsplit graph;
            "in fp64" where roundings make more than `CLOSE` of a difference in fp32; "rounding"
            where it is as near as the unsplit model with each weight's last place off by one.
        predicted, counted: bytes kept for backward on all ranks, by the plan and by the run.
        seconds: since the row before; the first row has building and tracing.
    """

    model: str
    what: str
    outcome: str
    cause: str = ""
    gradient: float | None = None
    bitwise: bool | None = None
    unexplained: str = ""
    dealt: float | None = None
    reference: str = ""
    predicted: int | None = None
    counted: int | None = None
    seconds: float = 0.0


def attempt(name: str, what: str, one: Callable[[], T]) -> T | Row:
    """What an attempt gives, or the row of whatever is raised in it."""
    try:
        return one()
    except Exception as error:  # whatever it is, the next model is tried
        return failed(name, what, error)


def failed(name: str, what: str, error: Exception) -> Row:
    """The row of an attempt that has raised."""
    if isinstance(error, AutopipeError):
        return Row(name, what, "refused", said(error))
    if isinstance(error.__cause__, AutopipeError):  # what one rank refuses, its peers pass on
        return Row(name, what, "refused", said(error.__cause__))
    return Row(name, what, "crashed", said(error))  # a bug of autopipe: no user may see it


def said(error: BaseException) -> str:
    """The first line of an error, with its type unless it is autopipe's own."""
    lines = str(error).strip().splitlines()
    first = lines[0][:300] if lines else ""
    return first if isinstance(error, AutopipeError) else f"{type(error).__name__}: {first}"
