"""Reads an emitted folder: its stages as modules to run, its programs parsed and proved.

    stage_0.py    class Stage0  --on meta-->  the model's parameters?  -->  the rank's own in them
    programs.txt  rank 0: ...   --parse---->  whole? proved?           -->  what each rank runs

Edited files run as they are. Refused are parameters that are not the model's, and programs that
lack a transfer or wait for each other.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from autopipe.emit.retrace import graph_of
from autopipe.errors import AutopipeError, PlanError, ScheduleError
from autopipe.frontend import user_lines
from autopipe.ir.graph import Ref, TensorSpec
from autopipe.ir.torch_private import in_graph_module
from autopipe.planfile import programs as of_plan
from autopipe.planfile.contents import Plan, stage_file
from autopipe.runtime.launch.words import is_echo
from autopipe.schedules import deadlock
from autopipe.schedules.instructions import COMPUTE, Programs, format_programs, parse_programs
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.lower import Lowered
from autopipe.util import dtypes


@dataclass(frozen=True)
class Emitted:
    """A folder of `autopipe emit`, as it is now.

    Attributes:
        plan: the one given; its schedule is that of the folder's programs.
        compute: the programs of a step without transfers, as `planfile.programs.compute`.
        programs: a step's, with transfers: one per rank of a pipeline, proved.
    """

    folder: Path
    plan: Plan
    compute: Programs
    programs: Programs

    @classmethod
    def load(cls, folder: str | Path, plan: Plan) -> Emitted:
        """Read the folder's programs.

        Raises:
            PlanError: the folder is incomplete, or of another plan.
            ScheduleError: the programs are for another pipeline, lack an instruction, or would
                wait for each other.
        """
        folder = Path(folder)
        emitted_plan = Plan.load(folder / "plan.json")
        if replace(emitted_plan, source=None) != replace(plan, source=None):
            raise PlanError(
                f"{folder} was emitted from another plan than the one given",
                hint=f"give the plan in {folder / 'plan.json'}, or emit again",
            )
        path = folder / "programs.txt"
        lines = [line.partition("#")[0] for line in _read(path).splitlines()]
        with _named(path):
            programs = parse_programs("\n".join(lines))
            alone = tuple(tuple(i for i in program if i.kind in COMPUTE) for program in programs)
            plan = replace(plan, programs=tuple(format_programs(alone).splitlines()))
            compute = of_plan.computed(plan)
            check_whole(programs, of_plan.step(plan, compute))
            deadlock.check(programs)
        return cls(folder, plan, compute, programs)

    def read(
        self,
        lowered: Lowered,
        boundaries: Mapping[Ref, CrossingTensor],
        held: Mapping[str, TensorSpec],
        device: torch.device,
        *,
        part: int = 0,
        as_graph: bool = False,
    ) -> Lowered:
        """A lowered stage with the module of its file in the place of the module lowered.

        Args:
            boundaries: the tensors that cross cuts, which the module is to give as they are.
            held: each state as the file declares it, by its name in the graph: a master in fp32
                also where this rank has its copy in 16 bits.
            part: the tensor-parallel coordinate.
            as_graph: traced, as a GraphModule, for those who work on its code.

        Raises:
            PlanError: the file cannot be run, is for another number of rows, or has other
                parameters or buffers than the stage.
        """
        index = lowered.stage.index
        path = self.folder / stage_file(self.plan, index, part)
        source = _run(path, device)
        rows = getattr(source, "ROWS", None)
        if rows != lowered.rows:
            raise PlanError(
                f"{path}: it is for micro-batches of {rows} rows (ROWS), and these have "
                f"{lowered.rows}",
                hint="give batches of the plan's size, or plan for this one and emit again",
            )
        kind = getattr(source, f"Stage{index}", None)
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise PlanError(f"{path}: it has no class Stage{index}, an nn.Module", hint=_MEND)
        with _one_sentence(path), torch.device("meta"):
            module = kind()
        states = _states(lowered.module)
        specs = {in_graph_module(name): str(held[name]) for name in lowered.stage.states}
        _check_states(path, _states(module), states, specs)
        for name, tensor in states.items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, tensor)
        if as_graph:
            with _one_sentence(path):
                return replace(lowered, module=graph_of(module))
        expected = [boundaries[ref] for ref in lowered.stage.outgoing]
        module.forward = _placed(path, module.forward)
        module.register_forward_hook(partial(_check_results, path, expected))
        # No GraphModule: whoever works on the code of a stage asks for one.
        return replace(lowered, module=cast(fx.GraphModule, module))


def check_whole(programs: Programs, expected: Programs) -> None:
    """Refuse programs that lack a transfer or a sum, or have one too many.

    Raises:
        ScheduleError: names the rank and the first such instruction.
    """
    for rank, (edited, planned) in enumerate(zip(programs, expected, strict=True)):
        for needed, present, verb in (
            (planned, edited, "lacks"),
            (edited, planned, "has no use for"),
        ):
            known = set(present)
            missing = next((i for i in needed if i not in known), None)
            if missing is not None:
                raise ScheduleError(f"rank {rank} {verb} {missing}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(
            f"{path}: no such file in the emitted folder", hint="emit it again, with --force"
        ) from None


_MEND = "mend the file, or emit it again, with --force"


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Within, errors begin with the file's name."""
    try:
        yield
    except AutopipeError as error:
        hint = error.hint or _MEND
        raise type(error)(f"{path}: {error.message}", hint=hint) from error


@contextmanager
def _one_sentence(path: Path) -> Iterator[None]:
    """Within, any error of an edited file becomes one sentence."""
    try:
        yield
    except AutopipeError:
        raise
    except SyntaxError as error:
        raise PlanError(
            f"{error.filename}:{error.lineno}: {error.msg}",
            hint=f"python -m py_compile {path.name} shows where; or emit it again, with --force",
        ) from error
    except Exception as error:  # whatever has been written there
        place = user_lines.of_error(error)
        raise PlanError(
            f"{place or path}: {path.name} cannot be run: {type(error).__name__}: {error}",
            hint="mend that line, or emit the file again, with --force",
        ) from error


def _placed(path: Path, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A stage's forward, whose errors name the line of the file; those of a peer that has died and
    of memory that is full are no errors of the file."""

    @functools.wraps(forward)
    def placed(*given: Any) -> Any:
        try:
            return forward(*given)
        except Exception as error:  # whatever has been written there
            if is_echo(error) or isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise
            with _one_sentence(path):
                raise

    return placed


def _run(path: Path, device: torch.device) -> ModuleType:
    """A stage's file as a module, from its text: no byte code of an earlier edit is in the way."""
    module = ModuleType(f"autopipe_emitted_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with _one_sentence(path):
        exec(compile(_read(path), str(path), "exec"), module.__dict__)
    if hasattr(module, "DEVICE"):
        module.DEVICE = device  # type: ignore[attr-defined]
    return module


def _states(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _check_states(
    path: Path,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    specs: Mapping[str, str],
) -> None:
    for name in found:
        if name not in expected:
            raise PlanError(
                f"{path}: it declares {name!r} {_spec(found[name])}, which the stage does not have",
                hint="parameters and buffers are the model's; change the model and plan again",
            )
    for name, tensor in expected.items():
        declared = found.get(name)
        wrong = declared is None or isinstance(declared, nn.Parameter) != isinstance(
            tensor, nn.Parameter
        )
        if declared is None or wrong or _spec(declared) != specs[name]:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            has = (
                f"declares {name!r} as {_spec(declared)}"
                if declared is not None
                else f"lacks {name!r}"
            )
            raise PlanError(
                f"{path}: it {has}; the stage has it as a {kind} {specs[name]}", hint=_MEND
            )


def _check_results(
    path: Path, expected: Sequence[CrossingTensor], module: nn.Module, given: Any, results: Any
) -> None:
    """Refuse results of another shape or dtype than the receiving stage expects."""
    if not isinstance(results, tuple) or len(results) < len(expected):
        raise PlanError(
            f"{path}: forward gives a {type(results).__name__}; expected a tuple whose first "
            f"{len(expected)} are sent on",
            hint=_MEND,
        )
    for number, (tensor, boundary) in enumerate(zip(results, expected, strict=False)):
        if tensor.shape != boundary.shape or tensor.dtype != boundary.dtype:
            room = dtypes.name_of(boundary.dtype)
            raise PlanError(
                f"{path}: result {number} of forward is {_spec(tensor)}; the stages that it goes "
                f"to expect {room}{list(boundary.shape)}",
                hint=_MEND,
            )


def _spec(tensor: Tensor) -> str:
    return f"{dtypes.name_of(tensor.dtype)}{list(tensor.shape)}"
