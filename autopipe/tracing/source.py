"""Trace a model given as a module or as the function that builds one.

A module's own weights are never copied, and a function's never allocated: both give the same
skeleton to trace, and only a rank that needs them builds the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopipe.errors import ModelError
from autopipe.frontend.construct import Factory, build_fake, fake_copy
from autopipe.frontend.loss import Loss
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.user_module import facts_of
from autopipe.ir import torch_private
from autopipe.ir.torch_patches import one_process
from autopipe.opaque.scripted import plain
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import InputSpec
from autopipe.planfile.regions import Region
from autopipe.tracing.capture.low_precision import SixteenBits, kept_by
from autopipe.tracing.looks import NoRoom
from autopipe.tracing.trace import trace
from autopipe.tracing.traced import Trace
from autopipe.util import host_memory, numbers
from autopipe.util.progress import Say

Source = nn.Module | Factory


def bare(model: Source, say: Say | None = None) -> nn.Module:
    """A copy of the model with fake parameters; a given module itself is not changed."""
    with libraries_hushed(heard=True):
        if isinstance(model, nn.Module):
            _check_tensors(model)
            built = fake_copy(plain(model))
        else:
            built = build_fake(model, room=host_memory.available, say=say)
    if not isinstance(built, nn.Module):
        raise ModelError(f"model() gives a {type(built).__name__}, not an nn.Module")
    if isinstance(built, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"the model is in a {type(built).__name__}, which deals out its rows by itself",
            hint="give what it wraps, its .module; autopipe deals rows out to replicas (--dp)",
        )
    built = plain(built)
    _check_tensors(built)
    _check_tied(built)
    if say is not None:
        for fact in facts_of(built):
            say(fact)
        if not built.training:
            say(
                "the model is given in evaluation mode (.eval()); steps run it as after .train(), "
                "with dropout and with batch norm by the batch (parts of a model in training stay "
                "as given)"
            )
    return built


def _check_tied(model: nn.Module) -> None:
    """Refuse two parameters that have an element in common."""
    stored: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel():
            stored.setdefault(torch_private.storage_key(parameter), []).append((name, parameter))
    for several in stored.values():
        before: list[tuple[str, nn.Parameter]] = []  # those that end beyond where the next begins
        for name, parameter in sorted(several, key=lambda pair: pair[1].storage_offset()):
            begin = parameter.storage_offset()
            before = [(known, other) for known, other in before if _end(other) > begin]
            for known, other in before:
                if _overlap(other, parameter):
                    raise _tied(known, other, name, parameter)
            before.append((name, parameter))


def _end(tensor: torch.Tensor) -> int:
    """The place in a tensor's storage after its last element."""
    steps = ((size - 1) * by for size, by in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + sum(steps) + 1)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage share an element: two columns of a matrix do not."""
    if one.storage_offset() == other.storage_offset():
        return True
    places = torch.arange(max(_end(one), _end(other)), device="cpu")
    first, second = (
        places.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() for t in (one, other)
    )
    return bool(torch.isin(first, second).any())


def _tied(known: str, other: nn.Parameter, name: str, parameter: nn.Parameter) -> ModelError:
    alike = (other.storage_offset(), other.shape, other.stride()) == (
        parameter.storage_offset(),
        parameter.shape,
        parameter.stride(),
    )
    return ModelError(
        f"{known!r} and {name!r} are two parameters in one memory: split over two "
        "stages they would drift apart",
        hint="tie them by making both names the same nn.Parameter"
        if alike
        else "one is another view of it, such as the transpose: keep one nn.Parameter, and "
        "make the view of it in forward (x @ self.table.weight.T); or build the model without "
        "this tie",
    )


def _check_tensors(model: nn.Module) -> None:
    """Refuse lazy layers that have not been called yet, and tensors that no rank can hold."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"{name!r} has no shape yet: its layer is a lazy one ({type(parameter).__name__}), "
                "which takes its shape from the first batch",
                hint="call the model once on a batch where it is built: with torch.no_grad(): "
                "net(**inputs(2))",
            )
        if any(
            stride == 0 and size > 1
            for stride, size in zip(parameter.stride(), parameter.shape, strict=True)
        ):
            raise ModelError(
                f"{name!r} is an expanded tensor: several of its entries are one in memory, which "
                "no optimizer can change",
                hint="make the small tensor the parameter, and expand it in forward",
            )
    trained = {
        torch_private.storage_key(p): n for n, p in model.named_parameters() if p.requires_grad
    }
    for name, buffer in model.named_buffers():
        owner = trained.get(torch_private.storage_key(buffer)) if buffer.numel() else None
        if owner is not None:
            raise ModelError(
                f"the buffer {name!r} is in the memory of the parameter {owner!r}, and changes as "
                "that is trained; ranks have them as two tensors",
                hint="read it from the parameter in forward, by .detach(); or register a copy: "
                ".detach().clone()",
            )
    persistent = model.state_dict(keep_vars=True).keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided and name in persistent:
            kind = str(tensor.layout).removeprefix("torch.")
            what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ModelError(
                f"the {what} {name!r} is of layout {kind}, and checkpoints have dense tensors "
                "alone",
                hint="keep its values in a dense one, and make the sparse tensor of it in forward"
                if what == "parameter"
                else f"keep it out of them: register_buffer({name.rpartition('.')[2]!r}, ..., "
                "persistent=False)",
            )


def trace_source(
    model: Source,
    example: Any,
    specs: Sequence[InputSpec],
    loss: Loss | None,
    *,
    training: bool = True,
    regions: Sequence[Region] = (),
    skeleton: nn.Module | None = None,
    symbolic: bool = True,
    outputs: bool = False,
    kept: SixteenBits | None = None,
    others: Callable[[], object] | None = None,
    lines_may_fix_rows: bool = False,
    say: Say | None = None,
) -> Trace:
    """Trace a model; allocate its weights only if Python reads a value that depends on one.

    Args and raises: as `trace.trace`; `skeleton` is the result of `bare`, if already made.
    """
    if skeleton is None:
        skeleton = bare(model)

    def real() -> nn.Module:
        if isinstance(model, nn.Module):
            return plain(model)
        # Calls that run as they are are measured there and back: with gradients of all weights.
        needed, free = 2 * parameter_bytes(skeleton), host_memory.available()
        if needed > free:
            raise NoRoom(
                "the model must run once with its weights: they and their gradients take "
                f"{numbers.memory(needed)}, and {numbers.memory(free)} are free",
                hint="express the branch as a computation (torch.where)",
            )
        drawn = torch.random.fork_rng(devices=[])  # a seed in it is of its weights, not of draws
        with drawn, one_process():
            return plain(model())

    return trace(
        skeleton,
        example,
        specs,
        loss,
        training=training,
        regions=regions,
        real=real,
        symbolic=symbolic,
        outputs=outputs,
        kept=kept,
        original=model if isinstance(model, nn.Module) else None,
        others=others,
        lines_may_fix_rows=lines_may_fix_rows,
        say=say,
    )


def trace_as_planned(
    model: Source, skeleton: nn.Module, example: Any, loss: Loss | None, plan: Plan
) -> Trace:
    """Trace a model in training as it was planned.

    Args:
        skeleton: the result of `bare`.
        example: a batch of `Plan.traced_rows` rows.

    Raises:
        ModelError: as `trace.trace`.
    """
    return trace(
        skeleton,
        example,
        plan.inputs,
        loss,
        reads=plan.reads,
        regions=plan.regions,
        symbolic=not plan.rows_fixed,
        kept=kept_by(plan),
        original=model if isinstance(model, nn.Module) else None,
    )


@contextmanager
def keeping_default_dtype() -> Iterator[None]:
    """Within, a model may set torch's default dtype; afterwards it is as before."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters; a tied parameter counts once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def versions(model: Source) -> dict[str, str]:
    """Versions of torch and of the package that defines the model's class, by package name."""
    found = {"torch": str(torch.__version__)}
    made_by = type(model) if isinstance(model, nn.Module) else model
    package = made_by.__module__.partition(".")[0]
    with suppress(metadata.PackageNotFoundError, ValueError):
        found[package] = metadata.version(package)
    return found
