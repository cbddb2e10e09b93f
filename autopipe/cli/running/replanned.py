"""Plan anew where a run finds other devices than its plan is for (`--replan`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.terminal.console import say
from autopipe.terminal.paths import as_asked, relative
from autopipe.util import atomic_file, codec, numbers

if TYPE_CHECKING:
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.launch.world import World


def planned_anew(
    plan: Plan, source: str, world: World | None, local: int | None, folder: Path
) -> Plan:
    """The plan, or where other devices are there than it is for, one for those.

    The first process makes it and leaves it in `folder`, where the others wait for it.
    """
    from autopipe.runtime.launch import attempt

    warning = attempt.elastic_warning(os.environ)
    if warning is not None and world is not None and world.rank == 0:
        say(warning)
    size = world.size if world is not None else local or 1
    per_node = world.local_size if world is not None else size
    if size == len(plan.mesh.places) or size % per_node:
        return plan
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.launch.world import TIMEOUT

    nodes = [per_node] * (size // per_node)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"plan-{len(nodes)}x{per_node}-{codec.digest(plan)}.json"
    if not path.exists() and (world is None or world.rank == 0):
        from autopipe.frontend import model_file
        from autopipe.planners.driver.replan import replan

        there = relative(source, folder.resolve())
        made = replan(plan, model_file.load(source), nodes, there, say)
        made.save(as_asked(path))
        mesh = made.mesh
        say(
            f"{path}: planned anew for {numbers.count(size, 'device')} in the place of "
            f"{len(plan.mesh.places)}: tp {mesh.tp} x pp {mesh.pp} x dp {mesh.dp}"
        )
    atomic_file.wait_for(as_asked(path), TIMEOUT)
    return Plan.load(as_asked(path))
