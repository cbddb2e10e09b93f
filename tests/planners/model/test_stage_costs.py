"""One stage in one place: its bytes by what they are for, its seconds, what is recomputed in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from autopipe.cluster.cluster import Link
from autopipe.cluster.efficiency import BESIDE
from autopipe.planfile.parts import Memory
from autopipe.planners.model import memory
from autopipe.planners.model.block_parts import compositions
from autopipe.planners.model.keeping_less import (
    Holding,
    Pricing,
    StageCosts,
    costs,
    largest_block,
    sets_of,
)
from autopipe.planners.model.places import StagePlace, in_flights, place_of
from autopipe.planners.model.problem import (
    Again,
    Config,
    Constraints,
    Problem,
    Profile,
    Saved,
    Shared,
)
from autopipe.planners.model.range_tables import Bytes, Tables, tables
from autopipe.planners.model.stage_costs import (
    exchanged,
    reduce_seconds,
    stage_work,
    tied_seconds,
    transfer_seconds,
)
from tests.support.problems import machine, rich_problem
from tests.support.two_stages import FOUR_REPLICAS, LINK, PROBLEM, PROFILE, TWO_STAGES, UNTIED

#   units        0     1     2
#   forward      1 s   2 s   3 s         backward twice that
#   parameters   100   50    100 tied with unit 0's
#   saved        10    20    30          each by its own unit
#   crossings    0 -> 1 and 2: 8 bytes, gradient returns      0 -> 2: 4 bytes, none
#                1 -> 2: 6 bytes, gradient returns


def ranges(problem: Problem = PROBLEM, first: int = 1, last: int = 3) -> Tables:
    return tables(problem, problem.profiles[0]).at(first, last)


def given(problem: Problem, config: Config, stage: int) -> StagePlace:
    """A place in rank order."""
    held = in_flights(problem, config)[stage]
    return place_of(problem, config, held, stage, stage - 1 if stage else None)


# Bytes.


def test_bytes_by_what_they_are_for() -> None:
    """Units 1 and 2 receive 8 + 4 bytes once, though both use the 8; the 8 go back."""
    found = Memory(*map(int, memory.estimate(ranges(), PROBLEM, TWO_STAGES, 1)))
    assert found == Memory(
        parameters=150,
        gradients=150,
        optimizer=2 * 150,
        buffers=7,
        activations=1 * (20 + 30 + 12),
        transfers=3 * 12 + 2 * 8,  # 3 posted ahead; a gradient leaves, and another is being made
    )
    assert memory.estimate(ranges(), PROBLEM, TWO_STAGES, 1).peak == found.peak


def test_what_runs_again_is_not_kept_but_is_there_once() -> None:
    usual = Memory(*map(int, memory.estimate(ranges(), PROBLEM, TWO_STAGES, 3)))
    again = Memory(
        *map(int, memory.estimate(ranges(), PROBLEM, TWO_STAGES, 3, dropped=25, held=15))
    )
    assert again == replace(usual, activations=usual.activations - 3 * 25 + 15)


def test_zero_1_deals_out_optimizer_state() -> None:
    """Units 1 and 2 on four replicas: a quarter of 150 bytes, rounded up."""
    usual, dealt = (
        Memory(*map(int, memory.estimate(ranges(), PROBLEM, FOUR_REPLICAS._replace(zero=zero), 1)))
        for zero in (0, 1)
    )
    assert dealt == replace(usual, optimizer=2 * 38)


def test_zero_1_deals_out_masters() -> None:
    """Units 1 and 2 are masters: a quarter of their 150 bytes, and 75 of what forward reads."""
    copies = tuple(Shared(p.bytes // 2, p.units) for p in PROBLEM.parameters)
    problem = replace(PROBLEM, copies=copies)
    usual, dealt = (
        Memory(
            *map(int, memory.estimate(ranges(problem), problem, FOUR_REPLICAS._replace(zero=z), 1))
        )
        for z in (0, 1)
    )
    assert usual.parameters == 150 + 75
    assert dealt == replace(usual, parameters=38 + 75, optimizer=2 * 38)
    group = given(problem, FOUR_REPLICAS, 1).group
    sums = [
        float(reduce_seconds(ranges(p), p, FOUR_REPLICAS._replace(zero=1), group))
        for p in (PROBLEM, problem)
    ]
    # Of 3 / 4 of the bytes on a ring of 4 a second half as many come back.
    assert sums[0] - sums[1] == pytest.approx(3 / 4 * 75 / 4)


def test_zero_3_deals_out_everything_and_gathers_what_runs() -> None:
    """Unit 1 is a block of 50 bytes, and the 100 that units 0 and 2 share stay.

    As they come they take 2 * 100 + 100 / 4, more than the block: 100 + 2 * 50 + 50 / 4.
    """
    problem = replace(PROBLEM, blocks=((1, 2),))
    config = FOUR_REPLICAS._replace(zero=3)
    found = Memory(*map(int, memory.estimate(ranges(problem), problem, config, 1)))
    assert (found.parameters, found.gradients, found.optimizer) == (38 + 225, 38, 76)
    assert found.passing == 2 * 150 + 38  # two buckets, and a rank's rows of one
    alone = TWO_STAGES._replace(zero=3)  # one replica has all of it as it is
    assert memory.estimate(ranges(), PROBLEM, alone, 1) == memory.estimate(
        ranges(), PROBLEM, TWO_STAGES, 1
    )


def test_zero_3_deals_out_frozen_parameters_too() -> None:
    """Of 80 bytes in unit 2 a quarter; and 2 1/4 times 80, now the largest unit, beside 100 that
    stay, are more than 2 1/4 times those (225, as in the test before)."""
    frozen = replace(PROBLEM, frozen=(Shared(80, (2,)),))

    def parameters(problem: Problem, zero: int) -> int:
        config = FOUR_REPLICAS._replace(zero=zero)
        return int(memory.estimate(ranges(problem), problem, config, 1)[0])

    for zero in (0, 1, 2):
        assert parameters(frozen, zero) == parameters(PROBLEM, zero) + 80
    assert int(ranges(frozen).block) == 80
    assert parameters(PROBLEM, 3) == 38 + 225
    assert parameters(frozen, 3) == 38 + 20 + 100 + 80 * 9 // 4


# Seconds.


def test_a_micro_batch_computes_and_waits_for_its_link() -> None:
    """F + B = 15; 12 bytes come and 8 go back at 4 a second, each after 0.25 s."""
    place = given(PROBLEM, TWO_STAGES, 1)
    assert transfer_seconds(ranges(), PROBLEM, TWO_STAGES, place.before) == 5 + 2 * 0.25
    assert stage_work(PROBLEM, TWO_STAGES, place, ranges()).seconds(0.0) == (20.5, 20.5, 0)
    assert stage_work(PROBLEM, TWO_STAGES, place, ranges()).seconds(2.0) == (22.5, 22.5, 0)
    first = given(PROBLEM, TWO_STAGES, 0)
    assert transfer_seconds(ranges(), PROBLEM, TWO_STAGES, first.before) == 0


def test_seconds_are_those_of_the_kind_of_device() -> None:
    twice = replace(
        PROFILE,
        forward=(*PROFILE.forward, (2.0, 4.0, 6.0)),
        backward=(*PROFILE.backward, (4.0, 8.0, 12.0)),
    )
    mixed = machine((0, 1), (1000, 500), (LINK,) * 3)
    problem = replace(PROBLEM, profiles=(twice,), machine=mixed)
    place = given(problem, TWO_STAGES, 1)
    assert (place.group.kind, place.group.memory) == (1, 500)
    assert stage_work(problem, TWO_STAGES, place, ranges(problem)).seconds(0.0) == (35.5, 35.5, 0)


def test_gradients_are_summed_over_the_replicas_and_hide_behind_earlier_backwards() -> None:
    """Of 4: 3 / 4 of 100 bytes there and back at 4 a second, and log2 4 latencies each way. Of the
    later stage's 2 s are hidden, the backward of unit 0; of split backwards none."""
    unit = ranges(UNTIED, last=1, first=0)
    place = given(UNTIED, FOUR_REPLICAS, 0)
    expected = 2 * (3 / 4 * 100 / 4 + 2 * 0.25)
    assert reduce_seconds(unit, UNTIED, FOUR_REPLICAS, place.group) == expected
    assert stage_work(UNTIED, FOUR_REPLICAS, place, unit).seconds(0.0) == (3, 3, expected)
    later = given(UNTIED, FOUR_REPLICAS, 1)
    whole = float(reduce_seconds(ranges(UNTIED), UNTIED, FOUR_REPLICAS, later.group))
    left = whole - 2
    at_later = stage_work(UNTIED, FOUR_REPLICAS, later, ranges(UNTIED))
    assert at_later.seconds(0.0) == (20.5, 20.5, left)
    split = FOUR_REPLICAS._replace(schedule="zb-h1")
    assert stage_work(UNTIED, split, later, ranges(UNTIED)).seconds(0.0).exposed == whole
    alone = given(UNTIED, TWO_STAGES, 0)
    assert reduce_seconds(unit, UNTIED, TWO_STAGES, alone.group) == 0


@pytest.mark.parametrize(
    ("replicas", "zero", "levels", "seconds"),
    [
        (1, 0, 2, 2 * (1 / 2 * 100 / 4 + 0.25)),
        (4, 0, 8, 2 * (7 / 8 * 100 / 4 + 3 * 0.25)),
        (4, 1, 8, 2 * (7 / 8 * 100 / 4 + 7 * 0.25)),
        (4, 2, 2, 2 * (1 / 2 * 25 / 4 + 0.25)),
    ],
)
def test_gradients_of_a_tied_parameter_are_summed_over_both_stages(
    replicas: int, zero: int, levels: int, seconds: float
) -> None:
    """Unit 0's 100 bytes are unit 2's too. Bug: where there is one replica nothing was summed, and
    over 1 Gbit/s a step of two stages that share an embedding was told to take a tenth.

    Under ZeRO-1 rings scatter and gather; under ZeRO-2 each replica sums its 25 bytes."""
    config = Config(2, replicas, 4 // replicas, zero, "1f1b")
    far = replace(PROBLEM, machine=machine(8, 1000, (LINK,) * 3))
    first, last = (given(far, config, stage) for stage in (0, 1))
    assert [level.ranks for level in first.tied] == [levels] and not last.tied
    unit = ranges(far, 0, 1)
    own = reduce_seconds(unit, far, config, first.group)
    own = own if zero < 2 else 0.0  # else they are of the rows that are gathered
    copies = {0: 2, 1: 6, 2: 2}[zero] * 100 / (replicas if zero > 1 else 1) / far.machine.copying
    assert own + tied_seconds(unit, far, config, first) == pytest.approx(seconds + copies)
    assert not tied_seconds(ranges(far, 0, 3), far, config, first)
    assert not tied_seconds(ranges(far, 1, 3), far, config, first)


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 1.0), ("zb-h1", 0.5)])
def test_on_gpus_the_last_backward_hides_sums_of_gradients(schedule: str, share: float) -> None:
    """As much as it takes, with what runs again, or its second half where it is split; if that is
    all, what computing loses is left. What ZeRO-1 gathers for the next step follows it."""
    gpus = replace(UNTIED, machine=replace(UNTIED.machine, overlaps=True))
    unit = ranges(UNTIED, last=1, first=0)
    for zero in (0, 1):
        config = FOUR_REPLICAS._replace(zero=zero, schedule=schedule)
        place = given(gpus, config, 0)
        whole = float(reduce_seconds(unit, gpus, config, place.group))
        beside = whole / (1 + zero)
        backward = float(unit.backward[0])
        assert 0 < share * backward < beside
        seconds = stage_work(gpus, config, place, unit).seconds(0.0)
        assert seconds.exposed == pytest.approx(whole - share * backward)
        again = stage_work(gpus, config, place, unit).seconds(10 * whole)
        assert again.exposed == pytest.approx(whole - beside + BESIDE * beside)
        assert stage_work(UNTIED, config, place, unit).seconds(0.0).exposed == whole


def test_zero_3_gathers_in_every_micro_batch_and_has_nothing_left_to_sum() -> None:
    """Forward gathers, backward gathers and scatters: each 3 / 4 of 150 bytes, 3 hops, and 3 times
    150 bytes in a rank's own memory."""
    config = FOUR_REPLICAS._replace(zero=3)
    place = given(PROBLEM, config, 1)
    once = 3 / 4 * 150 / 4 + 3 * 0.25 + 3 * 150 / PROBLEM.machine.copying
    whole = ranges().trainable
    assert exchanged(whole, whole, PROBLEM, config, place.group) == (once, once)
    assert reduce_seconds(ranges(), PROBLEM, config, place.group) == 0
    assert stage_work(PROBLEM, config, place, ranges()).seconds(0.0)[0] == 20.5 + 3 * once
    assert exchanged(whole, whole, PROBLEM, FOUR_REPLICAS, place.group) == (0, 0)


def test_zero_2_scatters_in_every_micro_batch_and_gathers_once() -> None:
    """Backward scatters, and the step ends with what the next one gathers: each 3 / 4 of 150 bytes,
    3 hops, and 3 times 150 bytes in a rank's own memory."""
    config = FOUR_REPLICAS._replace(zero=2)
    place = given(PROBLEM, config, 1)
    once = 3 / 4 * 150 / 4 + 3 * 0.25 + 3 * 150 / PROBLEM.machine.copying
    assert exchanged(150, 150, PROBLEM, config, place.group) == (0, once)
    assert stage_work(PROBLEM, config, place, ranges()).gathering(0.0) == (0, once)
    assert reduce_seconds(ranges(), PROBLEM, config, place.group) == once
    assert stage_work(PROBLEM, config, place, ranges()).seconds(0.0)[0] == 20.5 + once
    alone = TWO_STAGES._replace(zero=2)
    assert exchanged(150, 150, PROBLEM, alone, place.group) == (0, 0)


def test_on_gpus_zero_3_gathers_while_devices_compute() -> None:
    """What is left is waited for, and the first block's in any case, of forward and of backward
    each its own; beside the others computing is slower."""
    config = FOUR_REPLICAS._replace(zero=3)
    gpus = replace(PROBLEM, machine=replace(PROBLEM.machine, overlaps=True))
    place, unit = given(gpus, config, 1), ranges()

    def taking(size: int) -> float:
        return 3 / 4 * size / 4 + 3 * 0.25 + 3 * size / gpus.machine.copying

    once, first, last = taking(150), taking(int(unit.opening)), taking(int(unit.closing))
    assert 0 < first < once and 0 < last < once
    forward, backward = (float(table[0]) for table in (unit.forward, unit.backward))
    slowed = first + BESIDE * (once - first), last + BESIDE * (2 * once - last)
    waiting = stage_work(gpus, config, place, unit).gathering(0.0)
    assert waiting == (max(slowed[0], once - forward), max(slowed[1], 2 * once - backward))
    assert stage_work(gpus, config, place, unit).gathering(2 * once) == (waiting.forward, slowed[1])
    assert stage_work(PROBLEM, config, place, unit).gathering(0.0) == (once, 2 * once)


def test_what_all_devices_of_a_stage_send_takes_turns_on_a_shared_link() -> None:
    """Stage 1 is at another site. Two replicas, of two tensor-parallel ranks each: a quarter."""
    config = Config(2, 2, 2, 0, "1f1b")
    far = machine(4, 1000, (LINK,) * 3, nodes=(0, 0, 1, 1), sites=(0, 0, 1, 1), streams=2)
    problem = replace(PROBLEM, machine=far)
    place = given(problem, config, 1)
    assert place.before is not None and place.before.shared
    assert transfer_seconds(ranges(), problem, config, place.before) == 20 / (4.0 / 4) + 2 * 0.25


def test_eager_hides_its_link_behind_computing_or_the_slower_wire() -> None:
    """Stage 1 computes for 15 s, and gets 12 bytes and sends 8 back."""
    eager = TWO_STAGES._replace(schedule="eager-1f1b", depth=1)
    place = given(UNTIED, eager, 1)
    assert stage_work(UNTIED, eager, place, ranges(UNTIED)).seconds(0.0) == (20.5, 15, 0)
    assert stage_work(UNTIED, eager, place, ranges(UNTIED)).seconds(2.0) == (22.5, 17, 0)
    slow = replace(UNTIED, machine=machine(2, 1000, (Link(0.25, 0.5),) * 3))
    place = given(slow, eager, 1)
    through = 15 + 20 / 0.5 + 0.5
    assert stage_work(slow, eager, place, ranges(UNTIED)).seconds(0.0) == (through, 12 / 0.5, 0)
    first = given(UNTIED, eager, 0)
    unit = ranges(UNTIED, last=1, first=0)
    assert stage_work(UNTIED, eager, first, unit).seconds(0.0) == (3, 3, 0)


@pytest.mark.parametrize("seed", range(20))
def test_many_ranges_at_once_cost_what_each_costs(seed: int) -> None:
    problem = rich_problem(seed)
    devices = problem.machine.devices
    m = problem.batch // problem.profiles[0].rows
    config = Config(min(2, devices), 1, m, 0, "1f1b")
    place = given(problem, config, config.pp - 1)
    every, numbers = tables(problem, problem.profiles[0]), compositions(problem).number
    found = costs(problem, config, place, every, numbers)
    for i, j in zip(*np.triu_indices(problem.units + 1, k=1), strict=True):
        one = costs(problem, config, place, every.at(i, j), numbers[i, j])
        assert [float(value) for value in one.seconds] == [value[i, j] for value in found.seconds]
        assert [int(value) for value in one[1:]] == [value[i, j] for value in found[1:]]


# What is recomputed.


def blocks(kept: Sequence[int], **changes: object) -> Problem:
    """Units that are a block each, of 1 s and 2 s; block b keeps kept[b] bytes, 10 of its result.

    Nothing else has bytes.
    """
    units = len(kept)
    return replace(
        PROBLEM,
        units=units,
        parameters=(),
        constants=(),
        profiles=(
            Profile(
                2,
                ((1.0,) * units,),
                ((2.0,) * units,),
                tuple(Saved(size, unit, (unit,), unit) for unit, size in enumerate(kept))
                + tuple(Saved(10, unit, (unit,)) for unit in range(units)),
                (),
                tuple(((1.0,),) for _ in range(units)),
            ),
        ),
        recomputable=tuple((unit, unit + 1) for unit in range(units)),
        **changes,  # type: ignore[arg-type]
    )


def all_of_it(
    problem: Problem,
    limit: int,
    in_flight: int,
    schedule: str = "1f1b",
    holding: Callable[[StagePlace, Bytes], Holding] = largest_block,
) -> StageCosts:
    """One stage of all units on a device of so many bytes."""
    problem = replace(problem, machine=machine(1, limit))
    config = Config(1, 1, 4, 0, schedule)
    place = place_of(problem, config, in_flight, 0, None)
    every = ranges(problem, 0, problem.units)
    numbers = compositions(problem).number[0, problem.units]
    return Pricing(problem, config, every, numbers, holding)(place)


@pytest.mark.parametrize(
    ("limit", "again", "peak"),
    [
        (480, 0, 480),
        (479, 1, 480 - 2 * 50 + 50),
        (430, 1, 430),
        (429, 2, 330),
        (131, 4, 130),
        (129, 4, 130),  # Nothing fits: what is nearest to it.
    ],
)
def test_as_many_blocks_run_again_as_must(limit: int, again: int, peak: int) -> None:
    """Four blocks, two micro-batches in flight: 2 * 4 * (50 + 10) bytes.

    Of k that run again 2 * k * 50 are not kept, and one at a time has its 50 back.
    """
    found = all_of_it(blocks((50,) * 4), limit, 2)
    assert (*found.seconds[:2], found.peaks) == (12 + again, 12 + again, peak)


def test_where_it_stays_what_is_made_again_saves_one_micro_batch_less() -> None:
    """Of three in flight two; of one none, so that nothing runs again."""
    problem = blocks((50,) * 4)

    def staying(place: StagePlace, largest: Bytes) -> Holding:
        return Holding(np.zeros_like(largest), place.in_flight - 1)

    found = all_of_it(problem, 3 * 240 - 1, 3, holding=staying)
    assert (found.seconds.whole, found.peaks) == (12 + 1, 3 * 240 - 2 * 50)
    assert all_of_it(problem, 200, 1, holding=staying).seconds.whole == 12


def test_a_block_that_is_in_flight_once_saves_nothing_by_itself() -> None:
    """It is there while it runs; only that the others are not is a gain."""
    assert all_of_it(blocks((50,)), 59, 1).seconds.whole == 3
    found = all_of_it(blocks((50,) * 4), 239, 1)
    assert (found.seconds.whole, found.peaks) == (12 + 2, 240 - 2 * 50 + 50)


def test_where_there_are_no_replicas_zero_deals_out_nothing() -> None:
    """Above all not the gradient that is made beside its sum."""
    problem = replace(PROBLEM, largest=(100, 50, 100))
    every = [
        memory.estimate(tables(problem, PROFILE), problem, Config(1, 1, 4, zero, "1f1b"), 1)
        for zero in (0, 1, 2, 3)
    ]
    for found in every[1:]:
        np.testing.assert_array_equal(found, every[0])
    assert every[0][-1].max() == 100


def test_unlike_blocks_are_chosen_by_what_they_save() -> None:
    """20, 40 and 80 bytes, 3 times in flight, and the largest of them once."""
    problem = blocks((20, 40, 80))
    whole = 3 * (140 + 30)
    for saved, count in ((40, 1), (60, 1), (80, 1), (100, 2), (140, 3)):
        found = all_of_it(problem, whole - 3 * saved + 80, 3)
        assert (found.seconds.whole, found.peaks <= whole - 3 * saved + 80) == (9 + count, True)


def test_what_is_split_cannot_run_again() -> None:
    """Under zb-h1 backward is in halves."""
    problem = blocks((50,) * 4)
    assert all_of_it(problem, 100, 2, "zb-h1").seconds.whole == 12
    assert all_of_it(problem, 100, 2, "interleaved").seconds.whole == 16


def test_what_the_user_has_fixed_runs_again_and_nothing_else() -> None:
    for fixed in ((), (Again(1), Again(3))):
        problem = blocks((50,) * 4, constraints=Constraints(recompute=fixed))
        for limit in (10, 10_000):
            assert all_of_it(problem, limit, 2).seconds.whole == 12 + len(fixed)


def test_of_several_stages_on_a_device_each_has_an_equal_share() -> None:
    for name, share in (("1f1b", 1000), ("interleaved", 500), ("zb-v", 500)):
        assert given(PROBLEM, Config(1, 1, 4, 0, name), 0).room == share
    four = replace(PROBLEM, constraints=Constraints(chunks=4))
    assert given(four, Config(1, 1, 4, 0, "interleaved"), 0).room == 250


@pytest.mark.parametrize("seed", range(30))
def test_the_set_is_the_cheapest_that_fits(seed: int) -> None:
    """Beside all sets of the composition: the first that is enough, as they are in order."""
    problem = rich_problem(seed)
    m = problem.batch // problem.profiles[0].rows
    config = Config(1, 1, m, 0, "1f1b")
    place = place_of(problem, config, min(m, 3), 0, None)
    sets, numbers = sets_of(problem, config, place), compositions(problem).number
    every = tables(problem, problem.profiles[0])
    for i, j in zip(*np.triu_indices(problem.units + 1, k=1), strict=True):
        found = costs(problem, config, place, every.at(i, j), numbers[i, j])
        own = sets.numbers(numbers[i, j])

        def bytes_of(number: int, i: int = i, j: int = j) -> int:
            dropped = int(sets.saved(number))
            held = int(sets.largest[numbers[i, j]]) if dropped else 0
            at = every.at(i, j)
            return int(memory.estimate(at, problem, config, place.in_flight, dropped, held).peak)

        fitting = [number for number in own if bytes_of(number) <= place.room]
        if fitting:
            cheapest = min(fitting, key=lambda number: sets.spent(number))
            assert int(found.recomputed) == cheapest and found.peaks == bytes_of(cheapest)
        else:
            assert found.peaks == min(map(bytes_of, own))
