"""What an optimizer does to a model's parameters: which it changes together, bytes of its state.

    AdamW          each element by its own gradient    ELEMENT    two moments: factor 2
    Muon, LAMB     each parameter as a whole           TENSOR
    Prodigy        all parameters together             MODEL

An optimizer may go by names, dims and sizes (Muon for matrices of blocks, AdamW for the rest). So
it is measured on the model's own parameters, or on smaller ones of their names and dims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as steps

from autopipe.errors import AutopipeError
from autopipe.frontend import user_lines
from autopipe.frontend.optimizer import (
    ByName,
    Elsewhere,
    JoinedElsewhere,
    MakeOptimizer,
    Named,
    kind_named,
    optimizer_named,
    way_to_step,
)
from autopipe.ir.graph import Graph, shape_at
from autopipe.util import seeding

Like = Mapping[str, Tensor]

ELEMENT, TENSOR, MODEL, NOISE = "element", "tensor", "model", "noise"
"""What an optimizer changes by its gradient alone: each element (AdamW), each parameter as a whole
(Muon, Adafactor, LAMB), or all parameters together (Prodigy); or nothing, for it draws random
numbers (Langevin dynamics)."""

ELSEWHERE, JOINED = "elsewhere", "joined"
"""It has, or its hooks read, parameters that it was not given, of a model in a global: each for
itself (a clamp), or several together (a mean teacher's)."""

_BY_ELEMENTS = "changes each element by its own gradient, as AdamW and SGD do"
WORDS = {
    TENSOR: ("changes each parameter as a whole", _BY_ELEMENTS),
    MODEL: (
        "changes all parameters together",
        f"{_BY_ELEMENTS}; max_grad_norm = 1.0 in the model file clips by the norm of all ranks' "
        "gradients",
    ),
    NOISE: ("draws random numbers", _BY_ELEMENTS),
    ELSEWHERE: (
        "has or reads parameters that it was not given",
        "reads those alone that it is given",
    ),
    JOINED: (
        "computes with several parameters that it was not given, or its hooks do",
        "reads those alone that it is given; a mean teacher can be moved in forward, under "
        "torch.no_grad()",
    ),
}
"""What such an optimizer does, and what another one would do, for a sentence and its hint."""

SIZE = 64
"""Rows and columns of the largest parameter that an optimizer is measured on."""

SCALES = ((1.0, 1.0, 1.0), (4.0, 0.25, 1.0), (0.25, 4.0, 1.0), (1.0, 4.0, 1e-3), (4.0, 1.0, 1e3))
"""Of each step how many times as large gradients are in the first half of a parameter's rows, in
that of its columns, and as a whole. Adam's change is the same whatever one factor all gradients
have: it must not be the same in each step, or a norm that they are clipped by is not seen. At the
first step, a momentum has no past that differs. A norm may have a least value or a largest."""

_EXAMPLE = torch.empty(SIZE, SIZE, dtype=torch.float32, device="meta")

LATE = 30
"""Steps after which an optimizer's warm-up is over (Shampoo's is 25 steps by default)."""

COUNTED, FAR = 4, 9_994
"""Steps that show which numbers count them, and where those are put then: what an optimizer does
in every 1000th step (a preconditioner is made anew) it does six steps later, by a large gradient,
which the momentum of earlier ones does not hide."""

APART, ROUNDING = 0.02, 1e-6
"""Two changes differ from this share of the largest on, below what it makes to take half a matrix
for one (6 % and more of torch's Muon and Adafactor), and what a parameter's value is rounded to."""


def stepped_apart(make: MakeOptimizer, like: Like | None = None) -> str:
    """The smallest unit that an optimizer steps independently of all others.

    All parameters are stepped together; then with gradients of some of them alone; then in halves
    of their rows or columns, as ranks have them under ZeRO and tensor parallelism. Equal changes
    mean independence.

    Args:
        make: the user's function.
        like: the model's trained parameters (`measured_on`), since an optimizer may go by names,
            dims and sizes. None: two matrices.

    Returns:
        `ELEMENT`, or a key of `WORDS`.

    Raises:
        AutopipeError: the optimizer cannot step them.
    """
    like = like or {f"{n}.weight": _EXAMPLE for n in range(2)}
    try:
        with (
            torch.random.fork_rng(devices=[]),
            seeding.at(seeding.places()),
            closing(Elsewhere()) as elsewhere,
        ):
            return _stepped_apart(make, like, elsewhere)
    except AutopipeError:
        raise
    except JoinedElsewhere:
        return JOINED
    except Exception as error:  # whatever the user's function raises
        place = user_lines.of_error(error)
        raise AutopipeError(
            f"{place + ': ' if place else ''}optimizer: steps of {len(like)} small parameters, "
            f"by dense gradients, end in {type(error).__name__}: {error}",
            hint=way_to_step(error),
        ) from error


def named_apart(name: str) -> str:
    """`stepped_apart` of an optimizer of torch.optim by its name: each is measured once a process.

    With a hook on the steps of all optimizers it is measured anew, unless that `changes_nothing`.
    """
    ways = steps.register_optimizer_step_pre_hook, steps.register_optimizer_step_post_hook
    handles = [register(lambda *given: None) for register in ways]
    for handle in handles:
        handle.remove()
    others = (hook for handle in handles for hook in (handle.hooks_dict_ref() or {}).values())
    if not all(getattr(hook, "changes_nothing", False) for hook in others):
        return stepped_apart(optimizer_named(name))
    return _kind_apart(kind_named(name))


@cache
def _kind_apart(kind: Callable[..., torch.optim.Optimizer]) -> str:
    return stepped_apart(lambda parameters: kind(parameters))


def parameters_of(graph: Graph) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a graph, without memory."""
    for name, state in graph.states.items():
        if state.kind == "parameter":
            shape, dtype = shape_at(state.spec, 1), state.spec.dtype
            yield (
                name,
                nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), state.trainable),
            )


def measured_on(parameters: Iterable[Named]) -> dict[str, Tensor]:
    """The trained ones of a model's parameters on which its optimizer is measured, made small.

    layers.0.weight, layers.1.weight, ..., layers.9.weight  ->  layers.0.weight, layers.9.weight
    """
    trained = {name: p for name, p in parameters if p.requires_grad and p.numel()}
    alike: dict[tuple[str, torch.Size], list[str]] = {}
    for name, parameter in trained.items():
        alike.setdefault((re.sub(r"\d+", "0", name), parameter.shape), []).append(name)
    kept = {name for names in alike.values() for name in (names[0], names[-1])}
    of = {True: torch.complex64, False: torch.float32}
    return {
        name: torch.empty(_small(p.shape), dtype=of[p.is_complex()], device="meta")
        for name, p in trained.items()
        if name in kept
    }


def _small(shape: Sequence[int]) -> list[int]:
    """The shape with its largest dims halved until it has at most SIZE x SIZE elements."""
    found = list(shape)
    while math.prod(found) > SIZE * SIZE:
        found[found.index(max(found))] //= 2
    return found


def _stepped_apart(make: MakeOptimizer, like: Like, elsewhere: Elsewhere) -> str:
    draw = torch.Generator().manual_seed(0)
    values = {n: torch.randn(t.shape, dtype=t.dtype, generator=draw) for n, t in like.items()}
    gradients = [{n: _drawn(v, each, draw) for n, v in values.items()} for each in SCALES]
    _changes(make, values, gradients, elsewhere)
    change = partial(_changes, make, elsewhere=elsewhere if elsewhere.read else None)
    found = _unit(change, values, gradients) or _unit(change, values, gradients, LATE)
    if not found:
        try:
            found = _unit(partial(change, far=True), values, gradients, 3 * len(SCALES))
        except JoinedElsewhere:
            raise
        except Exception:  # whatever it raises so late: a schedule of its own may have ended
            found = ""
    return found or (ELSEWHERE if elsewhere.read else ELEMENT)


def _unit(
    change: Callable[..., list[Like]], values: Like, gradients: Sequence[Like], steps: int = 0
) -> str:
    """A key of `WORDS`; "": in these steps it changes each element by its own gradient.

    Args:
        steps: 0: one for each of the gradients, and all parts are tried. Else parts of each kind.
    """
    many = [gradients[step % len(gradients)] for step in range(steps or len(gradients))]
    changed = change(values, many)
    if _differ(change(values, many), changed):
        return NOISE
    bits = range(1 if steps else len(values).bit_length())  # any two differ in one of them
    for bit, side in product(bits, (0, 1)):
        some = {name for n, name in enumerate(values) if n >> bit & 1 == side}
        alone = [{n: g * (n in some) for n, g in step.items()} for step in many]
        if _differ(change(values, alone), changed, some):
            return MODEL
    dims = range(max(value.ndim for value in values.values()))
    for dim, half in product(dims, (0,) if steps else (0, 1)):
        own, apart = ([_half(step, dim, half) for step in each] for each in (many, changed))
        if _differ(change(_half(values, dim, half), own), apart):
            return TENSOR
    return ""


def _drawn(value: Tensor, scales: tuple[float, float, float], draw: torch.Generator) -> Tensor:
    """A gradient whose mean is not 0, and which is of another size than other parameters'."""
    size = scales[2] * 4.0 ** float(torch.rand((), generator=draw) * 2 - 1)
    found: Tensor = size * (torch.randn(value.shape, dtype=value.dtype, generator=draw) + 0.5)
    for dim, scale in zip(range(value.ndim), scales[:2], strict=False):
        found.narrow(dim, 0, value.shape[dim] // 2).mul_(scale)
    return found


def _half(tensors: Like, dim: int, half: int) -> dict[str, Tensor]:
    """Half of each tensor along `dim`; with three rows or fewer, all of it: a half has two."""
    return {
        name: tensor.chunk(2, dim)[half] if tensor.ndim > dim and tensor.shape[dim] > 3 else tensor
        for name, tensor in tensors.items()
    }


def _changes(
    make: MakeOptimizer,
    values: Like,
    gradients: Sequence[Like],
    elsewhere: Elsewhere | None = None,
    far: bool = False,
) -> list[Like]:
    """The change that each step makes in parameters of these values.

    Args:
        far: whether its counters of steps are moved to `FAR` after the first `COUNTED`.
    """
    named, optimizer = _made(make, values)
    seen: list[dict[tuple[int, Any], tuple[dict[Any, Any], float]]] = []
    if elsewhere is not None:
        elsewhere.begin(named.values(), optimizer)
    changes: list[Like] = []
    for step in gradients:
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        for name, parameter in named.items():  # a copy: a step may clip gradients where they are
            parameter.grad = step[name].contiguous().clone()
        with nullcontext() if elsewhere is None else elsewhere:
            optimizer.step()
        changes.append({name: p.detach() - before[name] for name, p in named.items()})
        if far and len(changes) <= COUNTED:
            seen.append({(id(h), key): (h, number) for h, key, number in _numbers(optimizer)})
            if len(changes) == COUNTED:
                _move(seen, FAR - COUNTED)
    return changes


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[Any, Any], Any, float]]:
    """The numbers that an optimizer, or one that it wraps, keeps: the dict, the key, the value."""
    for kept in vars(optimizer).values():
        if isinstance(kept, torch.optim.Optimizer):
            yield from _numbers(kept)
    for holder in (vars(optimizer), *optimizer.param_groups, *optimizer.state.values()):
        for key, value in holder.items():
            single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
            if single or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield holder, key, float(value)


def _move(seen: Sequence[Mapping[Any, tuple[dict[Any, Any], float]]], steps: int) -> None:
    """Add steps to each number that was one more after each step: it counts them."""
    for place, (holder, _) in seen[-1].items():
        values = [numbers[place][1] for numbers in seen if place in numbers]
        if values == [values[0] + n for n in range(len(seen))]:
            holder[place[1]] = holder[place[1]] + steps


def _differ(
    found: Sequence[Like], expected: Sequence[Like], names: Collection[str] | None = None
) -> bool:
    """Whether changes differ beyond rounding in one of the names; None: in any."""
    for mine, theirs in zip(found, expected, strict=True):
        for name in mine if names is None else names:
            most = APART * theirs[name].abs().max() + ROUNDING
            if bool(((mine[name] - theirs[name]).abs() > most).any()):
                return True
    return False


def _made(
    make: MakeOptimizer, values: Like
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    named = {name: nn.Parameter(value.contiguous().clone()) for name, value in values.items()}
    if isinstance(make, ByName):
        return named, make.by_name([*named.items()])
    return named, make([*named.values()])


def optimizer_factor(optimizer: str | MakeOptimizer, graph: Graph | None = None) -> float:
    """Bytes of optimizer state per byte of parameters, measured by one step of small ones.

    Args:
        optimizer: the name of one in torch.optim, or a user's function.
        graph: the user's function gets parameters like this graph's. None: one matrix.
    """
    like: Like = {}
    if callable(optimizer) and graph is not None:
        like = measured_on(parameters_of(graph))
    values = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in (like or {"0.weight": _EXAMPLE}).items()
    }
    named, made = _made(optimizer_named(optimizer), values)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    held = sum(
        tensor.numel() * tensor.element_size()
        for state in made.state.values()
        for tensor in state.values()
        # A step counter does not grow with the parameter.
        if isinstance(tensor, Tensor) and tensor.numel() > 1
    )
    return held / sum(p.numel() * p.element_size() for p in named.values())
