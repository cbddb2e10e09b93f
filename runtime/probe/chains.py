"""Measures one op in a chain of itself, between matmuls as in a model.

    forward     matmul  f  matmul  f  matmul  f       the time of each f, of the op, is measured
    backward    f  matmul  f  matmul  f  matmul       and that of its gradient

The matmuls fill the caches with their weights, as in a model. Backward reads the results of forward
when no cache holds them any longer, so a chain of an op that is bound by memory is long enough for
its tensors to exceed the caches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.cluster.cluster import Pace
from autopipe.cluster.measured import Found
from autopipe.runtime.probe.microbench import COLD, WINDOW, Budget, climb, in_turns, now
from autopipe.runtime.probe.subjects import SUBJECTS, Function, Subject

SHORT = 0.01
"""Seconds for which a chain is repeated in a turn, matmuls included, when many ops are measured."""

OPS = 8
"""The ops of a chain with few rows, and of a chain of an op that is bound by computing."""

Both = tuple[float, float]
"""Seconds forward and backward."""


@dataclass(frozen=True)
class Chain:
    """`ops` calls of `function` in a row, the first one of `x`."""

    function: Function
    x: Tensor
    ops: int


def warm_up(device: torch.device) -> None:
    """Run a small chain, so that libraries load now what they load at first use."""
    run(Chain(torch.tanh, torch.ones(8, device=device), 2), device)


def launch(budget: Budget) -> Found:
    """Seconds of one addition of 8 numbers that autograd records, and of its backward.

    Several additions run in a row, since in a model such cheap ops (views, additions) come in
    groups of three to five between two matmuls.
    """
    add = torch.ops.aten.add.Tensor

    def group(x: Tensor) -> Tensor:
        for _ in range(GROUP):
            x = add(x, 1.0)
        return x

    chain = Chain(group, torch.ones(8, device=budget.device), 16)
    cut = _cut(chain, budget, budget.share(1))
    ((forward, backward),) = _medians([cut], budget, WINDOW)
    return Found((forward / GROUP, backward / GROUP), _late(chain, cut))


GROUP = 4
"""Additions in a row when launches are measured."""


def kernels(names: Sequence[str], budget: Budget) -> dict[str, Found]:
    """The pace of each of these ops: start and rate forward, then backward; within one budget."""
    pairs = [_pair(SUBJECTS[name], budget, len(names)) for name in names]
    found = _medians([chain for pair in pairs for chain in pair], budget, SHORT)
    return {
        name: _pace(SUBJECTS[name], pair, few, many)
        for name, pair, few, many in zip(names, pairs, found[::2], found[1::2], strict=True)
    }


def _pair(subject: Subject, budget: Budget, of: int) -> tuple[Chain, Chain]:
    """A subject's chains of few rows and of many, or of as many as its share of the budget allows.

    Args:
        of: the number of subjects that share the budget.
    """
    function, device = subject.function(budget.device), budget.device
    few, many = subject.rows
    sizes = [few]
    while sizes[-1] < many:
        sizes.append(min(many, 4 * sizes[-1]))

    def rows(step: int) -> Tensor:
        return torch.rand(sizes[step], *subject.shape, dtype=subject.dtype, device=device)

    def one(step: int) -> Callable[[], object]:
        chain = Chain(function, rows(step), 1)
        return lambda: run(chain, device)

    x = rows(climb(len(sizes), one, 4, budget, budget.seconds / of).step)
    # The matmuls' results take as many bytes again. Ops bound by computing need no long chain.
    ops = OPS if subject.operations else max(1, COLD // 2 // x.nbytes)
    short, long = Chain(function, rows(0), OPS), Chain(function, x, ops)
    return _cut(short, budget, budget.share(of)), _cut(long, budget, budget.share(of))


def _cut(chain: Chain, budget: Budget, share: float) -> Chain:
    """The chain with only as many ops as run in `share` seconds."""
    single = replace(chain, ops=1)
    _, taken = climb(1, lambda _: lambda: run(single, budget.device), 1, budget, share)
    return replace(chain, ops=max(1, min(chain.ops, int(share / taken))))


def _late(wanted: Chain, cut: Chain) -> str:
    return "out of time after one op" if cut.ops == 1 < wanted.ops else ""


def _pace(subject: Subject, pair: tuple[Chain, Chain], small: Both, large: Both) -> Found:
    few, many = (len(chain.x) for chain in pair)
    operations = subject.operations or (float(math.prod(subject.shape)),) * 2
    columns = zip(operations, small, large, strict=True)
    paces = [pace(few * each, short, many * each, long) for each, short, long in columns]
    values = tuple(value for pace in paces for value in (pace.start, pace.rate))
    wanted = subject.rows[1]
    late = f"out of time after {many} of {wanted} rows" if many < wanted else ""
    return Found(values, late)


def pace(few: float, short: float, many: float, long: float) -> Pace:
    """The pace that takes `short` seconds for `few` operations and `long` for `many`."""
    if not many:
        return Pace(short)
    if many == few:
        return Pace(0.0, many / long)
    # By noise `short` may exceed `long`; the rate then takes a tenth of `long`.
    each = max(long - short, long / 10) / (many - few)
    return Pace(max(short - few * each, 0.0), 1 / each)


def _medians(chains: Sequence[Chain], budget: Budget, window: float) -> list[Both]:
    """Median seconds of one call in each chain, and of its backward; the chains take turns."""

    def repeated(chain: Chain) -> Callable[[], Both]:
        return lambda: repeat(chain, budget.device, window)

    turns = in_turns([repeated(chain) for chain in chains], budget)
    return [
        (statistics.median(f for f, _ in column), statistics.median(b for _, b in column))
        for column in turns
    ]


def repeat(chain: Chain, device: torch.device, window: float) -> Both:
    """Seconds of one call in a chain, and of its backward, from `window` seconds of repetition."""
    begin = now(device)
    passes: list[Both] = []
    while not passes or now(device) - begin < window:
        passes.append(run(chain, device))
    forward, backward = (statistics.fmean(way) / chain.ops for way in zip(*passes, strict=True))
    return forward, backward


def run(chain: Chain, device: torch.device) -> Both:
    """Seconds of all calls in a chain, and of their backwards, without the matmuls."""
    return _among_matmuls(chain, device) if device.type == "cpu" else _queued(chain, device)


def _queued(chain: Chain, device: torch.device) -> Both:
    """As `run` on a GPU, where work is queued: only the whole chain can be timed, not one op."""
    value = chain.x.detach().requires_grad_()
    begin = now(device)
    for _ in range(chain.ops):
        value = chain.function(value)
    middle = now(device)
    torch.autograd.backward(value, torch.ones_like(value))
    return middle - begin, now(device) - middle


TOKENS, WIDTH, TURNS = 128, 256, 8
"""Rows, width and number of the matmuls between ops; 2 MiB of weights exceed a core's cache."""


def _among_matmuls(chain: Chain, device: torch.device) -> Both:
    """As `run` on a CPU: each op is timed by itself, between two matmuls.

    Autograd runs backward in the reverse order, so the gradient of a matmul's result arrives when
    the op behind it is done. Hooks note the times.
    """
    weights = _weights(device)
    x, other = chain.x.detach().requires_grad_(), torch.ones(TOKENS, WIDTH, device=device)
    forward, reached = 0.0, list[float]()

    def note(gradient: Tensor) -> None:
        reached.append(now(device))

    for number in range(chain.ops):
        other = F.linear(other, weights[number % TURNS])
        other.register_hook(note)  # type: ignore[no-untyped-call]
        begin = now(device)
        x = chain.function(x)
        forward += now(device) - begin
        x.register_hook(note)  # type: ignore[no-untyped-call]
    torch.autograd.backward([x, other], [torch.ones_like(x), torch.ones_like(other)])
    return forward, sum(matmul - op for op, matmul in zip(reached[::2], reached[1::2], strict=True))


@cache
def _weights(device: torch.device) -> tuple[Tensor, ...]:
    """The matmuls' weights, with gradients to add to, as in all micro-batches but the first."""
    found = []
    for _ in range(TURNS):
        weight = (torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5).requires_grad_()
        weight.grad = torch.zeros_like(weight)
        found.append(weight)
    return tuple(found)
