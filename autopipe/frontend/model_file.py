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

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from autopipe.batch.tree import has_own
from autopipe.errors import ModelError
from autopipe.frontend import hf_folder, user_lines
from autopipe.frontend.optimizer import (
    CUSTOM,
    MakeOptimizer,
    Named,
    max_grad_norm,
    optimizer_named,
    takes_names,
    without_names,
)
from autopipe.frontend.user_module import UserModule, as_program, check_names, imported
from autopipe.planfile.contents import LOSS_OVER, ROWS, Plan
from autopipe.util import seeding


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

    def example_for(self, plan: Plan) -> Callable[[int], Any] | None:
        """`inputs` if only it makes the batches that the model was planned with (`tree.has_own`);
        None: the plan's description is enough."""
        return self.inputs if has_own(plan.inputs) else None

    @property
    def sharded(self) -> bool:
        """Whether `batches` takes `shard` and `num_shards`, and gives each replica its own rows."""
        return (
            self.batches is not None and "num_shards" in inspect.signature(self.batches).parameters
        )

    def optimizer_for(self, plan: Plan) -> str | MakeOptimizer:
        """The optimizer to plan with again: the file's own, else the one that the plan names."""
        return self.optimizer or (plan.optimizer if plan.optimizer != CUSTOM else "adamw")

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

    def since_planning(self, plan: Plan, *, given: bool = True) -> list[str]:
        """What a run begins with other than one may expect, one sentence each: the file's settings
        that differ from the plan's, and random numbers for the weights of a folder that has none.

        Args:
            given: whether the run takes its weights from elsewhere.
        """
        found = []
        rows = plan.batch.rows
        if self.loaded is not None and self.weights is None and not given:
            found.append(
                f"{self.source}: the folder has no weights, so that the run begins with random "
                "numbers"
            )
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
        with self._in_batches():
            return self.batches(batch_size, **part)

    @contextmanager
    def _in_batches(self) -> Iterator[None]:
        with user_lines.as_model_errors(f"{self.source}: batches"), as_program(self.source):
            yield

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
        with self._in_batches():
            asked = self.iterable(batch_size, shard, num_shards) if iterable is None else iterable
            given = iter(asked)
        while True:
            with self._in_batches():
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
        with torch.enable_grad():
            found, factory = imported(source)
            trains = torch.is_grad_enabled()
        drawn = seeding.places()
    if not trains:
        raise ModelError(
            f"{source} turns gradients off for all that comes after it",
            hint="torch.set_grad_enabled(False) belongs into a `with`, or behind "
            '`if __name__ == "__main__":`',
        )
    names = UserModule(found, source)
    build = names.required(factory, "", "builds the model", gives="nn.Module")
    inputs = names.required("inputs", "batch_size", "gives an example batch")
    check_names(found, source)
    batches, length = names.any("batches"), None
    called = batches is None or callable(batches)
    if not called:
        batches, length = _listed(batches, source)
    optimizer = names.function("optimizer", "torch.optim.Optimizer")
    named = takes_names(names.any("optimizer"))
    of_hf = source.startswith(hf_folder.SCHEME)
    return ModelFile(
        source=source,
        model=seeding.alike(build, drawn),
        inputs=inputs,
        loss=names.function("loss") and names.any("loss"),
        batches=batches,
        optimizer=without_names(optimizer) if named else optimizer,
        scheduler=names.function("scheduler", "torch.optim.lr_scheduler.LRScheduler"),
        batch_size=names.setting("batch_size", None, _is_batch_size, "a number of rows"),
        loss_over=names.setting(
            "loss_over", ROWS, LOSS_OVER.__contains__, f"one of {', '.join(LOSS_OVER)}"
        ),
        called=called,
        length=length,
        by_name=optimizer if named else None,
        weights=names.any("weights") if of_hf else None,
        max_grad_norm=max_grad_norm(found, source),
        lengths=tuple(names.setting("lengths", (), _are_lengths, "numbers of tokens")),
        loaded=names.any("loaded") if of_hf else None,
    )


def _is_batch_size(found: Any) -> bool:
    return found is None or _is_number(found)


def _are_lengths(found: Any) -> bool:
    return isinstance(found, tuple | list) and all(map(_is_number, found))


def _is_number(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and found >= 1


def _listed(given: Any, source: str) -> tuple[Callable[..., Iterable[Any]], int | None]:
    """Wrap a list of batches or a DataLoader as a function; also its number of batches, if known.

    Raises:
        ModelError: it is neither, or it can be read only once (a generator).
    """
    wrong = None
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping | Tensor):
        wrong = "gives no batches"
    elif isinstance(given, Iterator):  # not asked for one: a DataLoader starts its workers then
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
