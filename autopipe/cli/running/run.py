"""The command `autopipe run`: it starts the ranks of a plan, or is one of them and trains."""

from __future__ import annotations

import os

import typer

from autopipe.cli.running import ranks
from autopipe.cli.running.options import (
    CheckpointOptions,
    OutputOptions,
    StartOptions,
    TrainingOptions,
)
from autopipe.cli.running.replanned import planned_anew
from autopipe.cli.running.summary import INTERRUPTED, telling_what_is_lost
from autopipe.terminal import console
from autopipe.terminal.commands import PlanArgument, command
from autopipe.terminal.paths import model_source, say_edits, standing
from autopipe.util.gc_pause import loading


@command("autopipe run plan.json --local 4")
def run(
    plan: PlanArgument,
    start: StartOptions,
    training: TrainingOptions,
    checkpoints: CheckpointOptions,
    output: OutputOptions,
) -> None:
    """Train as planned: under torchrun, under srun, or with --local N processes started here.

    In a pod of Kubeflow's (PET_NNODES and so on) it starts the pod's own processes.
    """
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.launch import asked, pods, voice

    pod = None if start.local is not None else pods.pod_from(os.environ)
    world = None if pod is not None else ranks.world_here(start.local)
    leads = world is None or world.rank == 0
    keeps = checkpoints.folder is not None or not leads
    with telling_what_is_lost(keeps=keeps), voice.one_voice(world, debug=console.debug()):
        loaded = Plan.load(plan)
        checkpoints.check()
        training.check()
        outputs = output.checked(loaded, training.steps, leads=leads, resume=checkpoints.resume)
        start.check(started_here=start.local is not None or pod is not None)
        source = training.model or model_source(loaded, plan, "run")
        forwarded = asked.SIGNALS if checkpoints.folder is not None else ()
        if pod is not None:
            raise typer.Exit(ranks.start_pod(pod, loaded, forwarded, start.log_dir))
        if checkpoints.replan and checkpoints.folder is not None:
            source = standing(source)
            loaded = planned_anew(loaded, source, world, start.local, checkpoints.folder)
        ranks.check(start.local, world, loaded, plan)
        if world is None and start.starts_ranks:
            raise typer.Exit(ranks.start_local(start.local or 1, forwarded, start.log_dir))
        if checkpoints.folder is not None:
            asked.listen(alone=world is None)
        if leads:
            say_edits(loaded)
        with loading():
            from autopipe.cli.running import training as one_rank
        one_rank.run(loaded, source, training, checkpoints, outputs)
        if world is None and asked.interrupted():
            raise typer.Exit(INTERRUPTED)  # as shells have it: what was to follow does not
