"""From a module and a batch to torch.export's program: the branches eager takes, nothing baked in.

Non-strict export in training IR: ops stay as the user's code calls them (`linear`, not `addmm` and
`t`), batch norm stays in training, in-place ops stay in place. The batch is a symbol. Reads are
recorded first and replayed (see `reads`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn

from autopipe import batches, refusals
from autopipe.checkpoints import marking
from autopipe.errors import AutopipeError, CaptureError, ModelError
from autopipe.fake import quiet
from autopipe.graph import SEQUENCE
from autopipe.hushed import libraries_hushed
from autopipe.losses import Loss, SumCount, outputs_to_loss
from autopipe.plan import InputSpec, Read
from autopipe.reads import NeedsNumbers, ReadsParameter, record, replay
from autopipe.standins import standing_in


class Program(nn.Module):
    """The model and its loss as one module whose forward takes the batch's tensors, flat.

    Args:
        outputs: whether it gives the model's own outputs too, their tensors after the loss.

    Attributes:
        paths: of these tensors, once it has run.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss: Loss | None,
        specs: Sequence[InputSpec],
        *,
        outputs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.paths: tuple[str, ...] = ()
        self._with_outputs = outputs
        self._batch = batch
        self.loss = loss
        self._fixed = {spec.path: spec.value for spec in specs if spec.dtype == "python"}
        self._paths = [spec.path for spec in specs if spec.dtype != "python"]

    def forward(self, *tensors: Tensor) -> Any:
        leaves = {**self._fixed, **dict(zip(self._paths, tensors, strict=True))}
        batch = batches.rebuild(self._batch, leaves)
        args, kwargs = batches.bind(self.model, batch, self.loss)
        with _without_cache(self.model):
            outputs = self.model(*args, **kwargs)
        loss = outputs_to_loss(outputs, batch, self.loss, self.model)
        found = tuple(loss) if isinstance(loss, SumCount) else (loss,)
        if self._with_outputs:
            own = batches.flatten(_plain(outputs))
            given = {path: leaf for path, leaf in own.items() if isinstance(leaf, Tensor)}
            self.paths = tuple(given)
            found += tuple(given.values())
        return found if len(found) > 1 else loss

    def refusal(self, error: Exception) -> CaptureError:
        """What is said of an error that a run of the model has raised."""
        entries = ", ".join([*self._fixed, *self._paths])
        return refusals.of_its_own(error, self.loss, entries)


def _plain(outputs: Any) -> Any:
    """A model's output as a tree of dicts, tuples and tensors: what else is in it is left out."""
    if is_dataclass(outputs) and not isinstance(outputs, Mapping | type):
        outputs = {f.name: getattr(outputs, f.name) for f in fields(outputs)}
    if isinstance(outputs, Mapping):
        return {key: _plain(item) for key, item in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(map(_plain, outputs))
    return outputs if isinstance(outputs, Tensor) else None


def capture(
    program: Program,
    leaves: Mapping[str, Any],
    specs: Sequence[InputSpec],
    *,
    reads: Sequence[Read],
    alike: Mapping[str, str],
    symbolic: bool = True,
) -> torch.export.ExportedProgram:
    """Export `program`, whose parameters are fake, on the example batch `leaves`.

    Args:
        reads: the record of a run (`look`).
        alike: modules that a stand-in takes the place of (`standins`).
        symbolic: whether dims that the specs have as text are symbols, or of the example's sizes.

    Raises:
        CaptureError: export cannot capture the model; the sentence names the user's line.
    """
    tensors = _tensors(leaves, specs)
    described = [spec for spec in specs if spec.dtype != "python"]
    dims = tuple(_dynamic(*pair) for pair in zip(described, tensors, strict=True))
    # Export warns of what autopipe handles: attributes set in forward, LSTM's flat weights.
    with _faithful(), libraries_hushed(heard=False):

        def export() -> torch.export.ExportedProgram:
            standing = standing_in(program.model, alike)
            with torch.random.fork_rng(devices=[]), replay(reads), marking(), standing:
                return torch.export.export(
                    program,
                    tuple(tensors),
                    strict=False,
                    dynamic_shapes=(dims,) if symbolic else None,
                )

        try:
            return export()
        except ModelError:
            raise
        except Exception as error:  # export raises whatever the model's own code raises
            if refusals.fixes_rows(error):
                place = refusals.line_that_fixes_rows(export)
                raise refusals.fixed_rows(place) from error
            raise refusals.in_a_trace(error, program.loss) from error


def look(
    program: Program,
    leaves: Mapping[str, Any],
    specs: Sequence[InputSpec],
    *,
    within: AbstractContextManager[object],
    real: Callable[[], nn.Module] | None,
    numbers: bool = False,
) -> tuple[Read, ...]:
    """Run `program` once on true inputs: what Python reads.

    Args:
        within: entered for the run.
        real: builds the model with its weights, for a read that depends on one; None: none to have.
        numbers: as for `reads.record`.

    Raises:
        NeedsNumbers: as `reads.record`.
        CaptureError: a read cannot be answered; the sentence names the user's line.
    """
    with _faithful(), libraries_hushed(heard=True):
        return _record(program, _tensors(leaves, specs), within, real, numbers)


def _tensors(leaves: Mapping[str, Any], specs: Sequence[InputSpec]) -> list[Tensor]:
    """The batch's tensors, each its own: passed twice, one would be one input of the graph.

    Labels would be the tokens.
    """
    return [leaves[spec.path].detach().clone() for spec in specs if spec.dtype != "python"]


def _dynamic(spec: InputSpec, tensor: Tensor) -> dict[int, Any]:
    """What export is told of a tensor: the dims that are symbols, or so many times one.

    A sequence is no longer than the example's: many models hold a table of so many places.
    """
    found = {}
    for number, entry in enumerate(spec.shape):
        if isinstance(entry, str):
            factor, symbol = sympy.sympify(batches.dim_of(entry)).as_coeff_Mul()
            if symbol == SEQUENCE:
                known = torch.export.Dim("sequence", max=tensor.shape[number])
            else:
                known = torch.export.Dim("rows")
            found[number] = known if factor == 1 else int(factor) * known
    return found


def _record(
    program: Program,
    tensors: Sequence[Tensor],
    within: AbstractContextManager[object],
    real: Callable[[], nn.Module] | None,
    numbers: bool,
) -> tuple[Read, ...]:
    def alone() -> None:
        program(*[tensor.clone() for tensor in tensors])

    def run() -> None:
        with within:
            alone()

    try:
        with _restoring(program.model), quiet():
            return record(run, alone, numbers=numbers)
    except ReadsParameter as found:
        if real is None:
            raise CaptureError(
                f"{found.place}: Python reads a value here that depends on the model's weights, "
                "which are not at hand",
                hint="express the branch as a computation (torch.where), or plan where the whole "
                "model fits in memory",
            ) from found
    except (ModelError, NeedsNumbers):
        raise
    except Exception as error:  # whatever the model's own code raises
        # Perhaps for the lack of values alone: some kernels have no version for fake tensors.
        if real is None:
            raise program.refusal(error) from error
    fake, program.model = program.model, real()
    try:
        with _restoring(program.model):
            if program.model.training != program.training:
                program.model.train(program.training)
            try:
                return record(alone, alone, numbers=numbers)
            except NeedsNumbers:
                return record(alone, alone, numbers=True)
    except AutopipeError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise program.refusal(error) from error
    finally:
        program.model = fake


@contextmanager
def _restoring(model: nn.Module) -> Iterator[None]:
    """Leave a model as it was: its buffers, and what is in training."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    training = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for module, flag in training.items():
            module.training = flag


_ASKED_WHILE_TRACING = (
    "is_tracing",
    "is_torchdynamo_exporting",
    "is_torchdynamo_compiling",
    "is_jit_tracing",
    "is_torch_fx_proxy",
    "is_fake_tensor",
    "is_cuda_stream_capturing",
)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Keep transformers from filling a cache of keys and values for tokens to come.

    Its configurations ask for one unless told otherwise. No loss depends on it, and it takes a copy
    of all keys and values, which are held until the backward. Without it the loss is the same, to
    the bit where a kernel does attention; products of matrices may round otherwise on keys that lie
    otherwise (T5). Who passes `use_cache` gets one.
    """
    asking = []
    for config in map(_config, model.modules()):
        if getattr(config, "use_cache", None) is True:  # many modules may have one configuration
            config.use_cache = False
            asking.append(config)
    try:
        yield
    finally:
        for config in asking:
            config.use_cache = True


def _config(module: nn.Module) -> Any:
    """A module's configuration, if it is one of transformers."""
    config = vars(module).get("config")
    kinds = (kind.__module__.partition(".")[0] for kind in type(config).__mro__)
    return config if "transformers" in kinds else None


@contextmanager
def _faithful() -> Iterator[None]:
    """Make transformers take the branches it takes in eager.

    Asked whether it is traced, its code builds whole masks where eager passes `is_causal=True`:
    right, but another program (9 % more bytes saved for backward on llama, no flash kernel). Its
    mixture-of-experts code is left alone: it would pick a kernel with no fake version.
    """
    changed: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers") or name.startswith("transformers.integrations.moe"):
            continue
        for flag in _ASKED_WHILE_TRACING:
            function = getattr(module, "__dict__", {}).get(flag)
            if callable(function):
                changed.append((module, flag, function))
                setattr(module, flag, lambda *args, **kwargs: False)
    try:
        yield
    finally:
        for module, flag, function in changed:
            setattr(module, flag, function)
