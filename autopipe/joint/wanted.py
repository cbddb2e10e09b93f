"""Derive from a plan how its stages' backward is to run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """How a stage's backward is to run.

    Attributes:
        halves: in two halves, for inputs and for weights; else in one piece.
        least: forward keeps as little as it can without running products again (`run_again`); else
            all that autograd keeps. Ops that a plan asks for run again either way.
        offload: paths of the blocks whose kept tensors wait in the host's memory
            (`joint.offload`); not with halves.
    """

    halves: bool = True
    least: bool = False
    offload: frozenset[str] = frozenset()


HALVES = Wanted()
"""What zero-bubble schedules want, and autograd keeps."""


def wanted(
    halves: bool,
    *,
    compiled: bool,
    by_op: bool,
    gathers: bool = False,
    offload: Collection[str] = (),
) -> Wanted | None:
    """How backwards run under a schedule; None: as autograd runs them, in one piece.

    Args:
        halves: whether the schedule has backwards in two halves.
        compiled: whether stages are compiled: then forward keeps the least bytes.
        by_op: whether single ops run again in some backward.
        gathers: whether stages gather parameters where they read them (`stages.gathering`).
        offload: as `Wanted` has it.
    """
    if halves or compiled or by_op or gathers or offload:
        return Wanted(halves, least=compiled, offload=frozenset(offload))
    return None
