"""Tells stories of gradients summed and states sharded in real processes; started once per rank.

    python zero_worker.py FOLDER zero          FOLDER/many_small_buckets.0: empty, or a traceback

What came of each story of that name and world goes into a file for each rank. The first that fails
is the last that is told: the ranks no longer stand at the same place.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path

import torch

from autopipe.runtime.launch.world import start, world_from
from tests.support import gradient_stories as gradient_stories
from tests.support import warm
from tests.support import zero1_stories as zero1_stories
from tests.support import zero2_stories as zero2_stories
from tests.support import zero3_stories as zero3_stories
from tests.support.world_stories import STORIES


def told(file: str, world: int, folder: Path) -> Path:
    """Tell the stories of a file by so many processes; `code` is what came of the processes."""
    (folder / "code").write_text(str(warm.spawn(world, [__file__, str(folder), file])))
    return folder


def main(folder: Path, file: str) -> None:
    world = world_from(os.environ)
    assert world is not None
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with start(world, timeout=60):
        for told in STORIES[file][world.size]:
            result = folder / f"{told.__name__}.{world.rank}"
            try:
                told()
            except Exception:
                result.write_text(traceback.format_exc())
                raise
            result.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
