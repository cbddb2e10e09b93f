"""The command `autopipe check`: a plan or a model file -> whether its split trains as the model."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal import console
from autopipe.terminal.commands import Json, command
from autopipe.terminal.console import say
from autopipe.terminal.paths import model_source, say_edits, standing
from autopipe.util.gc_pause import loading

if TYPE_CHECKING:
    from autopipe.checking.comparison import Comparison


@command("autopipe check model.py --pp 2")
def check(
    what: Annotated[
        str, typer.Argument(help="a plan file, or model.py, or package.module:factory")
    ],
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages; 2.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel degree; 1.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel replicas; 1.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Equal parts of a replica's rows in a step.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="As `plan` has it.")] = None,
    chunks: Annotated[int | None, typer.Option(min=2, help="As `plan` has it.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="As `plan` has it; of a plan, another than its own: fp32 is the closest."
        ),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="As `plan` has it.")
    ] = None,
    fuse_attention: Annotated[
        bool | None, typer.Option("--fuse-attention/--no-fuse-attention", help="As `plan` has it.")
    ] = None,
    zero: Annotated[int | None, typer.Option(help="As `plan` has it.")] = None,
    transfers: Annotated[str | None, typer.Option(help="As `plan` has it.")] = None,
    turns: Annotated[str | None, typer.Option(help="As `plan` has it.")] = None,
    recompute: Annotated[list[str] | None, typer.Option(help="As `plan` has it.")] = None,
    offload: Annotated[list[str] | None, typer.Option(help="As `plan` has it.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of the whole batch.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Plan for this cluster, and check that plan.")
    ] = None,
    loss_parts: Annotated[str | None, typer.Option(help="As `plan` has it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model file of a plan, if it has moved.")
    ] = None,
    json: Json = False,
) -> None:
    """Train two steps of the split model on this CPU, and compare them with the unsplit one.

    Loss, every gradient, the clipped norm, buffers and parameters, of every rank, beside plain
    PyTorch in one process, which runs the model file's own module, loss and optimizer. A model or a
    mesh that is too large is made smaller, and what was is said. Ends with code 1 if they differ,
    and names the first differing node.
    """
    from autopipe.planfile.contents import names_plan

    if Path(what).is_dir():
        _as_rank(Path(what))
        return
    degrees = {"pp": pp, "tp": tp, "dp": dp, "micro_batches": micro_batches}
    values = {
        "schedule": schedule,
        "chunks": chunks,
        "precision": precision,
        "compile": compile,
        "fuse_attention": fuse_attention,
        "zero": zero,
        "transfers": transfers,
        "turns": turns,
        "recompute": recompute,
        "offload": offload,
        "loss_parts": loss_parts,
    }
    given = {name: value for name, value in values.items() if value is not None}
    sizes = {name: value for name, value in degrees.items() if value is not None}
    if names_plan(what):
        options = sizes | given | {"batch": batch, "cluster": cluster}
        asked = (name for name, value in options.items() if value is not None)
        others = [name for name in asked if name != "precision"]
        result = _of_plan(what, model, precision, others)
    elif model is not None:
        raise AutopipeError(
            f"--model {model} is for a plan whose model file has moved, and {what} is no plan",
            hint=f"autopipe check {shlex.quote(model)}",
        )
    else:
        result = _of_model(standing(what), cluster, batch, sizes, given)
    if json:
        console.show(result.as_data())
    else:
        _print(result)
    if not result.right:
        raise typer.Exit(2 if result.refused else 1)


def _as_rank(folder: Path) -> None:
    """Be a rank of the check that is described in `folder`."""
    from autopipe.runtime.launch import voice
    from autopipe.runtime.launch import world as launch

    world = launch.world_from(os.environ)
    if world is None or not (folder / "subject.json").is_file():
        from autopipe.frontend import hf_folder

        ways = "autopipe check plan.json, or autopipe check model.py"
        raise AutopipeError(f"{folder} is a folder", hint=hf_folder.hint_for(folder) or ways)
    # With --json the command that has started the rank prints an object to the same stdout.
    with voice.one_voice(world, debug=console.debug()), console.data_alone():
        with loading():
            from autopipe.checking.split import run_rank
        run_rank(folder)


def _of_plan(path: str, model: str | None, precision: str | None, others: list[str]) -> Comparison:
    from autopipe.planfile.contents import Plan

    if others:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise AutopipeError(
            f"{path} is a plan, which decides how to split, and {words} was given as well",
            hint=f"autopipe check {shlex.quote(path)}; or plan again with {words}",
        )
    loaded = Plan.load(path)
    say_edits(loaded)
    source = standing(model) if model else model_source(loaded, Path(path), "check")
    with loading():
        from autopipe.checking.check import check_plan

    return check_plan(loaded, source, say, precision, started)


def started(ranks: int, argv: Sequence[str]) -> int:
    """Start the ranks of a check, which show where an error arose if this process does."""
    from autopipe.runtime.launch.spawn import spawn

    return spawn(ranks, [*argv, "--debug"] if console.debug() else argv)


def _of_model(
    source: str,
    cluster: str | None,
    batch: int | None,
    sizes: dict[str, int],
    words: dict[str, Any],
) -> Comparison:
    with loading():
        from autopipe.checking.check import check_model, check_plan
        from autopipe.checking.fit import usual_degrees
        from autopipe.frontend import model_file
        from autopipe.planners.driver.arguments import turns_of
        from autopipe.planners.driver.make_plan import plan as make_plan

    if ranks_of_stages := turns_of(words.get("turns")):
        sizes, words = {"pp": sum(ranks_of_stages), **sizes}, {**words, "turns": ranks_of_stages}
    file = model_file.load(source)
    rows = batch or file.batch_size
    if cluster is None or cluster.startswith(("local:", "cpu:")):
        return check_model(source, usual_degrees(sizes, cluster, rows, words), words, say, started)
    options: dict[str, Any] = {**sizes, **words}
    planned = make_plan(
        file.model,
        file.inputs,
        loss=file.loss,
        optimizer=file.optimizer or "adamw",
        cluster=cluster,
        batch_size=rows,
        loss_over=file.loss_over,
        lengths=file.lengths,
        say=say,
        **options,
    )
    return check_plan(planned, source, say, start=started)


def _print(result: Comparison) -> None:
    """The table, what was reduced, and the sentence."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from autopipe.checking.comparison import share
    from autopipe.util.numbers import count

    mesh, batch = result.plan.mesh, result.plan.batch
    out = Console(highlight=False)
    zero = f", ZeRO-{result.plan.zero}" if result.plan.zero else ""
    compiled = ", compiled" if result.plan.compiled else ""
    out.print(
        f"pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}, "
        f"{count(batch.micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{result.plan.schedule}, {result.plan.precision}{zero}{compiled}; "
        f"{count(batch.rows, 'row')}"
    )
    if result.again:
        out.print(f"run a second time in backward: {'; '.join(result.again)}")
    for line in result.reduced:
        out.print(f"reduced: {line}")
    for line in result.notes:
        out.print(line)
    if result.rows:
        table = Table(box=SIMPLE, pad_edge=False)
        for name in ("step", "what", "tensors", "equal", "off", "allowed", "furthest off"):
            plain = name in ("what", "furthest off")
            table.add_column(name, justify="left" if plain else "right")
        for row in result.rows:
            off = share(row.off) if math.isfinite(row.off) else "all"
            cells = [row.step, row.what, row.tensors, row.equal, off, share(row.allowed)]
            style = "bold red" if row.wrong else None
            table.add_row(*map(str, cells), row.furthest, style=style)
        out.print(table)
    print(result.sentence)
