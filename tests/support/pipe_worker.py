"""Tells the stories of whole training steps in real processes; started once per rank.

    python pipe_worker.py FOLDER          FOLDER/three_steps.0: empty, or a traceback

What came of each story of this world goes into a file for each rank. The first that fails is the
last that is told: the ranks no longer stand at the same place.
"""

import os
import sys
import traceback
from pathlib import Path

import torch

from autopipe.runtime.launch.world import start, world_from
from tests.support import batch_loss_stories as batch_loss_stories
from tests.support import length_stories as length_stories
from tests.support import loss_stories as loss_stories
from tests.support import memory_stories as memory_stories
from tests.support import part_stories as part_stories
from tests.support import pipe_stories as pipe_stories
from tests.support import script_stories as script_stories
from tests.support import state_dict_stories as state_dict_stories
from tests.support import step_stories as step_stories
from tests.support import tp_stories as tp_stories
from tests.support import turn_stories as turn_stories
from tests.support import zero_stories as zero_stories
from tests.support.long import LONG
from tests.support.pipes import LONG_STORIES, STORIES, once


def main(folder: Path) -> None:
    world = world_from(os.environ)
    assert world is not None
    torch.set_num_threads(1)
    with start(world), once():
        for told in STORIES[world.size]:
            if told in LONG_STORIES and not LONG:
                continue
            result = folder / f"{told.__name__}.{world.rank}"
            try:
                told()
            except Exception:
                result.write_text(traceback.format_exc())
                raise
            result.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
