"""The command line: `autopipe trace | costs | plan | explain | simulate | run | emit | probe`.

stdout is data, stderr is talk. Commands pass files to each other:

    autopipe plan model.py -o plan.json     ->  autopipe explain plan.json
                                            ->  autopipe simulate plan.json --svg step.svg
                                            ->  autopipe run plan.json --local 4
                                            ->  autopipe emit plan.json -o FOLDER
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe import codec, files
from autopipe.errors import AutopipeError, ModelError, PlanError
from autopipe.plan import Plan, on_edits
from autopipe.runtime import launch, voice, watchdog
from autopipe.runtime.words import sentence

if TYPE_CHECKING:  # it imports torch, which most commands have no use for
    from autopipe.runtime.train import Measured

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Split a PyTorch model nobody prepared over the devices at hand, and run it.",
)

ModelArgument = Annotated[str, typer.Argument(help="model.py, or package.module:factory")]
PlanArgument = Annotated[Path, typer.Argument(help="a plan file")]


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
def costs(
    model: ModelArgument,
    precision: Annotated[str, typer.Option(help="fp32, or mixed: bf16 or fp16")] = "fp32",
    tp: Annotated[int, typer.Option(min=1, help="of the first of so many ranks")] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="whose links they share: 8xA100-80GB, or a file")
    ] = None,
) -> None:
    """Print what a micro-batch costs, part by part, as formulas in its rows and sequence."""
    from autopipe import modelfile
    from autopipe.formulas import cost_formulas
    from autopipe.sheet import sheet

    file = modelfile.load(model)
    found = cost_formulas(
        file.model,
        file.inputs,
        loss=file.loss,
        precision=precision,
        tp=tp,
        cluster=cluster,
        say=say,
    )
    print(sheet(found))


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
    schedule: Annotated[
        str | None,
        typer.Option(help="naive, gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v, or a file"),
    ] = None,
    chunks: Annotated[int | None, typer.Option(min=2, help="of a rank: interleaved")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="receives posted ahead")] = None,
    depth: Annotated[
        int | None, typer.Option(min=0, help="more micro-batches in flight: eager-1f1b")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, or mixed: bf16 or fp16")] = "fp32",
    zero: Annotated[int | None, typer.Option(help="0, 1 or 3")] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="all, none, a class of blocks, or blocks; may be repeated"),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="limit of a device, as 24GiB; or of each, with commas")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="rows of the whole batch")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="local:4, 2x8xA100-80GB, or a file; this machine")
    ] = None,
    sequence: Annotated[
        bool, typer.Option("--sequence-parallel", help="with tp: shard tokens between layers too")
    ] = False,
    planner: Annotated[str, typer.Option(help="dynamic, exhaustive or uniform")] = "dynamic",
    loss_over: Annotated[
        str | None, typer.Option(help="rows, or micro-batch: the mean of each one's own loss")
    ] = None,
) -> None:
    """Decide how to split a model; what is not constrained is the planner's choice."""
    from autopipe.garbage import until_exit

    until_exit()
    from autopipe import explain as words
    from autopipe import modelfile
    from autopipe.planning import plan as make_plan
    from autopipe.stopwatch import Stopwatch

    watch = Stopwatch()
    watch.add("started", time.process_time())
    folder = output.resolve().parent
    if not folder.is_dir():
        raise AutopipeError(f"{output} cannot be written: there is no folder {folder}")
    with watch("started"):
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
        chunks=chunks,
        window=window,
        depth=depth,
        precision=precision,
        zero=zero,
        recompute=recompute,
        memory=memory,
        planner=planner,
        sequence_parallel=sequence,
        loss_over=loss_over or file.loss_over,
        source=_relative(model, folder),
        say=say,
        watch=watch,
    )
    with watch("written"):
        made.save(output)
    mesh = made.mesh
    say(
        f"plan: pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}, "
        f"{words.count(made.batch.micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{made.schedule}; predicted step {words.seconds(made.prediction.step_seconds)}, "
        f"{words.count(made.batch.rows, 'row')}"
    )
    say(f"time: {watch}")
    print(output)


@app.command()
def explain(
    plan: PlanArgument,
    html: Annotated[Path | None, typer.Option(help="a page with a picture, too")] = None,
) -> None:
    """Show a plan to a person: stages, timeline, and why it is this one."""
    from autopipe import explain as words

    check_folder(html)
    loaded = Plan.load(plan)
    say_edits(loaded)
    words.console().print(words.explain(loaded))
    if html is not None:
        files.write(words.page(loaded, plan.name), html)
        say(f"{html}: open it in a browser")


@app.command()
def simulate(
    what: Annotated[
        str | None, typer.Argument(help="a plan, a schedule's name or file; every schedule")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="of a pipeline; 4")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="8")] = None,
    chunks: Annotated[int | None, typer.Option(min=2, help="of a rank: interleaved; 2")] = None,
    forward: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="time of a rank's micro-batch; 1")
    ] = None,
    backward: Annotated[float | None, typer.Option(min=0, max=1e9, help="the same; 2")] = None,
    latency: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="of a transfer, one way; 0")
    ] = None,
    wire: Annotated[
        float | None, typer.Option(min=0, max=1e9, help="for which a transfer fills its link; 0")
    ] = None,
    window: Annotated[int | None, typer.Option(min=1, help="receives posted ahead; 2")] = None,
    depth: Annotated[
        int | None, typer.Option(min=0, help="more micro-batches in flight: eager-1f1b; 1")
    ] = None,
    waits: Annotated[bool, typer.Option("--waits", help="draw them, as dots")] = False,
    transfers: Annotated[bool, typer.Option("--transfers", help="draw them")] = False,
    svg: Annotated[Path | None, typer.Option(help="a picture as well")] = None,
) -> None:
    """Draw a step, proved and timed by its longest path; of a plan, the one it predicts."""
    shape = {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "chunks": chunks,
        "forward": forward,
        "backward": backward,
        "latency": latency,
        "wire": wire,
        "window": window,
        "depth": depth,
    }
    from autopipe import picture, sketch
    from autopipe.schedules import SCHEDULES

    asked: dict[str, Any] = {name: value for name, value in shape.items() if value is not None}
    if svg is not None and what is None:
        raise AutopipeError(
            "--svg makes one picture, and no schedule was named",
            hint=f"autopipe simulate 1f1b --svg {svg}",
        )
    check_folder(svg)
    if what is not None:
        sketch.check(what, asked)
    for name in [what] if what is not None else SCHEDULES:
        if name.endswith(".json"):
            loaded = Plan.load(name)
            say_edits(loaded)
            timeline = sketch.of_plan(loaded)
        else:
            timeline = sketch.of_schedule(name, sketch.Shape(**asked))
        print(sketch.describe(name, timeline, waits=waits, transfers=transfers), end="\n\n")
        if svg is not None:
            files.write(picture.svg(timeline, Path(name).name), svg)


@app.command()
def run(
    plan: PlanArgument,
    local: Annotated[int | None, typer.Option(min=1, help="start so many processes here")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="as long as the batches last")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="of the batches; 1")] = None,
    seed: Annotated[int, typer.Option(help="of the weights, the dropout and the batches")] = 0,
    weights: Annotated[Path | None, typer.Option(help="a checkpoint to start from")] = None,
    model: Annotated[str | None, typer.Option(help="the model file, if it has moved")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="through torch.compile")] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="shards of ZeRO-3 to the host")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="a file for ui.perfetto.dev")] = None,
    log_every: Annotated[int | None, typer.Option(min=1, help="steps to a line")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress and no table")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="even if the loss is nan or infinite")
    ] = False,
) -> None:
    """Train as planned: under torchrun, under srun, or with --local N processes started here."""
    world = launch.world_from(os.environ)
    with voice.one_voice(world, debug=_debug()):
        loaded = Plan.load(plan)
        check_folder(trace)
        source = model or _found(loaded, plan, "run")
        if local is not None:
            launch.check_world(launch.World(0, local, 0, local, 0, "", 0), len(loaded.mesh.places))
        elif world is not None or len(loaded.mesh.places) > 1:
            alone = launch.World(0, 1, 0, 1, 0, "", 0)
            launch.check_world(world or alone, len(loaded.mesh.places))
        if local is not None and local > 1 and world is None:
            raise typer.Exit(launch.spawn(local, sys.argv[1:]))
        if world is None or world.rank == 0:
            say_edits(loaded)
        _train(
            loaded,
            source,
            {"seed": seed, "weights": weights, "compile": compile, "offload": offload},
            steps,
            seed,
            trace,
            epochs=epochs,
            log_every=log_every,
            quiet=quiet,
            keep_going=keep_going,
        )


@app.command()
def emit(
    plan: PlanArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="a folder")],
    force: Annotated[bool, typer.Option("--force", help="replace the folder, whole")] = False,
    model: Annotated[str | None, typer.Option(help="the model file, if it has moved")] = None,
) -> None:
    """Write what a plan runs as Python to read, edit and run: stages, programs, train.py."""
    from autopipe import modelfile
    from autopipe.emit import emit as write

    loaded = Plan.load(plan)
    source = model or _found(loaded, plan, "emit")
    file = modelfile.load(source)
    there = _relative(source, output.resolve())
    write(file.model, loaded, output, loss=file.loss, source=there, force=force)
    processes = len(loaded.mesh.places)
    say(f"run it: torchrun --nproc-per-node {processes} {output / 'train.py'}")
    print(output)


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


def _train(
    plan: Plan,
    source: str,
    made: dict[str, Any],
    steps: int | None,
    seed: int,
    trace: Path | None,
    **how: Any,
) -> None:
    """Train; `made` are options of `parallelize`, `how` those of `train`."""
    from autopipe import modelfile
    from autopipe.parallel import parallelize
    from autopipe.runtime.train import train

    file = modelfile.load(source)
    pipe = parallelize(file.model, plan, loss=file.loss, **made)
    if pipe.place.rank == 0:
        for line in file.since_planning(plan):
            say(line)
    measured = train(pipe, file, steps, seed, say, trace, **how)
    if pipe.place.rank == 0:
        report(plan, measured, source, trace, quiet=how["quiet"])


def report(
    plan: Plan, measured: Measured, source: str, trace: Path | None = None, *, quiet: bool = False
) -> None:
    """Say what a run has measured, beside what was planned, and print its losses."""
    from autopipe import explain as words
    from autopipe.runtime.train import figure

    if not measured.stages:
        say(f"{source}: batches({plan.batch.rows}) gave no batch, so there was no step")
        return
    if not quiet:
        table = words.compare(
            [stage.predicted for stage in plan.stages],
            measured.stages,
            plan.prediction.step_seconds,
            measured.step_seconds,
            measured.bubbles,
        )
        words.console().print(table)
    if trace is not None:
        say(f"{trace}: open it at https://ui.perfetto.dev")
    print(f"loss {figure(measured.losses[0])} -> {figure(measured.losses[-1])}", flush=True)


def say_edits(plan: Plan) -> None:
    """Say so if a plan was changed by hand."""
    edits = on_edits(plan)
    if edits is not None:
        say(edits)


def check_folder(file: Path | None) -> None:
    """Refuse a file that is to be written in the end where there is no folder for it.

    Raises:
        AutopipeError: names the folder.
    """
    if file is not None and not file.resolve().parent.is_dir():
        raise AutopipeError(f"{file} cannot be written: there is no folder {file.resolve().parent}")


def _relative(source: str, folder: Path) -> str:
    """A model file's path as the plan keeps it: from the plan's own folder."""
    if ":" in source and not Path(source).exists():
        return source
    return os.path.relpath(Path(source).resolve(), folder)


def _found(plan: Plan, path: Path, command: str) -> str:
    """The plan's model file, from the plan's own folder."""
    if plan.source is None:
        raise PlanError(
            f"plan.source: {path} does not say where its model is",
            hint=f"autopipe {command} {path} --model FILE",
        )
    if ":" in plan.source:
        return plan.source
    source = path.resolve().parent / plan.source
    if not source.is_file():
        raise ModelError(
            f"plan.source: there is no model file {plan.source!r} in the folder of {path}",
            hint=f"autopipe {command} {path} --model FILE",
        )
    return str(source)


def main() -> None:
    """The entry point: errors of the user's as sentences, exit code 2, no traceback."""
    _call(app, "autopipe")


def program(function: Callable[..., None]) -> None:
    """Run a function as the program of every rank; its arguments are the options.

    Its errors are told as those of `autopipe run`.
    """

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> None:
        with voice.one_voice(launch.world_from(os.environ), debug=_debug()):
            function(*args, **kwargs)

    own = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    own.command()(told)
    _call(own, Path(sys.argv[0]).name)


def _call(command: typer.Typer, name: str) -> None:
    try:
        arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
        command(args=arguments, prog_name=name)
    except AutopipeError as error:
        if _debug():
            traceback.print_exc()
        say(f"error: {voice.who()}{error.message}")
        if error.hint is not None:
            say(f"\nhint: {error.hint}")
        sys.exit(voice.code(error))
    except KeyboardInterrupt as error:
        watchdog.verdict(error)
        sys.exit(130)
    except Exception as error:  # whatever else: not a user's mistake
        if _debug():
            raise
        found = watchdog.verdict(error)  # it has the rank, the step and the instruction
        what = found.text if found is not None else f"{voice.who()}{sentence(error)}"
        say(f"error: {what}\n\nhint: --debug shows where")
        sys.exit(voice.code(error))


def _debug() -> bool:
    return "--debug" in sys.argv
