"""What would fit where nothing does: each change is tried, and a plan that honours it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from autopipe.planners.model import memory as memory_model
from autopipe.planners.model.problem import Again, Constraints, Problem, Saved
from autopipe.planners.search.dynamic import fastest
from autopipe.planners.search.registry import PLANNERS
from autopipe.planners.search.relax import UNLIMITED, Relaxations, limitless
from tests.support.problems import line, machine, rich_problem

ONE = Constraints(pp=1, dp=1, schedule="1f1b")


def helps(problem: Problem) -> list[str]:
    """What the refusal's hint is made of."""
    return list(map(str, Relaxations(problem, fastest).that_help()))


def asking(problem: Problem, **asked: object) -> Problem:
    constraints = replace(problem.constraints, **asked)  # type: ignore[arg-type]
    return replace(problem, constraints=constraints)


def with_reruns(problem: Problem) -> Problem:
    """Two blocks of two units each, that can run again and keep 1000 bytes a row otherwise."""
    (profile,) = problem.profiles
    blocks = ((0, 2), (2, 4))
    kept = tuple(
        Saved(1000, first, (first + 1,), number) for number, (first, _) in enumerate(blocks)
    )
    own = replace(
        profile,
        saved=(*profile.saved, *kept),
        recompute=tuple((profile.forward[0][first:last],) for first, last in blocks),
    )
    return replace(problem, recomputable=blocks, profiles=(own,))


FOUR = line((1.0,) * 4, devices=1, constraints=ONE)
"""Four units on one device: 1600 bytes of states, 40 of activations."""


def test_recomputation() -> None:
    """With both blocks' 2000 bytes it holds 3640; if they run again, 1640 and one block's 1000.

    With one micro-batch in flight a block that runs again alone saves nothing: while it does, its
    bytes are there. So both do, and the 16 seconds, all of them forward, are 32.
    """
    free = with_reruns(FOUR)
    tight = asking(replace(free, machine=machine(1, 2640)), recompute=())
    assert fastest(tight) is None
    assert helps(tight) == ["recomputation in stage 0 (+100 % time)"]
    found = PLANNERS["dynamic"](asking(tight, recompute=None))
    assert found.estimate.fits and found.decision.recompute == ((Again(0), Again(1)),)
    assert found.estimate.step_seconds == 32
    assert helps(replace(tight, machine=machine(1, 2639))) == []


def test_recomputation_in_many_stages_is_said_in_short() -> None:
    """Under gpipe both stages hold 4 x 1000 bytes of their block beside 800 of states."""
    two = Constraints(pp=2, dp=1, schedule="gpipe", recompute=())
    free = with_reruns(line((1.0,) * 4, devices=2, constraints=two))
    found = helps(replace(free, machine=machine(2, 4800)))
    assert found[0] == "recomputation in stages 0-1 (+100 % time)"


def test_zero() -> None:
    """Two replicas hold 1640 bytes each; ZeRO-1 deals 800 of them out: 1240."""
    problem = asking(replace(FOUR, machine=machine(2, 1639)), dp=2)
    found = helps(problem)
    assert [words.split(" (")[0] for words in found] == ["zero 1"]
    assert PLANNERS["dynamic"](replace(problem, zeros=(1,))).estimate.fits
    small = replace(problem, machine=machine(2, 1000), zeros=(0, 1))
    assert [words.split(" (")[0] for words in helps(small)] == ["pp=2 and dp=1 together"]


def test_micro_batches() -> None:
    """Asked for in one piece, all four rows are kept at once: 160 bytes instead of 40."""
    one_row = FOUR.profiles[0]
    four_rows = replace(
        one_row,
        rows=4,
        forward=((4.0,) * 4,),
        saved=tuple(replace(saved, bytes=4 * saved.bytes) for saved in one_row.saved),
    )
    problem = replace(FOUR, profiles=(one_row, four_rows), machine=machine(1, 1640))
    assert helps(asking(problem, micro_batches=1)) == ["micro_batches=4"]
    assert helps(asking(problem, micro_batch_size=4)) == ["micro_batch_size=1"]


def test_schedule() -> None:
    """GPipe keeps four micro-batches in each stage, 1F1B two in the first: 880 and 840 bytes."""
    problem = asking(replace(FOUR, machine=machine(2, 840)), pp=2, schedule="gpipe")
    (words,) = (words for words in helps(problem) if words.startswith("the schedule "))
    name = words.split()[2]
    assert PLANNERS["dynamic"](asking(problem, schedule=name)).estimate.fits
    assert PLANNERS["dynamic"](asking(problem, schedule="1f1b")).estimate.fits


def test_stages_and_replicas() -> None:
    """One device has no room for 1640 bytes; two stages do. Two replicas are one too many."""
    problem = replace(FOUR, machine=machine(2, 1000))
    assert [words.split(" (")[0] for words in helps(problem)] == ["pp=2"]
    replicas = asking(replace(FOUR, machine=machine(2, 1000)), pp=None, dp=2)
    assert [words.split(" (")[0] for words in helps(replicas)] == ["dp=1", "4 devices"]


def test_devices() -> None:
    """Five units of 400 bytes over devices of 900: three of them hold two each."""
    problem = line((1.0,) * 5, devices=2, memory=900, constraints=Constraints(schedule="1f1b"))
    assert [words.split(" (")[0] for words in helps(problem)] == ["3 devices"]
    teams = replace(problem, tp=2, machine=replace(problem.machine, streams=2, spare=1))
    assert [words.split(" (")[0] for words in helps(teams)] == ["7 devices"], "one is in no team"


def test_as_few_devices_as_are_enough() -> None:
    """Nine units of 400 bytes, two to a device of 900, are for five devices: of 2 + 1, 2 + 2 and
    2 + 4 the last are enough, and of those between 2 + 3."""
    problem = line((1.0,) * 9, devices=2, memory=900, constraints=Constraints(schedule="1f1b"))
    assert [words.split(" (")[0] for words in helps(problem)] == ["5 devices"]
    changes = Relaxations(problem, fastest)
    for fewer_than, found in ((4, None), (5, None), (6, 5), (100, 5)):
        help = changes.more_devices(fewer_than)
        assert (help and help.devices) == found, f"of fewer than {fewer_than}"
    for devices, enough in ((4, False), (5, True)):
        limited = replace(problem, machine=machine(devices, 900))
        assert (fastest(limited) is not None) == enough


def test_the_least_zero_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty blocks of 100 bytes of parameters on four replicas: 16000 bytes of states each, 10000
    with ZeRO-1, 7000 with ZeRO-2 and 225 of buckets of 100, 4000 with ZeRO-3, as much of buckets
    and 225 of the block that is gathered; 400 are activations."""
    monkeypatch.setattr(memory_model, "BUCKET_BYTES", 100)
    asked = Constraints(pp=1, dp=4, schedule="1f1b")
    deep = line((1.0,) * 40, devices=4, constraints=asked)
    deep = replace(deep, blocks=tuple((unit, unit + 1) for unit in range(40)))
    for memory, zero in ((10400, "zero 1"), (10399, "zero 2"), (7624, "zero 3"), (4850, "zero 3")):
        said = helps(replace(deep, machine=machine(4, memory)))
        assert [words.split(" (")[0] for words in said] == [zero]


def test_what_an_optimizer_rules_out_is_no_help() -> None:
    """Bug: zero 1 and pp=2 were hints, and then refused: it changes what ranks would have parts of
    as a whole."""
    asked = replace(ONE, dp=None, pp=1, zero=0)
    problem = replace(FOUR, machine=machine(2, 1300), constraints=asked)
    assert {words.split(" (")[0] for words in helps(problem)} >= {"zero 1", "pp=2"}
    whole = asking(problem, ruled_out=("zero", "tp", "pp"))
    assert not {"zero 1", "zero 3", "pp=2"} & {words.split(" (")[0] for words in helps(whole)}
    every = replace(problem, zeros=(0, 1, 2))  # all that there are for this model
    assert "zero 3" not in {words.split(" (")[0] for words in helps(every)}


def test_where_nothing_helps_nothing_is_said() -> None:
    """A unit alone is more than a device."""
    assert helps(line((1.0,) * 4, memory=399)) == []


def test_a_model_without_limits_runs_nothing_again() -> None:
    roomy = limitless(with_reruns(FOUR))
    assert set(roomy.machine.memory) == {UNLIMITED}
    assert (roomy.recomputable, roomy.profiles[0].saved, roomy.profiles[0].recompute) == (
        (),
        (),
        (),
    )
    asked = limitless(asking(with_reruns(FOUR), recompute=(Again(1),)))
    assert asked.recomputable == ((0, 2), (2, 4)), "what was asked for still takes its time"


HONOURED: dict[str, Callable[[Problem, str], Problem]] = {
    "zero": lambda problem, words: replace(problem, zeros=(int(words.split()[1]),)),
    "recomputation": lambda problem, words: asking(problem, recompute=None),
    "micro_batches": lambda problem, words: asking(problem, micro_batches=int(words.split("=")[1])),
    "the": lambda problem, words: asking(problem, schedule=words.split()[-1]),
    "pp": lambda problem, words: asking(problem, pp=int(words.split("=")[1])),
    "dp": lambda problem, words: asking(problem, dp=int(words.split("=")[1])),
}


ASKED: list[dict[str, object]] = [
    {"recompute": ()},
    {"schedule": "gpipe"},
    {"micro_batches": 1},
    {"pp": 1},
    {"dp": 1},
    {"pp": 1, "dp": 1, "recompute": ()},
]


def test_every_hint_can_be_taken_at_its_word() -> None:
    """On random problems that no plan fits: what the hint names is asked for, and a plan fits."""
    taken: Counter[str] = Counter()
    for seed, asked in product(range(12), ASKED):
        problem = asking(replace(rich_problem(seed), zeros=(0,)), **asked)
        if problem.machine.devices > 3 or fastest(problem) is not None:
            continue
        for said in helps(problem):
            words = said.split(" (")[0]
            key = words.replace("=", " ").split()[0]
            if not key.isdigit():  # devices: `test_devices`
                found = PLANNERS["dynamic"](HONOURED[key](problem, words))
                assert found.estimate.fits, (seed, asked, said)
            taken["devices" if key.isdigit() else key] += 1
    assert len(taken) > 2, taken
