"""A problem of two stages whose numbers are worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from autopipe.cluster.cluster import Link
from autopipe.planners.model.problem import (
    Config,
    Constraints,
    Crossing,
    Problem,
    Profile,
    Saved,
    Shared,
)
from tests.support.problems import machine

LINK = Link(0.25, 4.0)


PROFILE = Profile(
    rows=2,
    forward=((1.0, 2.0, 3.0),),
    backward=((2.0, 4.0, 6.0),),
    saved=(Saved(10, 0, (0,)), Saved(20, 1, (1,)), Saved(30, None, (2,))),
    crossings=(
        Crossing(8, 0, (1, 2), gradient=True),
        Crossing(4, 0, (2,), gradient=False),
        Crossing(6, 1, (2,), gradient=True),
    ),
)


PROBLEM = Problem(
    units=3,
    blocks=(),
    parameters=(Shared(100, (0, 2)), Shared(50, (1,))),
    constants=(Shared(7, (1, 2)),),
    optimizer_factor=2.0,
    profiles=(PROFILE,),
    batch=8,
    machine=machine(8, 1000, (LINK,) * 3),
    window=3,
    constraints=Constraints(),
)


TWO_STAGES = Config(2, 1, 4, 0, "1f1b")


FOUR_REPLICAS = Config(2, 4, 1, 0, "1f1b")

UNTIED = replace(
    PROBLEM, parameters=tuple(Shared(size, (unit,)) for unit, size in enumerate((100, 50, 100)))
)
"""The problem with 100 bytes of its own for unit 2."""
