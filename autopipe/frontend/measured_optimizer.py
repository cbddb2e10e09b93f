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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.optim import optimizer as steps

from autopipe.errors import AutopipeError
from autopipe.frontend import user_lines
from autopipe.frontend.optimizer import (
    Elsewhere,
    JoinedElsewhere,
    MakeOptimizer,
    Named,
    kind_named,
    optimizer_named,
    way_to_step,
)
from autopipe.frontend.optimizer_trials import (
    SCALES,
    Like,
    Steps,
    differ,
    drawn,
    half,
    made,
    stepped,
)
from autopipe.ir.graph import Graph, shape_at
from autopipe.ir.tensors import tensors_in
from autopipe.util import seeding

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

_EXAMPLE = torch.empty(SIZE, SIZE, dtype=torch.float32, device="meta")

LATE = 30
"""Steps after which an optimizer's warm-up is over (Shampoo's is 25 steps by default)."""

LATE_SIZE = 1e-3
"""How many times as large gradients are in these steps: as small as those of a large model, so that
a change which is divided by a mean of them is not lost beside the rest."""


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
    values, gradients = drawn(like)
    gradients = stepped(make, values, gradients, elsewhere, aims=True).gradients
    step = partial(stepped, make, elsewhere=elsewhere if elsewhere.read else None)
    small = [{name: LATE_SIZE * g for name, g in each.items()} for each in gradients]
    found = _unit(step, values, gradients) or _unit(step, values, small, LATE)
    if not found:
        try:
            found = _unit(partial(step, far=True), values, gradients, 3 * len(SCALES))
        except JoinedElsewhere:
            raise
        except Exception:  # whatever it raises so late: a schedule of its own may have ended
            found = ""
    return found or (ELSEWHERE if elsewhere.read else ELEMENT)


def _unit(
    step: Callable[..., Steps], values: Like, gradients: Sequence[Like], steps: int = 0
) -> str:
    """A key of `WORDS`; "": in these steps it changes each element by its own gradient.

    Args:
        steps: 0: one for each of the gradients, and all parts are tried. Else parts of each kind.
    """
    many = [gradients[number % len(gradients)] for number in range(steps or len(gradients))]
    whole = step(values, many)
    changed = whole.changes
    if differ(step(values, many).changes, changed):
        return NOISE
    bits = range(1 if steps else len(values).bit_length())  # any two differ in one of them
    for bit, side in product(bits, (0, 1)):
        some = {name for n, name in enumerate(values) if n >> bit & 1 == side}
        alone = [{n: g * (n in some) for n, g in each.items()} for each in many]
        if differ(step(values, alone).changes, changed, some):
            return MODEL
    if not steps and _differs_alone(step, values, many, whole):
        return MODEL
    dims = range(max(value.ndim for value in values.values()))
    for dim, which in product(dims, (0,) if steps else (0, 1)):
        own, apart = ([half(each, dim, which) for each in of] for of in (many, changed))
        if differ(step(half(values, dim, which), own).changes, apart):
            return TENSOR
    return ""


def _differs_alone(
    step: Callable[..., Steps], values: Like, gradients: Sequence[Like], whole: Steps
) -> bool:
    """Whether some parameters change otherwise where the others are not there, as on a rank of a
    pipeline. What has other settings for them then is found on ranks (`refuse_others`)."""
    names = [*values]
    for some in (names[: len(names) // 2], names[len(names) // 2 :]):
        own = [{name: each[name] for name in some} for each in (values, *gradients)]
        try:
            alone = step(own[0], own[1:])
        except JoinedElsewhere:
            raise
        except Exception:  # one of no parameters; or it looks for a name
            continue
        same = [name for name in some if alone.settings[name] == whole.settings[name]]
        if differ(alone.changes, whole.changes, same):
            return True
    return False


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
    named, optimizer_made = made(optimizer_named(optimizer), values)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer_made.step()
    held = sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors_in([*optimizer_made.state.values()])
        # A step counter does not grow with the parameter.
        if tensor.numel() > 1
    )
    return held / sum(p.numel() * p.element_size() for p in named.values())
