"""Gloo between real processes: the stories, and which groups a placement of stages needs."""

from pathlib import Path

import pytest

from autopipe.runtime.comm.gloo import ways
from tests.support.transport_stories import STAGES, STORIES, Story, check, told


@pytest.fixture(scope="module", params=["gloo", "shared"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a group for each way, and with one for all."""
    return told(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("story", STORIES)
def test_story(story: Story, folder: Path) -> None:
    check(story, folder)


def test_it_closes(folder: Path) -> None:
    assert (folder / "code").read_text() == "0"


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((0,), ""),
        ((3, 3), ""),  # two stages on one rank
        ((0, 1, 2), "B down, F up"),  # activations to higher ranks, gradients back
        ((4, 6), "B down, F up"),  # global ranks of a pipeline of its own
        ((0, 1, 0, 1), "B down, B up, F down, F up"),  # interleaved: 1 -> 2 leads down
        (STAGES, "B down, B up, F down, F up"),  # a V
    ],
)
def test_a_group_for_each_way(stages: tuple[int, ...], expected: str) -> None:
    found = (f"{way.flow.value} {'up' if way.up else 'down'}" for way in ways(stages))
    assert ", ".join(found) == expected
