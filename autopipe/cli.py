"""The command line: `autopipe trace | plan | explain | run | probe`.

stdout is data, stderr is talk. Commands pass files to each other:

    autopipe plan model.py -o plan.json     ->  autopipe explain plan.json
                                            ->  autopipe run plan.json --local 4
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer

from autopipe import codec
from autopipe.errors import AutopipeError, ModelError, PlanError
from autopipe.plan import Plan
from autopipe.runtime import launch

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Split a PyTorch model nobody prepared over the devices at hand, and run it.",
)

ModelArgument = Annotated[str, typer.Argument(help="model.py, or package.module:factory")]
PlanArgument = Annotated[Path, typer.Argument(help="a plan file")]

TURN = 5.0
"""Seconds that a rank leaves to the one that can name the cause; a launcher ends it meanwhile."""


def say(line: str) -> None:
    """A line of talk."""
    print(line, file=sys.stderr, flush=True)


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where in the code an error arose; anywhere.")
    ] = False,
) -> None:
    """Options of every command; `main` reads them, so that they may stand behind it too."""


@app.command()
def trace(model: ModelArgument) -> None:
    """Print the model's graph: the nodes that a plan names."""
    from autopipe import batches, modelfile
    from autopipe.source import trace_source

    file = modelfile.load(model)
    example = file.inputs(2)
    specs = batches.describe(example, file.inputs(3), 2, 3)
    print(trace_source(file.model, example, specs, file.loss).graph)


@app.command()
def plan(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="where to write it")] = Path(
        "plan.json"
    ),
    pp: Annotated[int | None, typer.Option(min=1, help="pipeline stages")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="tensor-parallel degree")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="data-parallel replicas")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="of each replica")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b")] = None,
    memory: Annotated[str | None, typer.Option(help="limit of a device, as 24GiB")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="rows of the whole batch")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="local:4, 2x8xA100-80GB, or a file; this machine")
    ] = None,
    planner: Annotated[str, typer.Option(help="dynamic, exhaustive or uniform")] = "dynamic",
) -> None:
    """Decide how to split a model; what is not constrained is the planner's choice."""
    from autopipe import explain as words
    from autopipe import modelfile
    from autopipe.planning import plan as make_plan

    folder = output.resolve().parent
    if not folder.is_dir():
        raise AutopipeError(f"{output} cannot be written: there is no folder {folder}")
    file = modelfile.load(model)
    made = make_plan(
        file.model,
        file.inputs,
        loss=file.loss,
        optimizer=file.optimizer or "adamw",
        cluster=cluster,
        batch_size=batch or file.batch_size,
        pp=pp,
        dp=dp,
        tp=tp,
        micro_batches=micro_batches,
        schedule=schedule,
        memory=memory,
        planner=planner,
        source=_relative(model, folder),
        say=say,
    )
    made.save(output)
    mesh = made.mesh
    say(
        f"plan: pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}, "
        f"{words.count(made.batch.micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{made.schedule}; predicted step {words.seconds(made.prediction.step_seconds)}, "
        f"{words.count(made.batch.rows, 'row')}"
    )
    print(output)


@app.command()
def explain(plan: PlanArgument) -> None:
    """Show a plan to a person: stages, timeline, and why it is this one."""
    from autopipe import explain as words

    words.console().print(words.explain(Plan.load(plan)))


@app.command()
def run(
    plan: PlanArgument,
    local: Annotated[int | None, typer.Option(min=1, help="start so many processes here")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="as long as the batches last")] = None,
    seed: Annotated[int, typer.Option(help="of the weights, the dropout and the batches")] = 0,
    weights: Annotated[Path | None, typer.Option(help="a checkpoint to start from")] = None,
    model: Annotated[str | None, typer.Option(help="the model file, if it has moved")] = None,
) -> None:
    """Train as planned: under torchrun, under srun, or with --local N processes started here."""
    world = launch.world_from(os.environ)
    try:
        loaded = Plan.load(plan)
        source = model or _found(loaded, plan)
        if local is not None:
            launch.check_world(launch.World(0, local, 0, local, 0, "", 0), len(loaded.mesh.places))
        elif world is not None or len(loaded.mesh.places) > 1:
            alone = launch.World(0, 1, 0, 1, 0, "", 0)
            launch.check_world(world or alone, len(loaded.mesh.places))
        if local is not None and local > 1 and world is None:
            raise typer.Exit(launch.spawn(local, sys.argv[1:]))
        _train(loaded, source, steps, seed, weights)
    except AutopipeError as error:
        if world is None or world.rank == 0:
            raise
        # Most mistakes every rank finds, and rank 0 tells them: its end ends this one.
        time.sleep(TURN)
        if not _listens(world):
            raise typer.Exit(2) from None
        raise type(error)(f"rank {world.rank}: {error.message}", hint=error.hint) from error


@app.command()
def probe(
    processes: Annotated[int | None, typer.Option(min=1, help="how many at once")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="a cluster file")] = None,
    again: Annotated[bool, typer.Option(help="measure even if there is a record")] = False,
) -> None:
    """Measure this machine: what a cluster file holds."""
    from autopipe.probe import local_cluster, local_processes

    found = local_cluster(processes or local_processes(), say, again=again)
    if output is None:
        print(codec.dumps(found), end="")
    else:
        codec.save(found, output)
        print(output)


def _train(plan: Plan, source: str, steps: int | None, seed: int, weights: Path | None) -> None:
    from autopipe import explain as words
    from autopipe import modelfile
    from autopipe.parallel import parallelize
    from autopipe.runtime.train import train

    file = modelfile.load(source)
    pipe = parallelize(file.model, plan, loss=file.loss, weights=weights, seed=seed)
    leader = pipe.place.rank == 0
    measured = train(pipe, file, steps, seed, say)
    if leader and not measured.stages:
        say(f"{source}: batches({plan.batch.rows}) gave no batch, so there was no step")
    elif leader:
        planned = [stage.predicted for stage in plan.stages]
        table = words.compare(
            planned, measured.stages, plan.prediction.step_seconds, measured.step_seconds
        )
        words.console().print(table)
        print(f"loss {measured.losses[0]:.3f} -> {measured.losses[-1]:.3f}", flush=True)


def _relative(source: str, folder: Path) -> str:
    """A model file's path as the plan keeps it: from the plan's own folder."""
    if ":" in source and not Path(source).exists():
        return source
    return os.path.relpath(Path(source).resolve(), folder)


def _found(plan: Plan, path: Path) -> str:
    """The plan's model file, from the plan's own folder."""
    if plan.source is None:
        raise PlanError(
            f"plan.source: {path} does not say where its model is",
            hint=f"autopipe run {path} --model FILE",
        )
    if ":" in plan.source:
        return plan.source
    source = path.resolve().parent / plan.source
    if not source.is_file():
        raise ModelError(
            f"plan.source: there is no model file {plan.source!r} in the folder of {path}",
            hint=f"autopipe run {path} --model FILE",
        )
    return str(source)


def main() -> None:
    """The entry point: errors of the user's as sentences, exit code 2, no traceback."""
    debug = "--debug" in sys.argv
    try:
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        app(args=arguments, prog_name="autopipe")
    except AutopipeError as error:
        if debug:
            traceback.print_exc()
        say(f"error: {error.message}")
        if error.hint is not None:
            say(f"\nhint: {error.hint}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # whatever else: ours, or a peer's that is gone
        if debug:
            raise
        say(f"error: {_unexpected(error)}")
        sys.exit(1)


def _listens(world: launch.World) -> bool:
    """Whether rank 0 has come through its own checks, and so has not told this rank's mistake."""
    try:
        socket.create_connection((world.master_addr, world.master_port), TURN).close()
    except OSError:
        return False
    return True


def _unexpected(error: Exception) -> str:
    reason = str(error).strip().splitlines()
    first = reason[0] if reason else ""
    if "Connection closed by peer" in first or "Connection reset" in first:
        time.sleep(TURN)  # the rank that is gone has the code that the launcher should see
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
        return f"rank {rank}: another rank is gone; what it said stands above"
    return f"{type(error).__name__}: {first}\n\nhint: --debug shows where"
