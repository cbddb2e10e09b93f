"""Find the smallest changes after which a plan fits, if none does; each is tried.

asked for            tried in its place
recompute=...        any blocks                 micro_batches=1    any number, any size
zero=0               zero 1, zero 3             schedule=gpipe     any
pp=2                 any number of stages       these devices      1, 2, 4 ... more of the last,
                                                                   until a plan fits, then the
                                                                   fewest with which one fits
all constraints      none, if nothing above helps

What the optimizer rules out is not tried (`Constraints.ruled_out`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from autopipe.errors import InfeasibleError
from autopipe.planfile.consistency import ZERO
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.estimate import Scored
from autopipe.planners.model.problem import Again, Decision, Problem
from autopipe.util.numbers import percent, ranges

Fastest = Callable[[Problem], Scored | None]
"""The fastest decision that fits; None: nothing fits."""

MOST_MORE = 3
"""How many times as many devices are tried, at most."""


class Help(NamedTuple):
    """A change after which a plan fits, and by which share its step is longer than on devices that
    hold everything: `zero 1`, 0.06.

    `devices` is the number of devices if that is what changes, else 0.
    """

    what: str
    longer: float = 0.0
    devices: int = 0

    def __str__(self) -> str:
        return f"{self.what} (+{percent(self.longer)} time)" if self.longer > 0 else self.what


@dataclass(frozen=True)
class Relaxations:
    """Searches changes of a problem that has no plan that fits.

    Args:
        problem: the problem with all constraints.
        fastest: gives a changed problem's fastest decision that fits.
    """

    problem: Problem
    fastest: Fastest

    def that_help(self) -> list[Help]:
        """What to change so that a plan fits, each change tried; all that was asked for at once if
        nothing else helps."""
        helps = []
        for name, changes in _changes(self.problem):
            for changed in changes:
                if (best := self._fitting(changed)) is not None:
                    helps.append(self._help([name], changed, best))
                    break
        if (devices := self.more_devices()) is not None:
            helps.append(devices)
        elif not helps:
            names = [name for name, _ in _changes(self.problem)]
            for changed in _free(self.problem) if len(names) > 1 else ():
                if (best := self._fitting(changed)) is not None:
                    differing = [n for n in names if _differs(n, best.decision, self.problem)]
                    helps.append(self._help(differing, changed, best))
                    break
        return helps

    def more_devices(self, fewer_than: int | None = None) -> Help | None:
        """The help of the fewest additional devices with which something fits.

        None: no number that is tried is enough, or the mesh is fixed by the constraints.

        Args:
            fewer_than: the devices, all together, of a help that is known already.
        """
        asked, machine = self.problem.constraints, self.problem.machine
        if asked.pp is not None and asked.dp is not None:
            return None
        most = (MOST_MORE - 1) * machine.devices
        tries = [2**n for n in range(most.bit_length())]
        if fewer_than is not None:  # if the largest such number is too few, so are all
            most = min(most, (fewer_than - 1 - machine.existing) // machine.streams)
            tries = [most] if most > 0 else []
        few = 0
        for enough in tries:
            if (found := self._on_more(enough)) is not None:
                return self._fewest(few, enough, found)
            few = enough
        return None

    def _fewest(self, few: int, enough: int, found: Help) -> Help:
        """The help of the fewest that are enough: more than `few`, which are not, and at most
        `enough`, whose help is `found`."""
        while enough - few > 1:
            between = (few + enough) // 2
            if (fewer := self._on_more(between)) is None:
                few = between
            else:
                enough, found = between, fewer
        return found

    def _on_more(self, more: int) -> Help | None:
        """The help of `more` additional devices; None: nothing fits on them either."""
        changed = replace(self.problem, machine=_with_more(self.problem.machine, more))
        best = self._fitting(changed)
        if best is None:
            return None
        return self._help(["devices"], changed, best, changed.machine.existing)

    def _help(self, names: Sequence[str], changed: Problem, best: Scored, devices: int = 0) -> Help:
        unlimited = self._unlimited
        longer = 0.0
        if unlimited is not None:
            longer = best.estimate.step_seconds / unlimited.estimate.step_seconds - 1
        descriptions = [_described(name, best.decision, changed) for name in names]
        return Help(_together(descriptions), longer, devices)

    @cached_property
    def _unlimited(self) -> Scored | None:
        return self.fastest(limitless(self.problem))

    def _fitting(self, changed: Problem) -> Scored | None:
        try:
            return self.fastest(changed)
        except InfeasibleError:
            return None  # the remaining constraints contradict each other


def _changes(problem: Problem) -> Iterator[tuple[str, list[Problem]]]:
    """Each constraint that may be changed alone, with the problems to try until one has a plan."""
    asked = problem.constraints
    every = tuple(map(Again, range(len(problem.recomputable))))
    if asked.recompute not in (None, every):
        yield "recompute", [replace(problem, constraints=replace(asked, recompute=None))]
    zeros = _more_zeros(problem)
    if zeros:
        yield "zero", [replace(problem, zeros=(zero,)) for zero in zeros]
    for name in ("micro_batches", "micro_batch_size", "schedule", "pp", "dp"):
        fixed = bool(asked.programs) or name in asked.ruled_out
        if getattr(asked, name) is not None and not fixed:
            yield name, [replace(problem, constraints=replace(asked, **{name: None}))]  # type: ignore[arg-type]


def _more_zeros(problem: Problem) -> list[int]:
    """The ZeRO stages above the one that was asked for."""
    if "zero" in problem.constraints.ruled_out or len(problem.zeros) > 1:
        return []
    return [zero for zero in ZERO if zero > max(problem.zeros)]


def _free(problem: Problem) -> Iterator[Problem]:
    """The problem without constraints: first with the schedule asked for, then without."""
    asked = problem.constraints
    zeros = (*problem.zeros, *_more_zeros(problem))
    free = replace(asked, recompute=None)
    if not asked.programs:
        pp = asked.pp if "pp" in asked.ruled_out else None
        free = replace(free, micro_batches=None, micro_batch_size=None, pp=pp, dp=None)
    yield replace(problem, constraints=free, zeros=zeros)
    if not asked.programs and asked.schedule is not None:
        yield replace(problem, constraints=replace(free, schedule=None), zeros=zeros)


def _differs(name: str, decision: Decision, problem: Problem) -> bool:
    """Whether a decision breaks the constraint of this name."""
    asked, config = problem.constraints, decision.config
    if name == "recompute":
        recomputed = {again for blocks in decision.recompute for again in blocks}
        return recomputed != set(asked.recompute or ())
    if name == "zero":
        return config.zero not in problem.zeros
    return bool(_degree(name, decision, problem) != getattr(asked, name))


def _degree(name: str, decision: Decision, problem: Problem) -> Any:
    """The value that a decision has for the constraint of this name: of `pp` its pipeline ranks."""
    if name == "micro_batch_size":
        return decision.config.microbatch_rows(problem.batch)
    return getattr(decision.config, name)


def _described(name: str, decision: Decision, problem: Problem) -> str:
    """The change in words, with the planner's values."""
    config = decision.config
    match name:
        case "recompute":
            stages = [s for s, blocks in enumerate(decision.recompute) if blocks]
            return f"recomputation in stage{'s' if len(stages) > 1 else ''} {ranges(stages)}"
        case "devices":
            return f"{problem.machine.existing} devices"
        case "schedule":
            return f"the schedule {config.schedule}"
        case "zero":
            return f"zero {config.zero}"
    return f"{name}={_degree(name, decision, problem)}"


def _together(words: Sequence[str]) -> str:
    """`pp=2`, `pp=2, dp=1 and zero 1 together`."""
    *most, last = words
    return f"{', '.join(most)} and {last} together" if most else last


def limitless(problem: Problem) -> Problem:
    """The problem on devices that hold everything; blocks run again only as asked for."""
    machine = problem.machine
    roomy = replace(problem, machine=replace(machine, memory=(UNLIMITED,) * machine.devices))
    if problem.constraints.recompute is not None or problem.constraints.offload:
        return roomy
    kept = tuple(
        replace(profile, saved=(), recompute=(), levels=()) for profile in problem.profiles
    )
    return replace(roomy, profiles=kept, recomputable=())


UNLIMITED = 2**62
"""Bytes of a device that holds everything."""


def _with_more(machine: Machine, more: int) -> Machine:
    """The machine with `more` devices like the last one, on the node of the last one."""
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
