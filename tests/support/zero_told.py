"""The stories of `zero_worker` as tests; each number of processes is started once for all."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.world_stories import STORIES, Story
from tests.support.zero_worker import told

Tell = Callable[[int], Path]


class Stories:
    """The tests of one file's stories: `class TestStories(Stories): file = "zero"`."""

    file: str
    later: tuple[int, ...] = ()
    """The numbers of processes that only the long run has."""

    @pytest.fixture(scope="class")
    @classmethod
    def tell(cls, tmp_path_factory: pytest.TempPathFactory) -> Tell:
        return cache(lambda world: told(cls.file, world, tmp_path_factory.mktemp(f"by-{world}")))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        stories = STORIES[self.file]
        marks = {world: pytest.mark.long if world in self.later else () for world in stories}
        if "story" in metafunc.fixturenames:
            cases = [(world, story) for world in stories for story in stories[world]]
            names = [f"{world}-{story.__name__}" for world, story in cases]
            told = [pytest.param(*case, marks=marks[case[0]]) for case in cases]
            metafunc.parametrize(("world", "story"), told, ids=names)
        else:
            metafunc.parametrize("world", [pytest.param(w, marks=marks[w]) for w in stories])

    def test_story(self, world: int, story: Story, tell: Tell) -> None:
        folder = tell(world)
        for rank in range(world):
            result = folder / f"{story.__name__}.{rank}"
            assert result.exists(), "an earlier story failed, or another rank of this one"
            assert result.read_text() == ""

    def test_all_processes_end_well(self, world: int, tell: Tell) -> None:
        assert (tell(world) / "code").read_text() == "0"
