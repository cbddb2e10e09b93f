"""The command `autopipe checkpoint`: what one has, whether two are the same, and exports."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopipe.errors import AutopipeError, CheckpointError, DamagedError
from autopipe.terminal import console
from autopipe.terminal.commands import Json, command
from autopipe.terminal.console import say, tell
from autopipe.util import atomic_file, numbers
from autopipe.util.gc_pause import loading

if TYPE_CHECKING:  # it imports torch, which `--help` has no use for
    import torch

    from autopipe.runtime.checkpoint.stored import Stored

SHOWN = 20
"""How many differences of two checkpoints are printed at most."""


class Action(enum.StrEnum):
    """What to do."""

    info = "info"
    verify = "verify"
    convert = "convert"


_TAKES = {
    Action.info: {"json"},
    Action.verify: {"other"},
    Action.convert: {"output", "config", "dtype", "dcp"},
}
"""The arguments and options that each action takes, beside a folder."""


@command("autopipe checkpoint info checkpoints")
def checkpoint(
    action: Annotated[Action, typer.Argument(help="info, verify or convert")],
    folder: Annotated[Path, typer.Argument(help="a checkpoint, or a folder of them: its newest")],
    other: Annotated[
        Path | None, typer.Argument(help="verify: the one that it is to be the same as")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="convert: FILE.safetensors, or a folder.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="convert: the folder of transformers that the model came from."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="convert: of the weights; as they are. bfloat16, ...")
    ] = None,
    dcp: Annotated[
        bool, typer.Option("--dcp", help="convert: a folder of torch.distributed.checkpoint.")
    ] = False,
    json: Json = False,
) -> None:
    """Look at checkpoints, compare two, or write one's model for others to load.

    \b
    info     its step, plan and sizes
    verify   every checksum of one; or whether two, of whatever plans, are
             the same to the bit
    convert  the model as one safetensors file; with --config as a folder for
             transformers; with --dcp as one of torch.distributed.checkpoint
    """
    words = {"other": other, "output": output, "config": config, "dtype": dtype, "dcp": dcp}
    words |= {"json": json}
    _check_words(action, {name for name, value in words.items() if value})
    stored = _newest(folder)
    with _one_before(folder):
        if action is Action.info:
            _info(stored, json)
        elif action is Action.verify:
            _verify(stored, other)
        else:
            _convert(stored, output, config, dtype, dcp=dcp)


def _convert(
    stored: Stored, output: Path | None, config: Path | None, dtype: str | None, *, dcp: bool
) -> None:
    from autopipe.runtime.checkpoint import convert
    from autopipe.runtime.checkpoint.manifest import FLOATS

    if output is None:
        raise AutopipeError(
            "convert: the output has no name",
            hint="-o model.safetensors; or -o folder --config FOLDER, for transformers; or "
            "-o folder --dcp",
        )
    if dtype is not None and dtype not in FLOATS:
        raise AutopipeError(
            f"--dtype {dtype}: weights have no such dtype", hint=f"one of {', '.join(FLOATS)}"
        )
    wanted = FLOATS[dtype] if dtype is not None else None
    if dcp and config is not None:
        raise AutopipeError(
            "convert: --dcp and --config write two different kinds of folders",
            hint="give one of them; a second call writes the other folder",
        )
    if output.suffix == ".safetensors":
        if dcp or config is not None:
            of = "--dcp" if dcp else f"--config {config}"
            raise AutopipeError(
                f"convert: {output} is one file, and {of.split()[0]} writes a folder",
                hint=f"-o FOLDER {of}",
            )
        atomic_file.check_model(output)
        convert.to_file(stored, output, wanted)
    elif dcp:
        from autopipe.runtime.checkpoint.convert_distributed import to_distributed

        atomic_file.check_new_folder(output, "-o")
        to_distributed(stored, output, wanted)
    elif config is None:
        raise AutopipeError(
            f"convert: {output} is a folder, and transformers needs a config.json in it",
            hint=f"--config FOLDER that the model came from; or --dcp; or -o {output}.safetensors",
        )
    else:
        _to_transformers(stored, output, config, wanted)
    print(output)


def _to_transformers(stored: Stored, output: Path, config: Path, dtype: torch.dtype | None) -> None:
    from autopipe.runtime.checkpoint import convert

    unknown = convert.strangers(stored, config)
    convert.to_folder(stored, output, config, dtype)
    if unknown:
        more = f", nor {len(unknown) - 1} more of the names" if unknown[1:] else ", a name"
        tell(
            f"warning: {config}'s weights have no {unknown[0]!r}{more} in {output}: transformers "
            "leaves out what its class has not, and initialises what it misses; LoRA is to be "
            "merged first, from -o FILE.safetensors; experts that it stacks as it reads need "
            "nothing"
        )


def _check_words(action: Action, given: set[str]) -> None:
    for name in sorted(given - _TAKES[action]):
        of = next(other for other, taken in _TAKES.items() if name in taken)
        what = "a second checkpoint" if name == "other" else f"--{name}"
        raise AutopipeError(
            f"{action} has no use for {what}", hint=f"autopipe checkpoint {of} takes it"
        )


def _newest(folder: Path) -> Stored:
    """The checkpoint at a path, or the newest one in it."""
    with loading():
        from autopipe.runtime.checkpoint.folder import candidates
        from autopipe.runtime.checkpoint.stored import Stored

    found = candidates(folder)
    if not found:
        missing = f"{folder} is a file" if folder.is_file() else f"there is no folder {folder}"
        raise CheckpointError(
            f"{folder} has no checkpoint" if folder.is_dir() else missing,
            hint="a checkpoint is a folder step-NNNNNNNN, as --checkpoints writes it",
        )
    with _one_before(folder):
        return Stored.open(found[0])


@contextmanager
def _one_before(folder: Path) -> Iterator[None]:
    """Where the newest checkpoint of a folder is damaged, the hint names an earlier one."""
    try:
        yield
    except DamagedError as error:
        from autopipe.runtime.checkpoint.folder import candidates

        newest, *earlier = candidates(folder)
        if error.hint is None and earlier and str(newest) in error.message:
            error.hint = (
                f"{earlier[0]} is the one before it, which `run --resume` uses if it is whole"
            )
        raise


def _info(stored: Stored, json: bool) -> None:
    from autopipe.runtime.checkpoint.folder import PLAN

    facts = _facts(stored)
    if json:
        console.show(facts)
        return
    for name, value in facts.items():
        shown = numbers.memory(value) if name.endswith("bytes") else f"{value}"
        if value is None:
            shown = f"not known: {stored.folder / PLAN} is gone"
        print(f"{name.replace('_', ' '):16} {shown}")


def _facts(stored: Stored) -> dict[str, Any]:
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.checkpoint.folder import PLAN
    from autopipe.runtime.checkpoint.layout import REPLICA
    from autopipe.runtime.checkpoint.optimizer import kind_of
    from autopipe.runtime.checkpoint.whole import tensors

    path = stored.folder / PLAN
    plan = Plan.load(path) if path.exists() else None  # its tensors are there all the same
    every = tensors(stored)
    model = [tensor for tensor in every if not tensor.state]
    made_by = None
    if plan is not None:
        mesh = plan.mesh
        made_by = f"tp {mesh.tp} x pp {mesh.pp} x dp {mesh.dp}, ZeRO-{plan.zero}, {plan.schedule}"
    return {
        "folder": str(stored.folder),
        "step": stored.step,
        "plan": made_by,
        "precision": plan.precision if plan is not None else None,
        "ranks": len(stored.manifests),
        "tensors": len(model),
        "model_bytes": sum(tensor.bytes for tensor in model),
        "optimizer": kind_of(stored),
        "optimizer_bytes": sum(t.bytes for t in every if t.state and t.kind != REPLICA),
    }


def _verify(stored: Stored, other: Path | None) -> None:
    from autopipe.runtime.checkpoint.compare import differences

    if other is None:
        stored.check()
        print(f"{stored.folder}: whole, every checksum is right")
        return
    second = _newest(other)
    lines = list(differences(stored, second))
    for line in lines[:SHOWN]:
        print(line)
    if len(lines) > SHOWN:
        say(f"and {len(lines) - SHOWN} more")
    if lines:
        raise typer.Exit(1)
    print(f"{stored.folder} and {second.folder} are the same to the bit")
