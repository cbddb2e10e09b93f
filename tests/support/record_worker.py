"""Three ranks whose clocks are hours apart hand a number round, and write one trace of it.

Started by `warm.spawn`, once per rank:

    python record_worker.py FOLDER      FOLDER/trace.json.gz; FOLDER/true.0: when it computed
                                        FOLDER/bubbles.0: what `write` returned
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist

from autopipe.planfile.parts import Mesh
from autopipe.runtime.launch.world import start, world_from
from autopipe.runtime.telemetry.record import Recorder, write
from autopipe.schedules.instructions import parse
from tests.support.plans import example_plan

RANKS = 3
STEPS = 4
LAST = 2
HOUR = 3600.0


def main(folder: Path) -> None:
    world = world_from(os.environ)
    assert world is not None
    rank = world.rank
    plan = example_plan()
    places = tuple(replace(plan.mesh.places[0], rank=r, pp=r) for r in range(RANKS))
    plan = replace(plan, mesh=Mesh(RANKS, 1, 1, places))
    ahead = (5, -40, 1000)[rank] * HOUR

    def clock() -> float:
        return perf_counter() + ahead

    recorder = Recorder(LAST)
    true = []
    with start(world, timeout=60):
        for number in range(STEPS):
            dist.barrier()
            recorder.begin(number)
            if rank > 0:
                began = clock()
                dist.recv(torch.zeros(1), rank - 1)
                recorder.record(parse(f"{rank}WAIT_F0<{rank - 1}"), began, clock())
            began = clock()
            time.sleep(0.002)
            recorder.record(parse(f"{rank}F0"), began, clock())
            true.append(began - ahead)
            if rank < RANKS - 1:
                began = clock()
                dist.send(torch.zeros(1), rank + 1)
                recorder.record(parse(f"{rank}SEND_F0>{rank + 1}"), began, clock())
        path = folder / "trace.json.gz"
        found = write(path, recorder, plan, "plan.json", rank, dist.group.WORLD, clock)
    (folder / f"true.{rank}").write_text(json.dumps(true))
    (folder / f"bubbles.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
