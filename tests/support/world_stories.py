"""Stories that worlds of processes tell: each is a function that every rank of its world runs.

@story("zero", 2, 3)         tests of the name "zero" tell it, by two processes and by three
def many_small_buckets() -> None: ...
"""

from collections.abc import Callable

Story = Callable[[], None]
STORIES: dict[str, dict[int, list[Story]]] = {}


def story(file: str, *worlds: int) -> Callable[[Story], Story]:
    """Enter a story under the file whose tests tell it and the numbers of processes it is for."""

    def enter(told: Story) -> Story:
        for world in worlds:
            STORIES.setdefault(file, {}).setdefault(world, []).append(told)
        return told

    return enter
