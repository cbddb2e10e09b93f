"""The place of each stage of a pipeline: micro-batches in flight, devices, a link, memory.

Two stages on each of two ranks (`interleaved`), whose ranks have groups 4 and 2 of devices:

    stage        0    1    2    3
    rank         0    1    0    1
    group        4    2    4    2
    before       -   4>2  2>4  4>2       the link over which the stage receives; none: the first
    shares       2    2    2    2        each may hold half of its group's memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from autopipe.cluster.collective_time import Level, Levels
from autopipe.planners.model.devices import DeviceGroup, Machine
from autopipe.planners.model.problem import (
    FEWEST_CHUNKS,
    Config,
    Constraints,
    Problem,
    Profile,
    splits,
)
from autopipe.schedules.generators import held_in_turns
from autopipe.schedules.instructions import holders
from autopipe.schedules.registry import between_halves, flying, in_flight, make, named, waiting


class StagePlace(NamedTuple):
    """The place of one stage.

    Args:
        in_flight: the most micro-batches whose activations it holds at once.
        group: its devices.
        before: the link from the devices of the stage before it; None: it is the first stage, or
            the one before is on the same devices.
        shares: the number of stages on these devices; each may use 1/shares of their memory.
        turns: the number of ranks that take turns at it; `group` has the devices of all of them.
        waiting: of those micro-batches, the ones between the halves of their backward.
        tied: the levels of links over which gradients of parameters are summed that a later stage
            has too, which is taken to be the last one; none: it is on the same devices.
    """

    in_flight: int
    group: DeviceGroup
    before: Level | None
    shares: int
    turns: int = 1
    waiting: int = 0
    tied: Levels = ()

    def shared(self, config: Config) -> Config:
        """The config with all ranks that share the stage's parameters as replicas."""
        return config if self.turns == 1 else config._replace(dp=config.dp * self.turns)

    @property
    def room(self) -> int:
        """Bytes that the stage may hold, so that a device's stages fit together."""
        return self.group.memory // self.shares


def chunks_of(constraints: Constraints, schedule: str, chunks: int = FEWEST_CHUNKS) -> int:
    """The number of stages on each rank under a schedule.

    Args:
        chunks: the config's number, for a schedule that leaves it open.
    """
    if constraints.programs:
        return len(holders(constraints.programs)) // len(constraints.programs)
    return named(schedule).chunks or constraints.chunks or chunks


def stages_of(problem: Problem, config: Config) -> int:
    """The number of stages of a pipeline, on all its ranks."""
    if config.turns:
        return len(config.turns)
    return config.pp * chunks_of(problem.constraints, config.schedule, config.chunks)


@lru_cache(maxsize=1024)
def in_flights(problem: Problem, config: Config) -> tuple[int, ...]:
    """For each stage of a pipeline, the most micro-batches whose activations it holds at once."""
    asked = problem.constraints
    if asked.programs:
        ranks = holders(asked.programs)
        return tuple(flying(asked.programs[rank], stage) for stage, rank in enumerate(ranks))
    if config.turns:
        return held_in_turns(config.turns, config.micro_batches)
    chunks = chunks_of(asked, config.schedule, config.chunks)
    depths = (config.depth,) * (config.pp - 1) if named(config.schedule).depths else ()
    return tuple(
        in_flight(
            config.schedule, config.pp, config.micro_batches, stage, chunks=chunks, depths=depths
        )
        for stage in range(config.pp * chunks)
    )


@lru_cache(maxsize=1024)
def waitings(problem: Problem, config: Config) -> tuple[int, ...]:
    """For each stage of a pipeline, how many of the micro-batches that it holds at once are between
    the halves of their backward. The first stage's first half has nothing to do."""
    asked, stages = problem.constraints, stages_of(problem, config)
    if not splits(problem, config.schedule):
        return (0,) * stages
    if asked.programs:
        ranks = holders(asked.programs)
        found = [waiting(asked.programs[rank], stage) for stage, rank in enumerate(ranks)]
    else:
        chunks = chunks_of(asked, config.schedule, config.chunks)
        found = [*between_halves(config.schedule, config.pp, config.micro_batches, chunks)]
    return (0, *found[1:])


def ranks_of(problem: Problem, config: Config) -> tuple[int, ...]:
    """The rank of each stage of a pipeline, the first of those that take turns."""
    if config.turns:
        return (0, *accumulate(config.turns[:-1]))
    return placement(problem.constraints, config.schedule, config.pp, config.chunks)


@lru_cache(maxsize=256)
def placement(
    constraints: Constraints, schedule: str, pp: int, chunks: int = FEWEST_CHUNKS
) -> tuple[int, ...]:
    """The rank of each stage of a pipeline."""
    if constraints.programs:
        return holders(constraints.programs)
    return holders(make(schedule, pp, 1, chunks=chunks_of(constraints, schedule, chunks)))


def places(problem: Problem, config: Config, groups: Sequence[int]) -> tuple[StagePlace, ...]:
    """The place of each stage if the pipeline's ranks have these groups of devices."""
    held, between = in_flights(problem, config), waitings(problem, config)
    row = [groups[rank] for rank in ranks_of(problem, config)]
    turns = config.turns or (1,) * len(row)
    return tuple(
        place_of(
            *(problem, config, held[stage], group, row[stage - 1] if stage else None, of),
            waiting=between[stage],
        )
        for stage, (group, of) in enumerate(zip(row, turns, strict=True))
    )


def place_of(
    problem: Problem,
    config: Config,
    held: int,
    group: int,
    earlier: int | None,
    turns: int = 1,
    *,
    waiting: int = 0,
) -> StagePlace:
    """The place of a stage.

    Args:
        held: its micro-batches in flight.
        group, earlier: the numbers of its group of devices and of that of the stage before it; for
            ranks that take turns, of the first one.
        turns: how many ranks take turns at it, all on equal devices.
        waiting: of the micro-batches in flight, those between the halves of their backward.
    """
    machine = problem.machine
    linked = earlier is not None and earlier != group
    of = machine.groups(config.dp)[group]
    if turns > 1:
        of = replace(of, levels=machine.levels(config.dp, group, turns))
    beyond = problem.seen_beyond(config)
    last = group + turns - 1
    return StagePlace(
        held,
        replace(of, memory=of.memory - beyond) if beyond else of,
        machine.link(config.dp, earlier, last) if earlier is not None and linked else None,
        chunks_of(problem.constraints, config.schedule, config.chunks),
        turns,
        waiting,
        _tied(problem, config, range(group, group + turns)),
    )


def _tied(problem: Problem, config: Config, own: range) -> Levels:
    """`StagePlace.tied`, of a stage on these groups."""
    end, machine = _last_group(problem, config), problem.machine
    if end is None:
        return ()
    if end in own:
        shared = chunks_of(problem.constraints, config.schedule, config.chunks) > 1
        if machine.alike or config.pp == 1 or shared:
            return ()  # it is the last stage, or its devices have that too
        # Of unlike devices any group may have the last stage: it is another one.
        end = next(g for g in range(len(machine.groups(config.dp))) if g not in own)
    return _joined(machine, config.dp, (*own, end), config.scatters)


@lru_cache(maxsize=1024)
def _last_group(problem: Problem, config: Config) -> int | None:
    """The group of the last stage, in rank order; None: no units share a parameter."""
    if all(len(parameter.units) == 1 for parameter in problem.parameters):
        return None
    return placement(problem.constraints, config.schedule, config.pp, config.chunks)[-1]


@lru_cache(maxsize=4096)
def _joined(machine: Machine, dp: int, groups: tuple[int, ...], scattered: bool) -> Levels:
    """The levels of links among groups; of scattered gradients each replica sums its own rows."""
    firsts, topology = [group * dp for group in groups], machine.topology
    if scattered:
        return topology.levels(firsts)
    return topology.levels([device for first in firsts for device in range(first, first + dp)])


def profile_of(problem: Problem, dp: int, micro_batches: int) -> Profile | None:
    """The profile for a config's micro-batch; None: rows do not divide, or there is none."""
    rows, rest = divmod(problem.batch, dp * micro_batches)
    if rest:
        return None
    return next((profile for profile in problem.profiles if profile.rows == rows), None)
