"""Where a planner may look, and constraints that leave nothing, refused in their own terms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Link
from autopipe.errors import InfeasibleError
from autopipe.planners.model.places import chunks_of
from autopipe.planners.model.problem import EAGER, Config, Constraints, Problem
from autopipe.planners.search.configs import CONSIDERED, SMALL, configs, one_of, schedules
from autopipe.planners.search.registry import PLANNERS
from tests.support.problems import line

FOUR = line((1.0,) * 5, devices=4, constraints=Constraints(schedule="1f1b"))
"""Four devices, five units, four rows, and micro-batches of one."""


def asking(problem: Problem, **asked: object) -> Problem:
    constraints = replace(problem.constraints, **asked)  # type: ignore[arg-type]
    return replace(problem, constraints=constraints)


def looked_at(problem: Problem) -> list[tuple[int, int, int]]:
    return [(config.pp, config.dp, config.micro_batches) for config in configs(problem)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # Three replicas would not share four rows; meshes of fewer devices may win, too.
        ({}, [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2), (2, 1, 4), (3, 1, 4), (4, 1, 4)]),
        ({"pp": 2}, [(2, 2, 2), (2, 1, 4)]),
        ({"dp": 1}, [(1, 1, 4), (2, 1, 4), (3, 1, 4), (4, 1, 4)]),
        ({"pp": 1, "dp": 2}, [(1, 2, 2)]),
        ({"micro_batches": 2}, [(1, 2, 2), (2, 2, 2)]),
        ({"tp": 1, "pp": 4}, [(4, 1, 4)]),
    ],
)
def test_on_few_devices_every_mesh_is_looked_at(
    asked: dict[str, object], expected: list[tuple[int, int, int]]
) -> None:
    assert looked_at(asking(FOUR, **asked)) == expected


def test_on_many_those_that_leave_the_fewest_idle() -> None:
    """Of 66 devices 64 share 192 rows, or all are in pipelines of 22 x 3, 33 x 2, 66."""
    many = line((1.0,) * 70, devices=SMALL + 2, batch=192, constraints=Constraints(schedule="1f1b"))
    assert {config.pp * config.dp for config in configs(many)} == {66}
    assert {(pp, dp) for pp, dp, _ in looked_at(many)} == {
        *((11, 6), (22, 3), (33, 2), (66, 1)),
    }
    prime = line((1.0,) * 4, devices=67, batch=192, constraints=Constraints(schedule="1f1b"))
    assert {(pp, dp) for pp, dp, _ in looked_at(prime)} == {(1, 64), (2, 32), (4, 16)}


def test_on_many_those_are_idle_that_micro_batches_leave_idle() -> None:
    """Bug: of 96 devices all are in pipelines of 12 x 8 and 6 x 16, whose shares of 64 rows are no
    32 micro-batches, and it was refused. Those of two replicas are: 20 units for 2 x 20 devices."""
    asked = Constraints(schedule="1f1b", micro_batches=32)
    many = line((1.0,) * 20, devices=96, batch=64, constraints=asked)
    assert looked_at(many) == [(20, 2, 32)]


def test_each_zero_stage_that_is_allowed_where_there_are_replicas() -> None:
    problem = replace(asking(FOUR, pp=2), zeros=(0, 1, 3))
    assert [(config.dp, config.zero) for config in configs(problem)] == [
        (2, 0),
        (2, 1),
        (2, 3),
        (1, 0),
    ]


def test_stages_on_each_rank() -> None:
    """Of interleaved two, four and eight are looked at, as far as there are units; zb-v has two."""

    def found(name: str, units: int, chunks: int | None = None) -> list[int]:
        asked = Constraints(pp=2, schedule=name, chunks=chunks)
        problem = line((1.0,) * units, devices=2, constraints=asked)
        every = {(c.schedule, chunks_of(asked, name, c.chunks)) for c in configs(problem)}
        return sorted(number for _, number in every)

    assert found("interleaved", 4) == [2]
    assert found("interleaved", 15) == [2, 4]
    assert found("interleaved", 16) == [2, 4, 8]
    assert found("interleaved", 16, chunks=3) == [3]
    assert (found("zb-v", 16), found("1f1b", 16)) == ([2], [1])


@pytest.mark.parametrize(
    ("blocks", "chunks"), [(24, [2, 3, 4, 6, 8, 12]), (22, [2, 3, 4, 6, 8, 11, 12])]
)
def test_as_many_stages_on_each_rank_as_share_blocks_evenly(blocks: int, chunks: list[int]) -> None:
    """24 = 2 x 3 x 4 = ...; 22 with an embedding and a head in the place of two are 24."""
    asked = Constraints(pp=2, schedule="interleaved")
    problem = line((1.0,) * (blocks + 2), devices=2, constraints=asked)
    problem = replace(problem, blocks=tuple((unit, unit + 1) for unit in range(1, blocks + 1)))
    assert sorted({config.chunks for config in configs(problem)}) == chunks


def test_schedules_of_a_pipeline() -> None:
    """1f1b first, which wins ties. With backward in halves there is no ZeRO-3."""
    problem = replace(asking(FOUR, schedule=None, pp=2, dp=2), zeros=(0, 3))
    found = [(config.zero, config.schedule) for config in configs(problem)]
    halves = [(0, "zb-h1"), (0, "zb-v")]
    assert schedules(problem) == CONSIDERED
    assert found == [
        *((0, "1f1b"), (0, EAGER), (0, "interleaved"), *halves),
        *((3, "1f1b"), (3, EAGER), (3, "interleaved")),
    ]


def test_without_a_pipeline_all_schedules_are_one() -> None:
    alone = asking(FOUR, schedule=None, pp=1)
    assert {config.schedule for config in configs(alone)} == {"1f1b"}
    assert {config.schedule for config in configs(asking(alone, schedule="zb-h1"))} == {"zb-h1"}


def test_a_schedule_of_several_stages_a_rank_needs_as_many_units() -> None:
    """Five units are enough for two stages on each of two ranks, and not of three."""
    problem = asking(FOUR, schedule=None, dp=1)
    found = {(config.pp, config.schedule) for config in configs(problem)}
    assert (2, "interleaved") in found and (2, "zb-v") in found
    assert not found & {(3, "interleaved"), (3, "zb-v"), (4, "interleaved"), (4, "zb-v")}
    assert (3, "1f1b") in found


@pytest.mark.parametrize(
    ("latency", "depths"), [(0.0, [0, 1]), (1.0, [0, 1, 2]), (100.0, [0, 1, 2, 4, 8])]
)
def test_depths_are_looked_at_as_far_as_they_hide_something(
    latency: float, depths: list[int]
) -> None:
    """Two stages of one second each, 16 micro-batches: once 2 s and twice the latency are hidden by
    2 + e micro-batches in flight, the period is that of the slower stage. Where it is asked for,
    it may also be without any, which is 1f1b."""
    problem = line(
        (1.0, 1.0),
        batch=16,
        link=Link(latency, 1e9),
        constraints=Constraints(pp=2, schedule=EAGER),
    )
    assert [config.depth for config in configs(problem)] == depths
    either = configs(asking(problem, schedule=None))
    assert [config.depth for config in either if config.schedule == EAGER] == depths[1:]
    (asked,) = configs(asking(problem, depth=3))
    assert asked == Config(2, 1, 16, 0, EAGER, 3)


def test_ties_are_won_by_what_comes_first() -> None:
    """Fewest stages, most replicas, fewest micro-batches, the least ZeRO, the first schedule."""
    problem = replace(asking(FOUR, schedule=None), zeros=(0, 1))
    rank = {name: number for number, name in enumerate(CONSIDERED)}
    found = configs(problem)
    assert list(found) == sorted(
        found, key=lambda f: (f.pp, -f.dp, f.micro_batches, f.zero, rank[f.schedule], f.depth)
    )


@pytest.mark.parametrize(
    ("constraints", "sentence", "hint"),
    [
        (
            Constraints(pp=4, dp=2),
            "pp=4 dp=2 needs 8 devices, found 6",
            "leave out pp or dp, and the other one follows",
        ),
        (Constraints(dp=7), "dp=7 needs 7 devices, found 6", "dp of at most 6"),
        (
            Constraints(pp=6),
            "pp=6 dp=1 needs a model of at least 6 units, one a stage; this one has 5",
            "pp of at most 5",
        ),
        (
            Constraints(pp=2, schedule="interleaved", chunks=3),
            "pp=2 dp=3 by interleaved, with 3 stages on each rank, needs a model of at least 6 "
            "units, one a stage; this one has 5",
            "pp of at most 1; or a schedule of one stage on each rank, as 1f1b",
        ),
        (
            Constraints(pp=2, schedule="interleaved", chunks=6),
            "pp=2 dp=3 by interleaved, with 6 stages on each rank, needs a model of at least 12 "
            "units, one a stage; this one has 5",
            "a schedule of one stage on each rank, as 1f1b",
        ),
        (
            Constraints(pp=3, dp=2, micro_batches=5),
            "micro_batches=5 was asked for, and a batch of 12 rows over dp=2 does not divide into "
            "5 micro-batches of 1, 2 or 4 rows",
            "the nearest that does is micro_batches=3 or 6",
        ),
        (
            Constraints(pp=1, dp=4, micro_batch_size=2),
            "a batch of 12 rows over dp=4 does not divide into micro-batches of 2 rows",
            "a batch of 8 or 16 rows divides",
        ),
        (
            Constraints(pp=1, dp=5),
            "a batch of 12 rows over dp=5 does not divide into micro-batches of 1, 2 or 4 rows",
            "a batch of 10 or 15 rows divides",
        ),
        (
            Constraints(schedule="2f2b"),
            "schedule='2f2b' was asked for, and there is none of that name",
            "schedule is naive, gpipe, 1f1b, eager-1f1b, interleaved, zb-h1 or zb-v, or a file",
        ),
    ],
)
@pytest.mark.parametrize("planner", PLANNERS)
def test_constraints_that_contradict_are_refused_in_their_own_terms(
    planner: str, constraints: Constraints, sentence: str, hint: str | None
) -> None:
    problem = line((1.0,) * 5, devices=6, batch=12, constraints=constraints)
    one_row = problem.profiles[0]
    problem = replace(problem, profiles=tuple(replace(one_row, rows=rows) for rows in (1, 2, 4)))
    with pytest.raises(InfeasibleError) as refusal:
        PLANNERS[planner](problem)
    assert refusal.value.message.startswith(sentence)
    assert hint is None or (refusal.value.hint or "").startswith(hint)


def test_tensor_parallel_ranks_count_as_devices() -> None:
    problem = asking(FOUR, pp=4, dp=2)
    for spare, found in ((0, "found 8\n"), (1, "found 9, of which tp=2 leaves 1 idle\n")):
        teams = replace(problem.machine, streams=2, spare=spare)
        with pytest.raises(InfeasibleError, match=f"pp=4 dp=2 tp=2 needs 16 devices, {found}"):
            configs(replace(problem, tp=2, machine=teams))


def test_a_schedule_with_backward_in_halves_has_no_zero_3() -> None:
    problem = replace(asking(FOUR, pp=2, schedule="zb-h1"), zeros=(3,))
    with pytest.raises(InfeasibleError) as refusal:
        configs(problem)
    assert str(refusal.value) == (
        "zb-h1 and zero=3 do not go together: it gathers for both halves of a backward at once\n"
        "hint: the schedule 1f1b, or zero=1"
    )


def test_choices_in_words() -> None:
    assert [one_of(choices) for choices in ([1], [1, 2], [1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]
