"""Make an optimizer from a name or a function; measure its state, and how it couples parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import AutopipeError, ModelError
from autopipe.frontend import user_lines
from autopipe.util import seeding

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

Named = tuple[str, nn.Parameter]

ELEMENT, TENSOR, MODEL, NOISE = "element", "tensor", "model", "noise"
"""What an optimizer changes by its gradient alone: each element (AdamW), each parameter as a whole
(Muon, Adafactor, LAMB), or all parameters together (Prodigy); or nothing, for it draws random
numbers (Langevin dynamics)."""

SIZE = 64
"""Rows and columns of the parameters that optimizers are measured on."""

SCALES = ((1.0, 1.0, 1.0), (4.0, 0.25, 0.1), (0.25, 4.0, 10.0))
"""Of each step how many times as large gradients are in the first half of a parameter's rows, in
that of its columns, and in the other parameter. Adam's change is the same whatever one factor all
gradients have: it must not be the same in each step, or a norm that they are clipped by is not
seen. At the first step, a momentum has no past that differs."""

APART = 0.02
"""Two changes differ from this share of the largest on: beyond rounding, and below what it makes to
take half a matrix for one (6 % and more of torch's Muon and Adafactor)."""

CUSTOM = "custom"
"""The name that a plan records for an optimizer given as a function."""


def optimizer_named(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    """Find the optimizer class of this name in torch.optim; a function is returned unchanged.

    Raises:
        AutopipeError: torch.optim has no optimizer of this name.
    """
    if callable(optimizer):
        return optimizer
    names = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if optimizer.lower() not in names:
        raise AutopipeError(
            f"torch.optim has no optimizer {optimizer!r}", hint="adamw, adam, sgd, ..."
        )
    kind = names[optimizer.lower()]
    return lambda parameters: kind(parameters)  # type: ignore[call-arg]


def stepped_apart(make: MakeOptimizer) -> str:
    """The smallest unit that an optimizer steps independently of all others.

    Two parameters are stepped together, and then one of them alone: whole, or in halves of its rows
    or columns, as ranks have it under ZeRO and tensor parallelism. Equal changes mean independence.

    Returns:
        `ELEMENT`, `TENSOR`, `MODEL` or `NOISE`.

    Raises:
        AutopipeError: the optimizer cannot step them.
    """
    try:
        with torch.random.fork_rng(devices=[]), seeding.at(seeding.places()):
            return _stepped_apart(make)
    except AutopipeError:
        raise
    except Exception as error:  # whatever the user's function raises
        place = user_lines.of_error(error)
        raise AutopipeError(
            f"{place + ': ' if place else ''}optimizer: steps of two parameters of {SIZE} x {SIZE},"
            f" by dense gradients, end in {type(error).__name__}: {error}",
            hint=_way_to_step(error),
        ) from error


def _way_to_step(error: Exception) -> str:
    hint = "a run calls optimizer.step(), on each rank for its own parameters"
    if "dense" not in str(error):
        return hint
    return f"{hint}; gradients are dense, of nn.Embedding(sparse=True) too: Adam, not SparseAdam"


def update(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Make a step of an optimizer, which may draw random numbers: the same on all replicas.

    Raises:
        ModelError: the user's code in it raises, named by its line, or it wants sparse gradients.
            Any other error passes, of memory that is gone or of a peer that is.
    """
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    with (
        torch.random.fork_rng(devices=[d for d in devices if d.type == "cuda"]),
        seeding.beside_torch(seed),
    ):
        torch.manual_seed(seed)
        try:
            optimizer.step()
        except (AutopipeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever the user's optimizer raises
            place = user_lines.of_error(error)
            if not place and "dense" not in str(error):
                raise
            raise ModelError(
                f"{place + ': ' if place else ''}optimizer.step() ended in {type(error).__name__}: "
                f"{error}",
                hint=_way_to_step(error),
            ) from error


def _stepped_apart(make: MakeOptimizer) -> str:
    draw = torch.Generator().manual_seed(0)
    steps = len(SCALES)
    value, other, *drawn = (torch.randn(SIZE, SIZE, generator=draw) for _ in range(2 + 2 * steps))
    gradients, others = drawn[:steps], drawn[steps:]
    for gradient, of_other, (rows, columns, scale) in zip(gradients, others, SCALES, strict=True):
        gradient[: SIZE // 2] *= rows
        gradient[:, : SIZE // 2] *= columns
        of_other *= scale
    changed = _change(make, value, gradients, other, others)
    if _differ(_change(make, value, gradients, other, others), changed):
        return NOISE
    if _differ(_change(make, value, gradients, other), changed):
        return MODEL
    for dim in (0, 1):
        halves = (
            _change(make, value.chunk(2, dim)[n], [g.chunk(2, dim)[n] for g in gradients], other)
            for n in (0, 1)
        )
        if _differ(torch.cat([*halves], dim), changed):
            return TENSOR
    return ELEMENT


def _change(
    make: MakeOptimizer,
    value: Tensor,
    gradients: Sequence[Tensor],
    other: Tensor,
    others: Sequence[Tensor | None] = (None,) * len(SCALES),
) -> Tensor:
    """The change that steps make in a parameter, beside another one with or without gradients."""
    parameter, second = nn.Parameter(value.clone()), nn.Parameter(other.clone())
    optimizer = make([parameter, second])
    for gradient, of_other in zip(gradients, others, strict=True):
        # Copies: a step may clip gradients where they are.
        parameter.grad = gradient.clone()
        second.grad = None if of_other is None else of_other.clone()
        optimizer.step()
    return parameter.detach() - value


def _differ(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() > APART * expected.abs().max())


def optimizer_factor(make: MakeOptimizer) -> float:
    """Bytes of optimizer state per byte of parameter, measured by one step on a small parameter."""
    parameter = nn.Parameter(torch.zeros(SIZE, SIZE))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    held = sum(
        tensor.numel() * tensor.element_size()
        for state in optimizer.state.values()
        for tensor in state.values()
        # A step counter does not grow with the parameter.
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    )
    return held / (parameter.numel() * parameter.element_size())


def refuse_others(
    make: Callable[[Iterable[Named]], torch.optim.Optimizer],
    whole: Mapping[str, tuple[Sequence[int], torch.dtype]],
    optimizer: torch.optim.Optimizer,
    named: Iterable[Named],
) -> None:
    """Refuse a rank's optimizer whose settings for a parameter differ from the whole model's.

        first, *rest = parameters      the first parameter of a rank is not the model's first

    Args:
        make: the user's function.
        whole: shape and dtype of all trained parameters of the model, by name and in order.
        optimizer: this rank's optimizer.
        named: the parameters that it was made of.

    Raises:
        ModelError: names the first such parameter and both settings.
    """
    everyone = [
        (name, nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta")))
        for name, (shape, dtype) in whole.items()
    ]
    try:
        among_all = _settings(make(everyone), everyone)
    except Exception:  # it reads values, or knows no device without them
        return
    if not any(among_all.values()):  # it takes the parameters from elsewhere
        return
    for name, on_rank in _settings(optimizer, named).items():
        expected = among_all.get(name, on_rank)
        if on_rank != expected:
            raise ModelError(
                f"optimizer(parameters) gives {name!r} {_unlike(expected, on_rank)} among all of "
                f"the model's, and {_unlike(on_rank, expected)} among those of this rank",
                hint="find parameters by their names, def optimizer(named_parameters): ..., not by "
                "their places",
            )


def _settings(
    optimizer: torch.optim.Optimizer, named: Iterable[Named]
) -> dict[str, dict[str, str] | None]:
    """An optimizer's settings for each parameter, as text; None: it does not change that one."""
    by_parameter = {
        id(parameter): {key: str(setting) for key, setting in group.items() if key not in _MEMBERS}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: by_parameter.get(id(parameter)) for name, parameter in named}


_MEMBERS = "params", "param_names"


def _unlike(found: dict[str, str] | None, other: dict[str, str] | None) -> str:
    """The settings in one text that differ in another."""
    if found is None:
        return "no group"
    return ", ".join(f"{k}={v}" for k, v in found.items() if other is None or other.get(k) != v)


def takes_names(optimizer: Any) -> bool:
    """Whether a user's optimizer function takes parameters with their names."""
    parameters = inspect.signature(optimizer).parameters if callable(optimizer) else {}
    return next(iter(parameters), None) == "named_parameters"


def without_names(optimizer: Callable[[Iterable[Named]], torch.optim.Optimizer]) -> MakeOptimizer:
    """The optimizer as a function of unnamed parameters, used to measure its bytes of state."""
    return lambda parameters: optimizer((f"{n}.weight", p) for n, p in enumerate(parameters))


def check_norm(found: Any, what: str) -> float:
    """Check a norm to which gradients are to be clipped; `what` is its name in the error.

    Raises:
        ModelError: it is no positive number.
    """
    if isinstance(found, int | float) and found > 0:
        return found
    raise ModelError(f"{what} is {found!r}, expected a number above 0")


def max_grad_norm(module: Any, source: str) -> float | None:
    """The `max_grad_norm` of a model file, if it has one.

    Raises:
        ModelError: as `check_norm`.
    """
    found = getattr(module, "max_grad_norm", None)
    return None if found is None else check_norm(found, f"{source}: max_grad_norm")
