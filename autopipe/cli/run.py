"""The command `autopipe run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe.cli.run_report import INTERRUPTED, report, telling_what_is_lost
from autopipe.errors import AutopipeError
from autopipe.terminal import console
from autopipe.terminal.commands import PlanArgument, command
from autopipe.terminal.console import say, tell
from autopipe.terminal.paths import check_file, model_source, relative, say_edits
from autopipe.util import atomic_file, codec, numbers
from autopipe.util.gc_pause import loading

if TYPE_CHECKING:  # it imports torch, which most commands have no use for
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.launch.pods import Pod
    from autopipe.runtime.launch.world import World
    from autopipe.runtime.telemetry.destinations import Destinations, MemorySnapshot


@command("autopipe run plan.json --local 4")
def run(
    plan: PlanArgument,
    local: Annotated[
        int | None, typer.Option(min=1, help="Start this number of processes on this machine.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to train; default: until the batches end.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Times to go through the batches; default: once.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Save the whole model at the end, as FILE.safetensors.")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="A folder for checkpoints; one at the end, on Ctrl-C and SIGTERM."),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps from one checkpoint to the next.")
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="How many checkpoints stay.")] = 3,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    replan: Annotated[
        bool, typer.Option("--replan", help="Make a new plan if the devices are not the plan's.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, dropout and batches; default: 0."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Weights to start from: a file, or a run's checkpoints.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model file, if it has moved.")] = None,
    max_grad_norm: Annotated[
        float | None,
        typer.Option(help="Clip gradients by their norm to this; else as the model file says."),
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep shards of ZeRO-3 in the host's memory.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write what every rank did when, for ui.perfetto.dev.")
    ] = None,
    log_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps from one line with the loss to the next; --metrics, --tensorboard, --wandb "
            "and --record get the figures of these steps only.",
        ),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on even if the loss is nan or infinite.")
    ] = False,
    metrics: Annotated[
        Path | None, typer.Option(help="Write each step's figures, as lines of JSON.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write these figures for TensorBoard, into this folder.")
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option(help="Log these figures to W&B, in this project; W&B finds its own key."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="A folder for what each process started here prints.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="A folder for what `autopipe report` shows of the run."),
    ] = None,
    memory_snapshot: Annotated[
        int | None,
        typer.Option(min=1, help="Write what each GPU's memory held in this step, into --record."),
    ] = None,
) -> None:
    """Train as planned: under torchrun, under srun, or with --local N processes started here.

    In a pod of Kubeflow's (PET_NNODES and so on) it starts the pod's own processes.
    """
    from autopipe.planfile.contents import Plan
    from autopipe.report import recorded
    from autopipe.runtime.launch import asked, pods, voice
    from autopipe.runtime.launch import world as launch

    pod = None if local is not None else pods.pod_from(os.environ)
    world = None if pod is not None else launch.world_from(os.environ)
    leads = world is None or world.rank == 0
    keeps = checkpoints is not None or not leads
    with telling_what_is_lost(keeps=keeps), voice.one_voice(world, debug=console.debug()):
        loaded = Plan.load(plan)
        snapshot = _snapshot(memory_snapshot, record, loaded, steps)
        if record is not None:
            recorded.begin(record, leads=leads, resume=resume)
            metrics, trace = metrics or record / recorded.METRICS, trace or record / recorded.TRACE
        check_file(trace)
        if save is not None:
            atomic_file.check_model(save)
        keeping = _keeping(checkpoints, save_every, keep, seed, resume=resume, replan=replan)
        destinations = _destinations(metrics, tensorboard, wandb, world, resume=resume)
        _check_logs(log_dir, started_here=local is not None or pod is not None)
        source = model or model_source(loaded, plan, "run")
        if pod is not None:
            signals = asked.SIGNALS if keeping is not None else ()
            raise typer.Exit(_start_pod(pod, loaded, signals, log_dir))
        if replan and checkpoints is not None:
            loaded = _planned_anew(loaded, source, world, local, checkpoints)
        started_here = launch.World(0, local or 1, 0, local or 1, 0, "", 0)
        asking = started_here if local is not None or world is None else world
        launch.check_world(asking, len(loaded.mesh.places), str(plan))
        if local is not None and (local > 1 or log_dir is not None) and world is None:
            signals = asked.SIGNALS if keeping is not None else ()
            raise typer.Exit(launch.spawn(local, sys.argv[1:], forwarded=signals, log_dir=log_dir))
        if keeping is not None:
            asked.listen(alone=world is None)
        if leads:
            say_edits(loaded)
        _train(
            loaded,
            source,
            {"seed": seed or 0, "weights": weights, "offload": offload},
            steps,
            trace,
            save,
            epochs=epochs,
            log_every=log_every,
            quiet=console.quiet(),
            max_grad_norm=max_grad_norm,
            keep_going=keep_going,
            keeping=keeping,
            metrics=destinations,
            record=record,
            snapshot=snapshot,
        )
        if world is None and asked.interrupted():
            raise typer.Exit(INTERRUPTED)  # as shells have it: what was to follow does not


def _destinations(
    file: Path | None,
    tensorboard: Path | None,
    wandb: str | None,
    world: World | None,
    *,
    resume: bool,
) -> Destinations:
    """Where metrics go, which the one rank that writes them has checked."""
    from autopipe.runtime.telemetry import destinations

    to = destinations.Destinations(file, tensorboard, wandb)
    if world is None or world.rank == 0:
        destinations.check(to, resume=resume)
    return to


def _snapshot(
    step: int | None, folder: Path | None, plan: Plan, steps: int | None
) -> MemorySnapshot | None:
    if step is None:
        return None
    from autopipe.runtime.telemetry.destinations import snapshot_of

    return snapshot_of(step, folder, plan, steps)


def _check_logs(folder: Path | None, *, started_here: bool) -> None:
    if folder is not None and not started_here:
        raise AutopipeError(
            f"--log-dir {folder} is for processes that are started here, as by --local N",
            hint="torchrun --log-dir FOLDER --tee 3; srun --output FOLDER/%t.log",
        )


def _start_pod(pod: Pod, plan: Plan, forwarded: Sequence[Signals], log_dir: Path | None) -> int:
    """Start the ranks of a pod; the code that they end with."""
    from autopipe.runtime.launch import address, pods, spawn

    environs = pods.environments(pod, plan.mesh.processes_per_node)
    address.resolve(pod.master_addr, pods.PATIENCE, tell)
    return spawn.spawn(
        len(environs), sys.argv[1:], environs=environs, forwarded=forwarded, log_dir=log_dir
    )


def _keeping(
    folder: Path | None,
    every: int | None,
    keep: int,
    seed: int | None,
    *,
    resume: bool,
    replan: bool,
) -> dict[str, Any] | None:
    """The options about checkpoints, as `keeping.Keeping` takes them; None: there are to be none.

    Raises:
        AutopipeError: one of the others is given without a folder, or nothing can be written there.
    """
    if folder is None:
        given = {"--save-every": every is not None, "--resume": resume, "--replan": replan}
        for option in [name for name, is_given in given.items() if is_given]:
            raise AutopipeError(
                f"{option} needs a folder of checkpoints, and none was given",
                hint=f"--checkpoints FOLDER {option}",
            )
        return None
    from autopipe.runtime.checkpoint.folder import checkpoints_in

    atomic_file.check_new_folder(folder, "--checkpoints")
    earlier = checkpoints_in(folder)
    if earlier and not resume:
        raise AutopipeError(
            f"--checkpoints {folder} has {earlier[0][1].name} of an earlier run",
            hint="--resume goes on from it; to begin anew, give another folder",
        )
    return {"folder": folder, "every": every, "keep": keep, "seed": seed, "resume": resume}


def _planned_anew(
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

        made = replan(plan, model_file.load(source), nodes, relative(source, folder.resolve()), say)
        made.save(path)
        mesh = made.mesh
        say(
            f"{path}: planned anew for {numbers.count(size, 'device')} in the place of "
            f"{len(plan.mesh.places)}: tp {mesh.tp} x pp {mesh.pp} x dp {mesh.dp}"
        )
    atomic_file.wait_for(path, TIMEOUT)
    return Plan.load(path)


def _train(
    plan: Plan,
    source: str,
    built: dict[str, Any],
    steps: int | None,
    trace: Path | None,
    save: Path | None,
    *,
    keeping: dict[str, Any] | None,
    record: Path | None,
    max_grad_norm: float | None,
    **options: Any,
) -> None:
    """Train with options of `parallelize` (`built`), of `Keeping` and of `train` (`options`).

    Under `--quiet` training tells of what went another way than asked for, and of nothing else.
    """
    with loading():
        from autopipe.frontend import model_file
        from autopipe.frontend.optimizer import check_norm
        from autopipe.report import recorded
        from autopipe.runtime.keeping import Keeping
        from autopipe.runtime.parallelize import parallelize
        from autopipe.runtime.train import train

    file = model_file.load(source)
    if max_grad_norm is not None:
        norm = check_norm(max_grad_norm, "--max-grad-norm")
        file = replace(file, max_grad_norm=norm)
    random = file.loaded is not None and file.weights is None and built["weights"] is None
    build, weights = file.start() if built["weights"] is None else (file.model, built["weights"])
    built = built | {"weights": weights}
    pipe = parallelize(build, plan, loss=file.loss, say=say, **built)
    if pipe.place.rank == 0:
        for line in file.since_planning(plan):
            tell(line)
        if random and not (keeping and keeping["resume"]):
            tell(f"{source}: the folder has no weights, so that the run begins with random numbers")
    saving = Keeping(**keeping) if keeping is not None else None
    if record is not None and pipe.place.rank == 0:
        replace(plan, source=relative(source, record.resolve())).save(record / recorded.PLAN)
    measured = train(pipe, file, steps, tell, trace, saving=saving, **options)
    if measured.stopped:
        return
    if not measured.losses and pipe.steps and pipe.place.rank == 0:
        say(f"all {pipe.steps} steps were made already")
    if save is not None and pipe.steps:
        pipe.save(save)
    if pipe.place.rank == 0 and (measured.losses or not pipe.steps):
        folder = keeping["folder"] if keeping is not None else None
        if record is not None:
            recorded.end(record, measured.stages, measured.step_seconds, measured.bubbles)
            say(f"{record}: the record; `autopipe report {record}` shows it")
        report(plan, measured, source, trace, save, folder, quiet=options["quiet"])
