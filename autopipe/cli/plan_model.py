"""The command `autopipe plan`: a model file and constraints -> a plan file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autopipe.errors import AutopipeError
from autopipe.planfile.contents import Plan
from autopipe.terminal import console
from autopipe.terminal.commands import Json, ModelArgument, command
from autopipe.terminal.console import say
from autopipe.terminal.contract import CONTRACT
from autopipe.terminal.paths import as_asked, check_file, relative
from autopipe.util import numbers
from autopipe.util.gc_pause import until_exit
from autopipe.util.progress import phase
from autopipe.util.stopwatch import Stopwatch

Output = Annotated[Path, typer.Option("-o", "--output", help="The plan file to write.")]


@dataclass(frozen=True)
class PlanOptions:
    """Arguments of `autopipe.plan` that a user may give, by their names there."""

    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor-parallel degree: ranks that share each matrix."),
    ] = None
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel replicas.")] = None
    micro_batches: Annotated[
        int | None, typer.Option(min=1, help="Equal parts of a replica's rows in a step.")
    ] = None
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows of a micro-batch, instead of --micro-batches.")
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(help="naive, gpipe, 1f1b, eager-1f1b, interleaved, zb-h1, zb-v, or a file."),
    ] = None
    chunks: Annotated[
        int | None, typer.Option(min=2, help="Stages on each rank, for interleaved.")
    ] = None
    window: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches that a stage lets its sender send ahead of need."),
    ] = None
    depth: Annotated[
        int | None,
        typer.Option(min=0, help="Micro-batches in flight beyond 1f1b's, for eager-1f1b."),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32; bf16, fp16: with fp32 master weights; bf16-autocast, fp16-autocast. "
            "Default: bf16 on GPUs that have it."
        ),
    ] = None
    grad_dtype: Annotated[
        str | None,
        typer.Option(help="What bf16 or fp16 sums gradients in: fp32, the default, or itself."),
    ] = None
    optimizer_dtype: Annotated[
        str | None,
        typer.Option(help="fp32 master weights, the default; or bf16, fp16: without them."),
    ] = None
    compile: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile",
            help="Fuse memory-bound ops by torch.compile, and keep less for backward. "
            "Default: on GPUs.",
        ),
    ] = None
    fuse_attention: Annotated[
        bool | None,
        typer.Option(
            "--fuse-attention/--no-fuse-attention",
            help="Run each attention that the model writes out as one op. Default: with --compile.",
        ),
    ] = None
    zero: Annotated[
        int | None,
        typer.Option(
            help="What replicas shard: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters too."
        ),
    ] = None
    transfers: Annotated[
        str | None,
        typer.Option(
            help="With tp, what goes to a later stage: whole from each rank, or parts that the "
            "receivers gather. Default: the faster."
        ),
    ] = None
    turns: Annotated[
        str | None,
        typer.Option(
            help="The number of ranks that take turns at each stage, as 1,2,1; or off: one each. "
            "Default: what is faster."
        ),
    ] = None
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            help="Run again in backward: all, none, a class of blocks, or a block; or of every "
            "block attention, norms, activations, elementwise or gathers; or an op by a node's "
            "name. May be repeated."
        ),
    ] = None
    offload: Annotated[
        list[str] | None,
        typer.Option(
            help="Keep what backward needs in the host's memory: off (the default), auto, all, a "
            "class of blocks, or a block. May be repeated."
        ),
    ] = None
    memory: Annotated[
        str | None, typer.Option(help="Limit of every device, as 24GiB; or of each, with commas.")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option("--batch", min=1, help="Rows of the whole batch.")
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            help="local:4, cpu:4 (processes on this machine's processor), 2x8xA100-80GB, or a "
            "file. Default: this machine."
        ),
    ] = None
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="With tp: also consider shards of the tokens between layers.",
        ),
    ] = True
    planner: Annotated[
        str,
        typer.Option(
            help="How to cut: dynamic (the fastest), exhaustive (the same, by trying all) or "
            "uniform (equally many blocks a stage, as Megatron-LM)."
        ),
    ] = "dynamic"
    loss_over: Annotated[
        str | None,
        typer.Option(
            help="rows; micro-batch: the mean of each micro-batch's own loss; or batch: the loss "
            "of all rows together (in-batch negatives), in two passes."
        ),
    ] = None
    lengths: Annotated[
        str | None,
        typer.Option(help="Tokens of a row that batches will have: 128,256,512. Default: inputs'."),
    ] = None
    loss_parts: Annotated[
        str | None,
        typer.Option(
            help="Compute the loss from parts of the vocabulary: auto, off, or their number."
        ),
    ] = None


@command("autopipe plan model.py --cluster 2x8xA100-80GB", more=CONTRACT)
def plan(
    model: ModelArgument,
    *,
    output: Output = Path("plan.json"),
    options: PlanOptions,
    json: Json = False,
) -> None:
    """Decide how to split a model; what is not constrained is the planner's choice.

    --json gives the file's name, the seconds that planning took by what they were spent on, and
    the figures that `autopipe explain --json` gives.
    """
    until_exit()
    for read in (model, options.cluster, options.schedule):
        check_file(output, read)
    source = relative(model, output.resolve().parent)
    watch = Stopwatch()
    watch.add("started", time.process_time())
    with watch("started"), phase("starting"):
        from autopipe.frontend import model_file
        from autopipe.planners.driver.make_plan import plan as make_plan
        from autopipe.report import as_json, facts, spending

        file = model_file.load(model)
    asked = vars(options) | {
        "batch_size": options.batch_size or file.batch_size,
        "loss_over": options.loss_over or file.loss_over,
        "lengths": _numbers(options.lengths) if options.lengths else file.lengths,
    }
    made = make_plan(
        file.model,
        file.inputs,
        loss=file.loss,
        optimizer=file.optimizer or "adamw",
        source=source,
        say=say,
        watch=watch,
        **asked,
    )
    with watch("written"):
        made.save(as_asked(output))
    say(_one_line(made))
    if spending.speed(made):
        say(f"speed: {spending.speed(made)}")
    if facts.idle(made) is not None:
        say(f"idle: {facts.idle(made)}\nwhy: {made.planner.binding}")
    say(f"time: {watch}")
    took = {"file": str(output), "took": dict(watch.seconds)}
    if json:
        console.show(took | {"figures": as_json.of_plan(made)})
    else:
        print(output)


def _one_line(made: Plan) -> str:
    """A plan in a line."""
    mesh = made.mesh
    zero = f" zero={made.zero}" if made.zero_at_work else ""
    return (
        f"plan: pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}{zero}, "
        f"{numbers.count(made.batch.micro_batches, 'micro-batch', 'micro-batches')}, "
        f"{made.schedule}; predicted step {numbers.seconds(made.prediction.step_seconds)}, "
        f"{numbers.count(made.batch.rows, 'row')}"
    )


def _numbers(text: str) -> list[int]:
    """The numbers in `128,256,512`.

    Raises:
        AutopipeError: there is something else.
    """
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise AutopipeError(
            f"--lengths {text}: expected numbers of tokens", hint="--lengths 128,256,512"
        )
    return [int(part) for part in text.split(",")]
