"""Explain in sentences why a decision is best, why another is not, and why nothing fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property

from autopipe.errors import InfeasibleError
from autopipe.planfile.parts import Memory
from autopipe.planners.model.estimate import REDUCING, Estimate, Scored
from autopipe.planners.model.places import ranks_of
from autopipe.planners.model.problem import Problem
from autopipe.planners.search.configs import one_of
from autopipe.planners.search.relax import Help, Relaxations
from autopipe.util import numbers
from autopipe.util.numbers import VISIBLE, Amount, count, percent


def cause(best: Estimate, other: Estimate) -> str:
    """The cause of another decision's longer step, `by the bubble`: whose seconds grow most."""
    causes = set(best.spent) | set(other.spent)
    grown = {cause: other.spent.get(cause, 0) - best.spent.get(cause, 0) for cause in causes}
    return f"by {max(sorted(grown), key=lambda cause: grown[cause])}"


def misfit(best: Estimate) -> str:
    """`stage 0 needs 83.1 of 80.0 GiB`."""
    amount = Amount(best.limit)
    needing, held = fullest(best)
    if amount(held.peak) == amount(best.limit):
        return f"{needing} {numbers.memory(best.overflow)} more than {amount.of(best.limit)}"
    return f"{needing} {amount(held.peak)} of {amount.of(best.limit)}"


def fullest(estimate: Estimate) -> tuple[str, Memory]:
    """`stage 0 needs`, followed by the bytes of the fullest device's stages by part."""
    parts = [vars(estimate.stages[stage].memory) for stage in estimate.worst]
    held = Memory(**{name: sum(part[name] for part in parts) for name in parts[0]})
    *most, last = map(str, estimate.worst)
    needing = f"stages {', '.join(most)} and {last} need" if most else f"stage {last} needs"
    return needing, held


def binding(problem: Problem, best: Scored, roomy: Scored | None) -> str:
    """A sentence on what keeps the step from being faster: idle devices, memory, or balance.

    Args:
        roomy: the best decision if devices held everything, if that is faster.
    """
    reasons = []
    decision, estimate = best
    config = decision.config
    used = config.pp * config.dp * problem.tp
    machine, asked = problem.machine, problem.constraints
    devices = machine.existing
    idle = devices - used
    if idle:
        if idle == machine.spare:
            why = f"as fewer than tp={problem.tp} stand beside each other"
        elif asked.pp is not None and asked.dp is not None:
            why = f"as pp={config.pp} dp={config.dp} was asked for"
        else:
            why = f"as a batch of {count(problem.batch, 'row')} is no faster on more"
        reasons.append(f"{idle} of {devices} devices stay{'s' if idle == 1 else ''} idle, {why}")
    if roomy is not None:
        gain = percent(1 - roomy.estimate.step_seconds / estimate.step_seconds)
        limit = Amount(estimate.limit).of(estimate.limit)
        reasons.append(
            f"memory: without the limit of {limit}, {roomy.decision.config} would be {gain} faster"
        )

    seconds = [stage.period for stage in estimate.stages]
    slowest = max(range(decision.stages), key=lambda s: seconds[s])
    entry = ranks_of(problem, config)[slowest] if config.turns else slowest
    pace = f"stage {entry} sets the pace with {numbers.seconds(seconds[slowest])} a micro-batch"
    stage = estimate.stages[slowest]
    computing = [each.forward_seconds + each.backward_seconds for each in estimate.stages]
    transfers = stage.transfer_seconds > 0 and stage.period > computing[slowest]
    if transfers:
        pace += ", transfers and all"
    alike = seconds if transfers or config.turns else computing  # of each the same as of this one
    mean = sum(alike) / len(alike)
    if config.pp > 1 and mean > 0:
        pace += f", {percent(seconds[slowest] / mean - 1)} above the mean stage"
    reduce = estimate.spent[REDUCING]
    if reduce > VISIBLE * estimate.step_seconds:
        pace += f"; reducing its gradients takes {percent(reduce / estimate.step_seconds)}"
    return "; ".join((*reasons, pace))


def nothing_fits(
    problem: Problem,
    scored: Sequence[Scored],
    changes: Relaxations,
    heuristic: str | None,
) -> NothingFits:
    """The error if nothing fits, with the nearest decision and the bytes it lacks, by part.

    Args:
        changes: finds the changes after which a plan fits.
        heuristic: the planner's name if it may have missed a plan that fits.
    """
    nearest = min(scored, key=lambda s: s.estimate.overflow)
    estimate = nearest.estimate
    needing, held = fullest(estimate)
    amount = Amount(estimate.limit)
    in_flight = max(estimate.stages[stage].in_flight for stage in estimate.worst)
    flying = count(in_flight, "micro-batch", "micro-batches")
    kind = f"{heuristic} plan" if heuristic else "plan"
    what = "devices" if problem.constraints.memory is None else "a memory limit"
    parts = _parts(held, flying)
    printed = zip(amount.adding_up(list(parts.values())), parts, strict=True)
    listed = ", ".join(f"{size} {name}" for size, name in printed if size != amount(0))
    of_tp = f" tp={problem.tp}" if problem.tp > 1 else ""
    again = " with blocks run again" if any(nearest.decision.recompute) else ""
    return NothingFits(
        f"no {kind} fits {amount.of(estimate.limit)} a device: nearest is "
        f"{nearest.decision.config}{of_tp}{again}, whose {needing} {amount.of(held.peak)}, "
        f"{numbers.memory(estimate.overflow)} too many ({listed}).",
        lambda: [*([Help(EXACT)] if heuristic else []), *changes.that_help()],
        changes.more_devices,
        f"{what} of {amount.ceiling(held.peak)}",
        problem.tp,
        estimate.overflow,
    )


def _parts(held: Memory, flying: str) -> dict[str, int]:
    """Bytes by the words of a refusal; every field of `Memory` is in one of them."""
    learned, passing = "parameters, gradients and optimizer", "gradients on their way"
    words = {
        "parameters": learned,
        "gradients": learned,
        "optimizer": learned,
        "buffers": "buffers",
        "activations": f"activations of {flying} in flight",
        "transfers": "transfers",
        "passing": passing,
        "copies": learned,
    }
    sizes: Counter[str] = Counter()
    for field in fields(Memory):
        sizes[words[field.name]] += getattr(held, field.name)
    return dict(sizes)


EXACT = "the planner `dynamic`, which places cuts by memory"


class NothingFits(InfeasibleError):
    """Raised where no plan of a problem fits.

    Changes that would help are searched only when they are asked for: that takes many searches, and
    a plan may fit at another degree.

    Attributes:
        more_devices: gives the number of devices with which a plan fits, if below a given number.
        larger: the devices, or the limit, that the nearest plan needs.
        tp: the problem's tensor-parallel degree.
    """

    def __init__(
        self,
        message: str,
        helps: Callable[[], Sequence[Help]],
        more_devices: Callable[[int | None], Help | None],
        larger: str,
        tp: int,
        shortfall: int,
    ) -> None:
        super().__init__(message, shortfall=shortfall)
        self._find, self.larger, self.tp = helps, larger, tp
        self.more_devices = more_devices

    @cached_property
    def helps(self) -> tuple[Help, ...]:
        """Changes after which a plan fits."""
        return tuple(self._find())

    @property
    def hint(self) -> str | None:
        """The changes in words, and the larger devices."""
        return one_of([*self.helps, self.larger])

    @hint.setter
    def hint(self, hint: str | None) -> None:
        assert hint is None, "it is found"

    def beside(self, others: Sequence[NothingFits], further: Sequence[Help]) -> NothingFits:
        """This error with what is known of other degrees' problems: they may need fewer devices.
        `further` are helps of another kind."""
        helps = [help for help in self.helps if not help.devices]
        fewest = next((help for help in self.helps if help.devices), None)
        for error in sorted(others, key=lambda error: error.tp):
            fewer = error.more_devices(fewest.devices if fewest else None)
            if fewer is not None:
                fewest = fewer._replace(what=f"{fewer.what} with tp={error.tp}")
        if fewest is not None:
            helps.append(fewest)
        every = [*further, *helps]
        return NothingFits(
            self.message, lambda: every, self.more_devices, self.larger, self.tp, self.shortfall
        )
