"""Read a user's model file: plain functions, found by name, that define what to train.

model() -> nn.Module                               required
inputs(batch_size) -> tuple | dict                 required
loss(outputs, batch) -> Tensor | SumCount          the output itself, or its .loss
batches(batch_size, shard=0, num_shards=1)         inputs(batch_size), for every step
batches = DataLoader(...)                          or a list: whole batches
optimizer(parameters) -> Optimizer                 AdamW; optimizer(named_parameters): with names
scheduler(optimizer) -> LRScheduler                the learning rate stays; else stepped every step,
                                                   ReduceLROnPlateau with the step's loss
batch_size = 32                                    8 a device
max_grad_norm = 1.0                                gradients are not clipped
loss_over = "batch" or "micro-batch"               "rows": whatever the micro-batches are
lengths = (128, 256, 512)                          tokens of a row: those of inputs, or fewer
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from autopipe.errors import ModelError
from autopipe.frontend import hf_folder, row_length, user_lines
from autopipe.frontend.construct import off_gpus
from autopipe.frontend.optimizer import (
    CUSTOM,
    Named,
    max_grad_norm,
    optimizer_named,
    takes_names,
    without_names,
)
from autopipe.onnx_files import source as onnx_source
from autopipe.planfile.contents import LOSS_OVER, ROWS, Plan
from autopipe.util import seeding

OF_FILES = "autopipe_model_"
"""What a model file's name among the loaded modules begins with, before its own."""


@dataclass(frozen=True)
class ModelFile:
    """The functions of a model file; an error in one of them names the user's line.

    `called` is False if `batches` is a list or a DataLoader; `length` is its number of batches, if
    known. `by_name` is the optimizer if it takes names with parameters. `weights` is the folder of
    weights to start from, if the source has one; `loaded` then builds the model with them.
    """

    source: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    loss: Callable[[Any, Any], Any] | None
    batches: Callable[..., Iterable[Any]] | None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None
    batch_size: int | None
    loss_over: str = ROWS
    called: bool = True
    length: int | None = None
    by_name: Callable[[Iterable[Named]], torch.optim.Optimizer] | None = None
    weights: Path | None = None
    max_grad_norm: float | None = None
    lengths: tuple[int, ...] = ()
    loaded: Callable[[], nn.Module] | None = None

    def start(self) -> tuple[Callable[[], nn.Module], Path | None]:
        """The function that builds a run's model, and the weights of which a rank reads its part.

        If the weights have other names than the model, `loaded` builds it whole on each rank.
        """
        if self.weights is None or self.loaded is None:
            return self.model, self.weights
        if hf_folder.lacks(self.weights, self.model):
            return self.loaded, None
        return self.model, self.weights

    @property
    def sharded(self) -> bool:
        """Whether `batches` takes `shard` and `num_shards`, and gives each replica its own rows."""
        return (
            self.batches is not None and "num_shards" in inspect.signature(self.batches).parameters
        )

    def make_optimizer(self, named: Iterable[Named], default: str) -> torch.optim.Optimizer:
        """Make the file's optimizer for these parameters, or torch.optim's class `default`."""
        if self.by_name is not None:
            return self.by_name(named)
        parameters = [parameter for _, parameter in named]
        if self.optimizer is not None:
            return self.optimizer(parameters)
        if default in ("adamw", CUSTOM):
            return torch.optim.AdamW(parameters)
        return optimizer_named(default)(parameters)

    def since_planning(self, plan: Plan) -> list[str]:
        """The file's settings that differ from the plan's, one sentence each."""
        found = []
        rows = plan.batch.rows
        if self.batch_size not in (None, rows):
            found.append(
                f"{self.source}: batch_size is {self.batch_size}, and the plan is for {rows} rows: "
                f"a run takes batches of {rows} rows"
            )
        if plan.optimizer == CUSTOM and self.optimizer is None:
            found.append(
                f"{self.source}: the plan was made with its optimizer(parameters), which it has "
                "no more: AdamW is used"
            )
        elif plan.optimizer != CUSTOM and self.optimizer is not None:
            found.append(
                f"{self.source}: the plan was made for {plan.optimizer}, and the file's own "
                "optimizer(parameters) is used: it may hold more or fewer bytes than predicted"
            )
        return found

    def asking(self, batch_size: int, shard: int | None = None, num_shards: int = 1) -> str:
        """The call that asks for batches, as source text for messages; `shard` None: any shard."""
        if not self.called:
            return "batches"
        part = "" if shard is None else f", shard={shard}, num_shards={num_shards}"
        return f"batches({batch_size}{part})"

    def iterable(self, batch_size: int, shard: int, num_shards: int) -> Any:
        """The result of the file's `batches` for an epoch, which should be an iterable; None: there
        is no `batches`."""
        if self.batches is None:
            return None
        part = {"shard": shard, "num_shards": num_shards} if self.sharded else {}
        with user_lines.as_model_errors(f"{self.source}: batches"):
            return self.batches(batch_size, **part)

    def stream(
        self,
        batch_size: int,
        shard: int,
        num_shards: int,
        seed: int,
        iterable: Any = None,
    ) -> Iterator[Any]:
        """The batches of a run, or of one epoch of it.

        If `sharded`, each replica gets its own rows; otherwise every rank gets whole batches.

        Args:
            iterable: the result of `self.iterable`, if the caller has it.
        """
        if self.batches is None:
            for step in range(sys.maxsize):
                number = seeding.seed(seed, "inputs", step)
                with torch.random.fork_rng(devices=[]), seeding.beside_torch(number):
                    torch.manual_seed(number)
                    batch = self.inputs(batch_size)
                yield batch
            return
        with user_lines.as_model_errors(f"{self.source}: batches"):
            asked = self.iterable(batch_size, shard, num_shards) if iterable is None else iterable
            given = iter(asked)
        while True:
            with user_lines.as_model_errors(f"{self.source}: batches"):
                batch = next(given, _END)
            if batch is _END:
                return
            yield batch


def load(source: str) -> ModelFile:
    """Read `model.py`, or `package.module:factory` where the module holds the other functions.

    Args:
        source: one of these; or `hf:FOLDER` (`hf_folder`), or a `.onnx` file (`onnx_files`).

    Raises:
        ModelError: there is no such file, it fails when it is run, or it lacks a function.
    """
    seeding.begin_beside_torch(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a loss's frozen part is the same on every rank
        module, factory = _module(source)
        drawn = seeding.places()
    for required, does in ((factory, "builds the model"), ("inputs", "gives an example batch")):
        if not callable(found := getattr(module, required, None)) or isinstance(found, nn.Module):
            arguments = "batch_size" if required == "inputs" else ""
            is_it = f": it is a {type(found).__name__}, built already" if callable(found) else ""
            raise ModelError(
                f"{source} has no function {required}({arguments}), which {does}{is_it}",
                hint=f"def {required}({arguments}): ...",
            )
    size, over = getattr(module, "batch_size", None), getattr(module, "loss_over", ROWS)
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ModelError(f"{source}: batch_size is {size!r}, expected a number of rows")
    if over not in LOSS_OVER:
        raise ModelError(f"{source}: loss_over is {over!r}, expected one of {', '.join(LOSS_OVER)}")

    def function(name: str, gives: str | None = None) -> Any:
        given = getattr(module, name, None)
        if not (given is None or callable(given)):
            kind = type(given).__name__
            hint = f"def {name}(...): ..., which gives it"
            raise ModelError(f"{source}: {name} is a {kind}, expected a function", hint=hint)
        return None if given is None else _guarded(given, f"{source}: {name}", gives)

    batches, length = getattr(module, "batches", None), None
    called = batches is None or callable(batches)
    if not called:
        batches, length = _listed(batches, source)
    optimizer = function("optimizer", "torch.optim.Optimizer")
    named = takes_names(getattr(module, "optimizer", None))
    return ModelFile(
        source=source,
        model=seeding.alike(function(factory, "nn.Module"), drawn),
        inputs=function("inputs"),
        loss=function("loss") and module.loss,
        batches=batches,
        optimizer=without_names(optimizer) if named else optimizer,
        scheduler=function("scheduler", "torch.optim.lr_scheduler.LRScheduler"),
        batch_size=size,
        loss_over=over,
        called=called,
        length=length,
        by_name=optimizer if named else None,
        weights=getattr(module, "weights", None) if source.startswith(hf_folder.SCHEME) else None,
        max_grad_norm=max_grad_norm(module, source),
        lengths=row_length.asked_in(module, source),
        loaded=getattr(module, "loaded", None) if source.startswith(hf_folder.SCHEME) else None,
    )


def _module(source: str) -> tuple[Any, str]:
    """The module with a source's functions, and the name of the one that builds the model."""
    if source.startswith(hf_folder.SCHEME):
        return hf_folder.as_module(source), "model"
    if source.endswith(".onnx"):
        return onnx_source.as_module(source), "model"
    name, colon, factory = source.partition(":")
    return _by_name(name) if colon else _by_path(Path(source)), factory or "model"


def _listed(given: Any, source: str) -> tuple[Callable[..., Iterable[Any]], int | None]:
    """Wrap a list of batches or a DataLoader as a function; also its number of batches, if known.

    Raises:
        ModelError: it is neither, or it can be read only once (a generator).
    """
    wrong = None
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping | Tensor):
        wrong = "gives no batches"
    elif iter(given) is given:
        wrong = "can be read once only"
    if wrong is not None:
        kind = type(given).__name__
        raise ModelError(
            f"{source}: batches is {'an' if kind[0] in 'aeiou' else 'a'} {kind}, which {wrong}",
            hint="def batches(batch_size): ..., a list of batches, or a DataLoader",
        )
    length = None
    with suppress(TypeError):  # a DataLoader over a stream has a length, and cannot say it
        length = len(given) if isinstance(given, Sized) else None
    return (lambda batch_size: given), length


_END = object()
_RESULTS = {
    "nn.Module": nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.lr_scheduler.LRScheduler": LRScheduler,
}


def _guarded(function: Callable[..., Any], what: str, gives: str | None = None) -> Any:
    """Wrap a user's function: check its result, name the line of its errors, build on the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with (
            user_lines.as_model_errors(what),
            off_gpus() if gives in (None, "nn.Module") else nullcontext(),
        ):
            result = function(*args, **kwargs)
        if gives is not None and not isinstance(result, _RESULTS[gives]):
            raise ModelError(
                f"{what}() returned {result!r}, expected {gives}",
                hint="does it end without a `return`?"
                if result is None
                else f"def {what.rpartition(' ')[2]}(...): return an object of it",
            )
        return result

    call.__module__ = function.__module__
    return call


def _by_path(path: Path) -> ModuleType:
    if not path.is_file():
        hint = hf_folder.hint_for(path) or "autopipe plan model.py"
        what = ", it is a folder" if path.is_dir() else ""
        raise ModelError(f"there is no model file {str(path)!r}{what}", hint=hint)
    if path.suffix != ".py":
        raise ModelError(f"{path} is no Python file", hint="autopipe plan model.py")
    name = f"{OF_FILES}{path.stem}"
    loader = _FromText(name, str(path.absolute()))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None, "it has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(path.parent.resolve()))  # as `python model.py` does
    user_lines.run_module(lambda: loader.exec_module(module), str(path))
    return module


class _FromText(SourceFileLoader):
    """Loads a file from its text: byte code from before an edit in the same second looks new."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _by_name(name: str) -> ModuleType:
    if name.endswith(".py"):
        raise ModelError(
            f"{name!r} is a file, and what stands before a colon is a module",
            hint=f"autopipe plan {name}, where the function is called model(); "
            f"or {name.removesuffix('.py').replace('/', '.')}:FUNCTION",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        module: ModuleType = user_lines.run_module(lambda: importlib.import_module(name), name)
    except ModelError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}."):
            raise ModelError(
                f"there is no module {cause.name!r}, asked for the model in {name!r}",
                hint=f"modules are looked for in {Path.cwd()} and where packages are installed",
            ) from error
        raise
    return module
