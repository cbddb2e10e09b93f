"""Where nothing fits: the smallest changes that would, each of them tried.

asked for            tried in its place
recompute=...        any blocks                 micro_batches=1    any number
zero=0               zero 1, zero 3             schedule=gpipe     any
pp=2                 any number of stages       these devices      1, 2, 4 ... more of the last,
                                                                   until they are enough
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.errors import InfeasibleError
from autopipe.machine import Machine
from autopipe.plan import ZERO
from autopipe.planners.amounts import percent
from autopipe.problem import Decision, Problem

if TYPE_CHECKING:
    from autopipe.planners.answer import Scored

Fastest = Callable[[Problem], "Scored | None"]
"""The fastest decision that fits; None: nothing fits."""

MOST_MORE = 3
"""How many times as many devices are tried, at most."""


def would_fit(problem: Problem, fastest: Fastest) -> list[str]:
    """Changes after which a plan fits, as words; each with the time it takes more than a plan for
    devices that hold everything, `zero 1 (+6 % time)`."""
    unlimited = fastest(limitless(problem))
    words = []
    for name, change in _changes(problem):
        found = _fitting(change, fastest)
        if found is not None:
            more, step = "", found.estimate.step_seconds
            if unlimited is not None and step > unlimited.estimate.step_seconds:
                more = f" (+{percent(step / unlimited.estimate.step_seconds - 1)} time)"
            words.append(f"{_said(name, found.decision, change)}{more}")
            if name == "devices":
                break  # those that follow are only more of them
    return words


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Each a single thing that is no longer as asked for."""
    asked = problem.constraints
    if asked.recompute is not None and len(asked.recompute) < len(problem.reruns):
        yield "recompute", replace(problem, constraints=replace(asked, recompute=None))
    for zero in ZERO:
        # With tensor-parallel ranks gradients may be in parts, which ZeRO-3 cannot deal out.
        if zero > max(problem.zeros) and (zero < 3 or problem.tp == 1):
            yield "zero", replace(problem, zeros=(zero,))
            break
    for name in ("micro_batches", "schedule", "pp", "dp"):
        if getattr(asked, name) is not None and not asked.programs:
            yield name, replace(problem, constraints=replace(asked, **{name: None}))  # type: ignore[arg-type]
    if asked.pp is None or asked.dp is None:
        more, most = 1, (MOST_MORE - 1) * problem.machine.devices
        while more <= most:
            yield "devices", replace(problem, machine=_with_more(problem.machine, more))
            more *= 2


def _fitting(problem: Problem, fastest: Fastest) -> Scored | None:
    try:
        return fastest(problem)
    except InfeasibleError:
        return None  # what is left asked for contradicts itself


def _said(name: str, decision: Decision, problem: Problem) -> str:
    """The change in words, with what the planner made of it."""
    frame = decision.frame
    match name:
        case "recompute":
            stages = [str(s) for s, blocks in enumerate(decision.recompute) if blocks]
            return f"recomputation in stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
        case "devices":
            return f"{problem.machine.devices * problem.tp} devices"
        case "schedule":
            return f"the schedule {frame.schedule}"
        case "zero":
            return f"zero {frame.zero}"
    return f"{name}={getattr(frame, name)}"


def limitless(problem: Problem) -> Problem:
    """The same on devices that hold everything; no block need run again, if none was asked to."""
    machine = problem.machine
    roomy = replace(problem, machine=replace(machine, memory=(UNLIMITED,) * machine.devices))
    if problem.constraints.recompute is not None:
        return roomy
    kept = tuple(replace(profile, saved=(), again=()) for profile in problem.profiles)
    return replace(roomy, profiles=kept, reruns=())


UNLIMITED = 2**62
"""Bytes of a device that holds everything."""


def _with_more(machine: Machine, more: int) -> Machine:
    """As many more of the last device, on its node."""
    places = machine.topology
    return replace(
        machine,
        kinds=machine.kinds + machine.kinds[-1:] * more,
        memory=machine.memory + machine.memory[-1:] * more,
        topology=replace(
            places,
            nodes=places.nodes[: machine.devices] + places.nodes[-1:] * more,
            sites=places.sites[: machine.devices] + places.sites[-1:] * more,
        ),
    )
