"""The command `autopipe export`: a plan file -> a script, a manifest, another runtime's words."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autopipe.errors import AutopipeError
from autopipe.terminal.commands import PlanArgument, app, command
from autopipe.terminal.console import say, tell
from autopipe.terminal.option_groups import given
from autopipe.terminal.paths import as_asked, check_file, check_folder, model_source, say_edits
from autopipe.util.numbers import count


@dataclass(frozen=True)
class JobOptions:
    """The words of a job for a launcher (`export.words.Words`), as they are typed."""

    name: Annotated[str | None, typer.Option(help="The job's name.")] = None
    checkpoints: Annotated[
        str | None, typer.Option(help="Folder of checkpoints: save before the end, and resume.")
    ] = None
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Steps from one checkpoint to the next.")
    ] = None
    keep: Annotated[int | None, typer.Option(min=1, help="Checkpoints to keep.")] = None
    time: Annotated[
        str | None, typer.Option(help="The time limit: minutes, HH:MM:SS or D-HH:MM:SS.")
    ] = None
    image: Annotated[str | None, typer.Option(help="The container image.")] = None
    interface: Annotated[
        str | None, typer.Option(help="The network interface towards the other nodes.")
    ] = None
    hosts: Annotated[
        str | None, typer.Option(help="The host name of each node, separated by commas.")
    ] = None
    port: Annotated[int | None, typer.Option(min=1, help="Where rank 0 listens.")] = None
    restarts: Annotated[
        int | None, typer.Option(min=0, help="Times to start ranks again after a failure; 3.")
    ] = None
    venv: Annotated[str | None, typer.Option(help="A Python environment to activate.")] = None
    style: Annotated[
        str | None, typer.Option(help="Slurm: a task a rank (srun), or torchrun on each node.")
    ] = None
    array: Annotated[
        str | None,
        typer.Option(help="Slurm: a run for each of these numbers, which is its seed: 0-9%2."),
    ] = None
    partition: Annotated[str | None, typer.Option(help="Slurm's.")] = None
    account: Annotated[str | None, typer.Option(help="Slurm's.")] = None
    qos: Annotated[str | None, typer.Option(help="Slurm's.")] = None
    constraint: Annotated[str | None, typer.Option(help="Slurm's.")] = None
    cpus: Annotated[
        int | None, typer.Option(min=1, help="CPUs of a task of Slurm's, or of a container.")
    ] = None
    memory: Annotated[
        str | None, typer.Option(help="Memory of a node, or of its container: 64Gi.")
    ] = None
    namespace: Annotated[str | None, typer.Option(help="Kubernetes'.")] = None
    claim: Annotated[
        str | None, typer.Option(help="Kubernetes: a volume that all pods mount at --folder.")
    ] = None
    folder: Annotated[
        str | None, typer.Option(help="The folder of the plan in containers; /workspace.")
    ] = None


@dataclass(frozen=True)
class OnnxOptions:
    """What is asked of the models for onnxruntime."""

    rows: Annotated[
        int | None, typer.Option(min=1, help="onnx: rows of every input; a micro-batch's.")
    ] = None
    weights: Annotated[
        Path | None, typer.Option(help="onnx: a checkpoint to read; else the model's own.")
    ] = None


Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="The file to write; else stdout.")
]


@command("autopipe export plan.json --to slurm -o train.sbatch")
def export(
    plan: PlanArgument,
    to: Annotated[str, typer.Option("--to", help="torchrun, slurm, kubeflow, megatron, ...")],
    run: Annotated[
        list[str] | None,
        typer.Argument(help="options of `autopipe run` for each rank, after --"),
    ] = None,
    *,
    output: Output = None,
    job: JobOptions,
    onnx: OnnxOptions,
) -> None:
    """Write what starts a plan elsewhere, or what another runtime calls it.

    torchrun, slurm, kubeflow, pytorchjob and jobset start `autopipe run`; megatron, torchtitan,
    deepspeed, transformers, accelerate, pipelining and flagscale get the plan in their own words,
    and what they have no words for is listed. onnx writes a folder: each stage as a model for
    onnxruntime, in evaluation, and chain.json with the names that pass between them.
    """
    from autopipe.export.targets import LAUNCHERS
    from autopipe.interop.targets import RUNTIMES
    from autopipe.planfile.contents import Plan

    known = [*LAUNCHERS, *RUNTIMES, ONNX]
    if to not in known:
        raise AutopipeError(
            f"--to: expected one of {', '.join(known)}, found {to!r}",
            hint=f"autopipe export {shlex.quote(str(plan))} --to torchrun",
        )
    if to not in LAUNCHERS:
        _refuse(to, "launchers", given(job) | ({"run": run} if run else {}))
    if to != ONNX:
        _refuse(to, ONNX, given(onnx))
    else:
        return _stages(plan, output, onnx)
    check_file(output, plan)
    loaded = Plan.load(plan)
    say_edits(loaded)
    if to in LAUNCHERS:
        text, program = _launched(loaded, to, plan, given(job), run or []), LAUNCHERS[to].program
    else:
        exported = RUNTIMES[to](loaded)
        text, program = exported.text, False
        for line in exported.unsupported:
            tell(f"{to} cannot say: {line}")
    if output is None:
        print(text, end="")
        return
    _write(text, output, program)
    say(f"{output}: for {to}")


def _refuse(to: str, others: str, options: dict[str, Any]) -> None:
    """Refuse options that only other targets take.

    Raises:
        AutopipeError: names the first of them.
    """
    for name in options:
        raise AutopipeError(f"{_dashed(name)} is for {others}, and {to} is none")


ONNX = "onnx"
"""The one target that is made of the model, and not of the plan alone."""


def _stages(path: Path, folder: Path | None, onnx: OnnxOptions) -> None:
    from autopipe.planfile.contents import Plan

    if folder is None:
        raise AutopipeError("onnx is a folder of files", hint=f"--to {ONNX} -o FOLDER")
    check_folder(folder)
    plan = Plan.load(path)
    source = model_source(plan, path, "export")
    from autopipe.frontend import model_file
    from autopipe.runtime.onnx_stages import write_stages

    batch = plan.batch
    usual = batch.rows // plan.mesh.dp // batch.micro_batches
    rows = onnx.rows or usual
    file = model_file.load(source)
    weights = onnx.weights and as_asked(onnx.weights)
    write_stages(file, plan, as_asked(folder), rows=rows, weights=weights)
    say(f"{folder}: {count(len(plan.stages), 'stage')} and chain.json, for onnxruntime")


def _launched(plan: Any, to: str, path: Path, words: dict[str, Any], run: list[str]) -> str:
    """The text for a launcher."""
    from autopipe.export import targets
    from autopipe.export.words import Words, seconds_of

    _check_run(path, run)
    if "time" in words:
        words["time_limit"] = seconds_of(words.pop("time"))
    if "hosts" in words:
        words["hosts"] = tuple(words["hosts"].split(","))
    return targets.export(plan, to, str(path), Words(**words, run=tuple(run)))


def _check_run(path: Path, run: list[str]) -> None:
    """Refuse options that `autopipe run` would refuse on the nodes.

    Raises:
        AutopipeError: two ways of starting; or the parser's own error.
    """
    if "--local" in run or any(word.startswith("--local=") for word in run):
        raise AutopipeError("--local starts processes itself, and here the launcher does")
    parser: Any = typer.main.get_command(app)
    parser.commands["run"].make_context("autopipe run", [str(path), *run])


def _dashed(name: str) -> str:
    return "what follows --" if name == "run" else f"--{name.replace('_', '-')}"


def _write(text: str, path: Path, program: bool) -> None:
    from autopipe.util import atomic_file

    atomic_file.write(text, path)
    if program:
        os.chmod(path, path.stat().st_mode | 0o111)
