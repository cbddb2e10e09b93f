"""Harm at every kind of instruction of a planned model in training: the sentence that a user reads.

A few of the runs of `benchmarks.chaos`, which has every kind, event and rank, and the times.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from benchmarks.chaos.case import KINDS, MESHES, broken, make
from benchmarks.chaos.harm import EVENTS, Harm
from benchmarks.chaos.story import LAUNCHERS, Story, begin, tell
from tests.support import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a sidecar needs Linux")

SIDE_BY_SIDE = 2
"""Runs at a time: most of one is waiting, for imports and for five seconds of silence."""


class Case(NamedTuple):
    """A run, and what it has to say of the rank that comes to harm."""

    schedule: str
    launcher: str
    rank: int
    kind: str
    event: str
    place: str


CASES = [
    Case("1f1b", "local", 2, "F", "kill",
         "rank 2 (stage 1) died at step 2, forward of micro-batch 4"),
    Case("1f1b", "alone", 1, "B", "stop",
         "rank 1 (stage 0) froze at step 2, backward of micro-batch 4"),
    Case("zb-h1", "alone, script", 2, "I", "kill",
         "rank 2 (stage 2) died at step 2, backward for the inputs of micro-batch 4"),
    Case("zb-h1", "torchrun", 3, "W", "raise",
         "rank 3 (stage 3) failed at step 2, backward for the weights of micro-batch 4"),
    Case("zb-h1", "alone, script", 1, "POST", "kill",
         "rank 1 (stage 1) died at step 2, making room for "
         "the activations of micro-batch 5 from stage 0"),
    Case("1f1b", "alone", 0, "WAIT", "stop",
         "rank 0 (stage 0) froze at step 2, waiting for "
         "the gradients of micro-batch 4 from stage 1"),
    Case("1f1b", "alone, script", 1, "SEND", "raise",
         "rank 1 (stage 0) failed at step 2, sending the activations of micro-batch 4 to stage 1"),
    Case("1f1b", "alone, script", 2, "FREE", "stop",
         "rank 2 (stage 1) froze at step 2, waiting for "
         "stage 0 to take the gradients of micro-batch 4"),
    Case("1f1b", "alone", 0, "REDUCE", "kill",
         "rank 0 (stage 0) died at step 2, about to sum its gradients over the ranks"),
    Case("zb-h1", "torchrun, script", 1, "STEP", "raise",
         "rank 1 (stage 1) failed at step 2, waiting for the sums of its gradients"),
]  # fmt: skip


@pytest.fixture(scope="module")
def stories(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[Case, Future[Story]]]:
    """The runs of all tests that were asked for, some of them side by side."""
    folder = tmp_path_factory.mktemp("chaos")
    wanted: list[Case] = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_harm
    ]
    plans = {
        schedule: make(schedule, folder)
        for schedule in dict.fromkeys(case.schedule for case in wanted)
    }

    def run(number: int, case: Case) -> Story:
        own = folder / str(number)
        own.mkdir()
        return tell(
            plans[case.schedule],
            case.launcher,
            Harm(case.rank, 2, case.kind, case.event, str(own)),
            warm.start if case.launcher.startswith("alone") else begin,
        )

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {case: pool.submit(run, number, case) for number, case in enumerate(wanted)}


ALWAYS = ("WAIT",)
"""Kinds that every run of the tests harms, here by a stop; `test_watchdog` has the other events.

The long run harms all.
"""


def name(case: Case) -> str:
    return f"{case.kind}-{case.event}-{case.launcher}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name(case), marks=() if case.kind in ALWAYS else pytest.mark.long)
        for case in CASES
    ],
)
def test_harm(case: Case, stories: dict[Case, Future[Story]]) -> None:
    """It is named once, in time; every rank ends with another code than 0, and nothing is left."""
    story = stories[case].result()
    assert story.place == case.place
    assert broken(story, case.launcher) == [], "\n".join(line for _, line in story.lines)


def test_nothing_is_left_out() -> None:
    """Every kind of instruction, event and launcher; all events for computations and for waits."""
    assert {case.kind for case in CASES} == {kind for kinds in KINDS.values() for kind in kinds}
    assert {case.launcher for case in CASES} == set(LAUNCHERS)
    computed = {case.event for case in CASES if case.kind in ("F", "B", "I", "W")}
    waited = {case.event for case in CASES if case.kind in ("POST", "WAIT", "FREE", "STEP")}
    assert computed == waited == set(EVENTS)
    assert {case.schedule for case in CASES} == set(MESHES)
