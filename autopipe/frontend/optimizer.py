"""Make an optimizer from a name or a function, of a model's parameters or of a rank's;
watch what its steps read from elsewhere."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.overrides import TorchFunctionMode

from autopipe.errors import AutopipeError, ModelError
from autopipe.frontend import user_lines
from autopipe.util import seeding

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

Named = tuple[str, nn.Parameter]

Whole = Mapping[str, tuple[Sequence[int], torch.dtype]]

Settings = dict[str, dict[str, str] | None]
"""An optimizer's settings for parameters, by name, as text; None: it does not change that one."""


@dataclass(frozen=True)
class ByName:
    """A user's optimizer function of named parameters, as one of parameters: it numbers them."""

    by_name: Callable[[Iterable[Named]], torch.optim.Optimizer]

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters, whose names are unknown."""
        return self.by_name((f"{n}.weight", p) for n, p in enumerate(parameters))


SCHEDULED = 1000
"""Steps for which schedules of groups at other places are compared."""

CUSTOM = "custom"
"""The name that a plan records for an optimizer given as a function."""


def optimizer_named(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    """The optimizer class of this name in torch.optim; or a function, of parameters or with names.

    Raises:
        AutopipeError: torch.optim has no optimizer of this name.
    """
    if callable(optimizer):
        return without_names(optimizer) if takes_names(optimizer) else optimizer
    kind = kind_named(optimizer)
    return lambda parameters: kind(parameters)


def kind_named(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer class of this name in torch.optim, in whatever case.

    Raises:
        AutopipeError: torch.optim has no optimizer of this name.
    """
    names = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    if name.lower() not in names:
        raise AutopipeError(f"torch.optim has no optimizer {name!r}", hint="adamw, adam, sgd, ...")
    return names[name.lower()]


def way_to_step(error: Exception) -> str:
    """A hint for an optimizer whose step ends in an error."""
    hint = "a run calls optimizer.step() without a closure, on each rank for its own parameters"
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
                hint=way_to_step(error),
            ) from error


def refuse_others(
    make: Callable[[Iterable[Named]], torch.optim.Optimizer],
    whole: Whole,
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
    everyone = _without_memory(whole)
    try:
        among_all = settings_of(make(everyone), everyone)
    except Exception:  # it reads values, or knows no device without them
        return
    settings = settings_of(optimizer, named)
    if not any(among_all.values()):  # it takes the parameters from elsewhere
        if among_all and any(settings) and not any(settings.values()):
            raise ModelError(
                "optimizer(parameters) takes parameters from elsewhere, and has none of those that "
                "this rank trains: a part of the model's, or in another dtype",
                hint="make it of what it is given",
            )
        return
    for name, on_rank in settings.items():
        expected = among_all.get(name, on_rank)
        if on_rank != expected:
            raise ModelError(
                f"optimizer(parameters) gives {name!r} {_unlike(expected, on_rank)} among all of "
                f"the model's, and {_unlike(on_rank, expected)} among those of this rank",
                hint="find parameters by their names, def optimizer(named_parameters): ..., not by "
                "their places",
            )


def refuse_other_schedules(
    make: Callable[[Iterable[Named]], torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], Any],
    whole: Whole,
    named: Iterable[Named],
) -> None:
    """Refuse a schedule under which a rank's parameter gets other settings than in one process.

        LambdaLR(optimizer, [body, head])      a rank that has the head alone has it first

    Optimizers of all parameters and of the rank's are made without memory, and both are scheduled
    for a while, if a parameter's group is at another place in one than in the other.

    Args:
        make: the user's function.
        schedule: the user's function from an optimizer to its scheduler.
        whole: shape and dtype of all trained parameters of the model, by name and in order.
        named: this rank's parameters.

    Raises:
        ModelError: names the first such parameter and both settings.
    """
    everyone, names = _without_memory(whole), {name for name, _ in named}
    own = [(name, parameter) for name, parameter in everyone if name in names]
    try:
        optimizers = make(everyone), make(own)
        in_whole, in_own = (_groups(one, own) for one in optimizers)
        if all(in_own.get(name) == place for name, place in in_whole.items()):
            return
        schedulers = [schedule(one) for one in optimizers]
    except Exception:  # it reads values, or knows no device without them
        return
    places = {(in_whole[n], in_own[n]): n for n in reversed(in_own) if n in in_whole}
    for step in range(SCHEDULED):
        for group_places, name in places.items():
            pairs = zip(optimizers, group_places, strict=True)
            expected, found = (_of_group(one.param_groups[place]) for one, place in pairs)
            if found != expected:
                raise _scheduled_otherwise(name, step, expected, found)
        try:
            with warnings.catch_warnings(action="ignore"):  # no step of these optimizers is made
                for one in schedulers:
                    one.step(*(0.0,) * isinstance(one, ReduceLROnPlateau))
        except Exception:  # OneCycleLR's after its last step
            return


def _scheduled_otherwise(
    name: str, step: int, expected: dict[str, str], found: dict[str, str]
) -> ModelError:
    """The error for a parameter whose settings after a step depend on its group's place."""
    return ModelError(
        f"scheduler(optimizer) gives {name!r} {_unlike(expected, found)} after {step} "
        f"steps among all of the model's groups, and {_unlike(found, expected)} among "
        "those of this rank, where its group has another place",
        hint="make the same groups on each rank, empty ones too, {'params': []}; or "
        "schedule a group by a key of its own, not by its place",
    )


def _groups(optimizer: torch.optim.Optimizer, named: Iterable[Named]) -> dict[str, int]:
    """The place of each parameter's group in an optimizer."""
    of = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: of[id(parameter)] for name, parameter in named if id(parameter) in of}


def _without_memory(whole: Whole) -> list[Named]:
    return [
        (name, nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta")))
        for name, (shape, dtype) in whole.items()
    ]


def settings_of(optimizer: torch.optim.Optimizer, named: Iterable[Named]) -> Settings:
    """An optimizer's settings for each parameter, as text; None: it does not change that one."""
    by_parameter = {
        id(parameter): settings
        for group in optimizer.param_groups
        for settings in [_of_group(group)]
        for parameter in group["params"]
    }
    return {name: by_parameter.get(id(parameter)) for name, parameter in named}


_MEMBERS = "params", "param_names"


def _of_group(group: Mapping[str, Any]) -> dict[str, str]:
    """A group's settings, as text."""
    return {key: str(setting) for key, setting in group.items() if key not in _MEMBERS}


def _unlike(found: dict[str, str] | None, other: dict[str, str] | None) -> str:
    """The settings in one text that differ in another."""
    if found is None:
        return "no group"
    return ", ".join(f"{k}={v}" for k, v in found.items() if other is None or other.get(k) != v)


def takes_names(optimizer: Any) -> bool:
    """Whether a user's optimizer function takes parameters with their names."""
    parameters = inspect.signature(optimizer).parameters if callable(optimizer) else {}
    return next(iter(parameters), None) == "named_parameters"


def without_names(optimizer: Callable[[Any], torch.optim.Optimizer]) -> ByName:
    """The optimizer as a function of unnamed parameters, which are given numbers for names."""
    return ByName(optimizer)


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


class JoinedElsewhere(Exception):
    """A step computes with two parameters together, at least one of which it was not given."""


class Elsewhere(TorchFunctionMode):
    """Watches what a step reads: parameters that were not given to its optimizer.

    Such parameters have copies of their values until it is closed: planning changes no weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def close(self) -> None:
        """Put back the values of parameters that steps have read."""
        for parameter, value in self._values.values():
            parameter.data = value

    def begin(self, given: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """The optimizer of these parameters is stepped from now on."""
        self._own, self._optimizer = {id(parameter) for parameter in given}, optimizer
        groups = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.read = any(id(parameter) not in self._own for parameter in groups)
        self._made: dict[int, tuple[Tensor, set[int]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call it, and remember which parameters from elsewhere its result is made of."""
        tensors = list(_tensors((args, kwargs)))
        of = {id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter)}
        of |= {one for t in tensors if id(t) in self._made for one in self._made[id(t)][1]}
        if not of <= self._own:  # copies that it keeps (Lookahead's) are its own
            self._own |= {id(tensor) for tensor in _tensors(self._optimizer)}
        if of <= self._own:
            return func(*args, **(kwargs or {}))
        self.read = True
        if len(of) > 1:
            raise JoinedElsewhere
        for tensor in tensors:
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._values:
                self._values[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.clone()
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._made[id(tensor)] = tensor, of
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors(vars(value))
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
