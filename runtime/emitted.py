"""An emitted folder taken back: its stages as modules to run, its programs parsed and proved.

    stage_0.py    class Stage0  --on meta-->  the model's parameters?  -->  the rank's own in them
    programs.txt  rank 0: ...   --parse---->  whole? proved?           -->  what each rank runs

What one has edited runs as it stands. Refused, in a sentence, is what cannot be: parameters that
are not the model's, programs that lack a transfer or wait for each other.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self, cast

import torch
from torch import Tensor, fx, nn

from autopipe import places, proof
from autopipe import programs as of_plan
from autopipe.errors import AutopipeError, PlanError, ScheduleError
from autopipe.graph import Ref
from autopipe.lower import Lowered, check_read, under_autocast
from autopipe.plan import Plan, stage_file
from autopipe.precision import low
from autopipe.randomness import draw
from autopipe.recompute import Recomputed
from autopipe.rehearsal import Boundary
from autopipe.runtime.regraph import graph_of
from autopipe.schedule import FLOWS, Kind, Programs, format_programs, parse_programs

__all__ = [
    "Emitted",
    "Recomputed",
    "States",
    "buffer",
    "check_read",
    "detach",
    "draw",
    "low",
    "parameter",
    "under_autocast",
]

detach = torch.ops.aten.detach.default
"""`x` without its gradient, as for what came into `torch.no_grad()` from outside."""


def parameter(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> Tensor:
    """A parameter's place in a stage: its shape, not its values."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), trainable)


def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The place of a buffer, or of a constant of the model's code."""
    return nn.Buffer(torch.empty(shape, dtype=dtype))


class States(nn.Module):
    """Parameters, buffers and modules under the model's own names.

        States({"0": States(weight=parameter(8, 3))}, bias=parameter(8))

    Members that are no Python names are reached by brackets: `self["0"].weight`.
    """

    def __init__(
        self, members: Mapping[str, Tensor | nn.Module] | None = None, /, **named: Any
    ) -> None:
        super().__init__()
        for name, member in {**(members or {}), **named}.items():
            if isinstance(member, nn.Module):
                self.add_module(name, member)
            else:
                setattr(self, name, member)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def sharing(self, other: nn.Module) -> Self:
        """This module with all that `other` holds: another call of the same one."""
        self._parameters, self._buffers = other._parameters, other._buffers
        self._modules = other._modules
        return self


@dataclass(frozen=True)
class Emitted:
    """What `autopipe emit` has written, as it stands now.

    Attributes:
        plan: the one given; its schedule is that of the folder's programs.
        programs: a step's, with transfers: one per rank of a pipeline, proved.
    """

    folder: Path
    plan: Plan
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
        theirs = Plan.load(folder / "plan.json")
        if replace(theirs, source=None) != replace(plan, source=None):
            raise PlanError(
                f"{folder} was emitted from another plan than the one given",
                hint=f"give the plan in {folder / 'plan.json'}, or emit again",
            )
        path = folder / "programs.txt"
        lines = [line.partition("#")[0] for line in _read(path).splitlines()]
        with _named(path):
            programs = parse_programs("\n".join(lines))
            compute = tuple(tuple(i for i in program if i.kind in _COMPUTE) for program in programs)
            plan = replace(plan, programs=tuple(format_programs(compute).splitlines()))
            _check_whole(programs, of_plan.step(plan))
            proof.check(programs)
        return cls(folder, plan, programs)

    def read(
        self,
        lowered: Lowered,
        boundaries: Mapping[Ref, Boundary],
        device: torch.device,
        *,
        part: int = 0,
        as_graph: bool = False,
    ) -> Lowered:
        """A lowered stage with the module of its file in the place of the module lowered.

        Args:
            boundaries: the tensors that cross cuts, which the module is to give as they are.
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
            raise PlanError(f"{path}: it has no class Stage{index}, an nn.Module")
        with _told(path), torch.device("meta"):
            module = kind()
        states = _states(lowered.module)
        _check_states(path, _states(module), states)
        for name, tensor in states.items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, tensor)
        if as_graph:
            with _told(path):
                return replace(lowered, module=graph_of(module))
        expected = [boundaries[ref] for ref in lowered.stage.outgoing]
        module.register_forward_hook(partial(_check_results, path, expected))
        # No GraphModule: whoever works on the code of a stage asks for one.
        return replace(lowered, module=cast(fx.GraphModule, module))


_COMPUTE = (*FLOWS, Kind.BACKWARD_WEIGHT)


def _check_whole(found: Programs, expected: Programs) -> None:
    """Refuse programs that lack a transfer or a sum, or have one too many."""
    for rank, (own, whole) in enumerate(zip(found, expected, strict=True)):
        for one, other, word in ((whole, own, "lacks"), (own, whole, "has no use for")):
            missing = next((i for i in one if i not in set(other)), None)
            if missing is not None:
                raise ScheduleError(f"rank {rank} {word} {missing}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(
            f"{path}: no such file in the emitted folder", hint="emit it again, with --force"
        ) from None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors in the block begin with the file's name."""
    try:
        yield
    except AutopipeError as error:
        raise type(error)(f"{path}: {error.message}", hint=error.hint) from error


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of an edited file in the block as one sentence."""
    try:
        yield
    except SyntaxError as error:
        raise PlanError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:  # whatever has been written there
        place = places.of_error(error)
        raise PlanError(
            f"{place or path}: {path.name} cannot be run: {type(error).__name__}: {error}"
        ) from error


def _run(path: Path, device: torch.device) -> ModuleType:
    """A stage's file as a module, from its text: no byte code of an earlier edit is in the way."""
    module = ModuleType(f"autopipe_emitted_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with _told(path):
        exec(compile(_read(path), str(path), "exec"), module.__dict__)
    if hasattr(module, "DEVICE"):
        module.DEVICE = device  # type: ignore[attr-defined]
    return module


def _states(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _check_states(path: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name in found:
        if name not in expected:
            raise PlanError(
                f"{path}: it declares {name!r} {_spec(found[name])}, which the stage does not have",
                hint="parameters and buffers are the model's; change the model and plan again",
            )
    for name, tensor in expected.items():
        own = found.get(name)
        wrong = own is None or isinstance(own, nn.Parameter) != isinstance(tensor, nn.Parameter)
        if own is None or wrong or _spec(own) != _spec(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            has = f"declares {name!r} as {_spec(own)}" if own is not None else f"lacks {name!r}"
            raise PlanError(f"{path}: it {has}; the stage has it as a {kind} {_spec(tensor)}")


def _check_results(
    path: Path, expected: Sequence[Boundary], module: nn.Module, given: Any, results: Any
) -> None:
    """Refuse to send what the other stage has made no room for."""
    if not isinstance(results, tuple) or len(results) < len(expected):
        raise PlanError(
            f"{path}: forward gives a {type(results).__name__}; expected a tuple whose first "
            f"{len(expected)} are sent on"
        )
    for number, (tensor, boundary) in enumerate(zip(results, expected, strict=False)):
        if tensor.shape != boundary.shape or tensor.dtype != boundary.dtype:
            room = str(boundary.dtype).removeprefix("torch.")
            raise PlanError(
                f"{path}: result {number} of forward is {_spec(tensor)}; the stages that it goes "
                f"to expect {room}{list(boundary.shape)}"
            )


def _spec(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
