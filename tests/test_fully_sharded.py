"""A stage in shards trains as one process does; the stories are in `zero_worker`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.zero_worker import STORIES, Story, told


@pytest.fixture(scope="module")
def tell(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    return cache(
        lambda world: told("fully_sharded", world, tmp_path_factory.mktemp(f"world-{world}"))
    )


@pytest.mark.parametrize(
    ("world", "story"),
    [(world, story) for world, stories in STORIES["fully_sharded"].items() for story in stories],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_story(world: int, story: Story, tell: Callable[[int], Path]) -> None:
    folder = tell(world)
    for rank in range(world):
        result = folder / f"{story.__name__}.{rank}"
        assert result.exists(), "an earlier story failed, or another rank of this one"
        assert result.read_text() == ""


@pytest.mark.parametrize("world", STORIES["fully_sharded"])
def test_all_processes_end_well(world: int, tell: Callable[[int], Path]) -> None:
    assert (tell(world) / "code").read_text() == "0"
