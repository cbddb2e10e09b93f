"""Measures how fast one process computes: matmuls, memory, and ops bound by neither of these.

    matmul of (m, k) @ (k, n)    rate * m / (m + h) * k / (k + h) * n / (n + h)     h, rate fitted
                                 to linear layers, forward and backward: three of the same dims
    any other op                 start + operations / rate            from a small and a large one

An op is measured as a model runs it: its result is allocated, weights come from memory and not from
a cache, autograd records. Most ops are measured in a chain of themselves (`runtime.probe.chains`),
so that the cost of starting autograd's backward is shared by many ops.

A shared machine may be a tenth quicker in one second than in the next. So figures that are compared
are measured in turns, and a slow second affects all of them:

    turn     0 (warms up)    1          2                 each figure: the median of its column
             a  b  c  d      a b c d    a b c d    ...    until the budget is used up

Nothing is begun that would not end in time. A size grows from a small one, as long as the time of
each size says that the next one fits into the budget. A figure that has not reached its full
size is measured at the size that it has reached, and marked as rough.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import NamedTuple, TypeVar

import torch
from torch.nn import functional as F

from autopipe.cluster.measured import Found

T = TypeVar("T")

WINDOW = 0.05
"""Seconds of uninterrupted repetition that make one figure."""

TURNS = 5
"""Turns of which the median is taken, after one to warm up; fewer where time is short."""

COLD = 2**26
"""Bytes of the weights that matmuls use in turn, or of a chain: more than a core's caches hold."""


def now(device: torch.device) -> float:
    """The time in seconds, once `device` has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Budget:
    """A number of seconds from now on for measuring on a device.

    They are seconds with this process's share of the cores. While other processes take the cores,
    the budget's clock runs up to `STRETCH` times as slowly, so that their load cuts nothing short.

    Args:
        seconds: the budget.
        device: its work counts as well as the host's.
        crowd: how many times longer a process takes with its share of the cores than with a core of
            its own; None: wall-clock time counts, as where processes wait for each other.
    """

    def __init__(self, seconds: float, device: torch.device, crowd: float | None = None) -> None:
        self.seconds = seconds
        self.device = device
        self._crowd = None if device.type == "cuda" else crowd
        self._began = self._clocks()

    def _clocks(self) -> tuple[float, float]:
        return now(self.device), time.thread_time()

    def _since(self, before: tuple[float, float]) -> float:
        wall, own = (after - begin for after, begin in zip(self._clocks(), before, strict=True))
        return wall if self._crowd is None else max(own * self._crowd, wall / STRETCH)

    @property
    def left(self) -> float:
        """Seconds until it is used up; negative if it is overdrawn."""
        return self.seconds - self._since(self._began)

    def share(self, ops: int) -> float:
        """Seconds that each of `ops` ops may take in a turn."""
        return self.seconds / ops / (TURNS + 1)

    def taken(self, op: Callable[[], object]) -> float:
        """Call `op`; returns the seconds that it took on this budget's clock."""
        before = self._clocks()
        op()
        return self._since(before)


STRETCH = 3.0
"""The factor by which a budget may be exceeded on a machine that is busy with other work."""


def in_turns(
    ops: Sequence[Callable[[], T]], budget: Budget, expected: Sequence[float] = ()
) -> list[list[T]]:
    """Call the ops in turns; returns the results of each op.

    The first turn's results are left out if an op had more turns. An op gets no further turn if it
    would take longer than the budget has left.

    Args:
        expected: the seconds that each op will take; empty: each op gets at least one turn.
    """
    found: list[list[T]] = [[] for _ in ops]
    took = [*expected] or [-math.inf for _ in ops]
    for _ in range(TURNS + 1):
        for number, op in enumerate(ops):
            before = budget.left
            if took[number] <= before:
                found[number].append(op())
                took[number] = before - budget.left
    return [turns[1:] or turns for turns in found]


def window(op: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Mean seconds of a call of `op`, which is called at least once and for `seconds` seconds."""
    begin, calls = now(device), 0
    # `now` waits for the device each time: else a GPU's queue would get seconds of work in 1 ms.
    while not calls or now(device) - begin < seconds:
        op()
        calls += 1
    return (now(device) - begin) / calls


class Reached(NamedTuple):
    """The last step that a size has reached, and the seconds of one call there."""

    step: int
    seconds: float


def climb(
    steps: int,
    op: Callable[[int], Callable[[], object]],
    growth: float,
    budget: Budget,
    most: float,
) -> Reached:
    """Call `op(0)()`, `op(1)()`, ... while the next one is expected to take less than `most`.

    Args:
        steps: how many steps there are.
        op: makes the op of a step.
        growth: how many times longer a step takes than the one before it.
        most: seconds.
    """
    for step in range(steps):
        run = op(step)
        calls = [budget.taken(run)]
        while len(calls) < CALLS and sum(calls) + min(calls) < most:
            calls.append(budget.taken(run))  # the first call has more to do
        taken = min(calls)
        if min(most, budget.left) < taken * growth:
            break
    return Reached(step, taken)


CALLS = 3
"""Calls of a step, from the quickest of which the time of the next step is expected."""

# --- Matmuls -------------------------------------------------------------------------------------

Dims = tuple[int, int, int]

ON_CPU: tuple[Dims, ...] = ((32, 1024, 1024), (128, 256, 256), (256, 384, 1536), (1024, 768, 768))
ON_GPU: tuple[Dims, ...] = ((16384, 2048, 2048), (4096, 4096, 4096), (8192, 4096, 16384))
"""The (m, k, n) measured on a GPU, all large. An H200 spends its time in a layer of 256 rows on
launches, which are measured apart: a rate that was fitted to it made layers of 16,384 rows 1.2 to
3.9 times too long. The rate fitted to these is within 7 % from 16,384 x 2048 x 5632 on."""

SCALES = (16, 8, 4, 2, 1)
"""Divisors of the dims, from the first size to the full one."""


def matmuls(dtype: torch.dtype, budget: Budget, half: float | None = None) -> Found:
    """Operations a second of large matmuls, and the dim at which the rate is half of that.

    Args:
        half: that dim, if it is known already.
    """
    sizes = ON_CPU if budget.device.type == "cpu" else ON_GPU
    reached = [_reached(dims, dtype, budget) for dims in sizes]
    full = [timing for dims, timing in zip(sizes, reached, strict=True) if dims == timing[0]]
    layers = [LAYERS if LAYERS * seconds < budget.share(1) else 1 for _, seconds in full]
    ops = [
        _window_of(partial(_layers, dims, dtype, budget.device, count), budget)
        for (dims, _), count in zip(full, layers, strict=True)
    ]
    expected = [count * seconds for (_, seconds), count in zip(full, layers, strict=True)]
    # A layer without a turn for lack of time has the seconds of its last step.
    timings = [
        (dims, statistics.median(turns) / count if turns else seconds)
        for (dims, seconds), count, turns in zip(
            full, layers, in_turns(ops, budget, expected), strict=True
        )
    ]
    largest = max(reached, key=lambda timing: math.prod(timing[0]))
    rate, fitted = fit([(dims, seconds / 3) for dims, seconds in timings or [largest]], half)
    enough = len(sizes) if half is None else len(sizes) // 2
    late = f"out of time after {' x '.join(map(str, largest[0]))}"
    return Found((rate, fitted) if half is None else (rate,), "" if len(full) >= enough else late)


def _window_of(make: Callable[[], Callable[[], object]], budget: Budget) -> Callable[[], float]:
    """A function that measures a window of an op, and makes the op's tensors when first called."""
    made = cache(make)
    return lambda: window(made(), WINDOW, budget.device)


def _reached(dims: Dims, dtype: torch.dtype, budget: Budget) -> tuple[Dims, float]:
    """The dims that a layer has reached, and its seconds, forward and backward together."""

    def scaled(step: int) -> Dims:
        m, k, n = (max(1, dim // SCALES[step]) for dim in dims)
        return m, k, n

    def layer(step: int) -> Callable[[], object]:
        return _layers(scaled(step), dtype, budget.device, 1, cold=False)

    found = climb(len(SCALES), layer, 8, budget, budget.seconds / SHARE)
    return scaled(found.step), found.seconds


SHARE = 4
"""One layer may take 1 / SHARE of the budget to reach its size."""

LAYERS = 4
"""Linear layers in one call; each has three matmuls, with the same three dims in other roles."""


def _layers(
    dims: Dims, dtype: torch.dtype, device: torch.device, layers: int, *, cold: bool = True
) -> Callable[[], object]:
    """Forward and backward of some layers, without sums of gradients: costs count these apart."""
    m, k, n = dims
    x = torch.randn(m, k, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.randn(m, n, dtype=dtype, device=device)
    bias = torch.zeros(n, dtype=dtype, device=device, requires_grad=True)
    turns = -(-COLD // (layers * k * n * dtype.itemsize)) if cold else 1
    # To draw each weight by itself would take as long as the measurement.
    weights = torch.randn(n, k, dtype=dtype, device=device).repeat(turns, layers, 1, 1)
    own = [[weight.requires_grad_() for weight in some] for some in weights]
    turn = count()

    def run() -> object:
        some = own[next(turn) % turns]
        results = [F.linear(x, weight, bias) for weight in some]
        return torch.autograd.grad(results, [x, bias, *some], [gradient] * layers)

    return run


def fit(found: Sequence[tuple[Dims, float]], half: float | None = None) -> tuple[float, float]:
    """The (rate, half) for which seconds come nearest to those found, as ratios.

    seconds * rate = 2 m k n (1 + half / m) (1 + half / k) (1 + half / n)
    """

    def rates(half: float) -> list[float]:
        return [
            math.log(2 * math.prod(dim + half for dim in dims) / taken) for dims, taken in found
        ]

    if half is None:
        half = min(HALVES, key=lambda half: statistics.pvariance(rates(half)))
    return math.exp(statistics.fmean(rates(half))), half


HALVES = [0.0, *(2 ** (n / 4) for n in range(45))]
"""The candidates of `fit`: up to 2048, a quarter of an octave apart."""

# --- Memory --------------------------------------------------------------------------------------

BYTES = tuple(2**power for power in (20, 22, 24, 26))
"""Bytes of each of three tensors, on a GPU four times as many. The largest fit into no cache."""


def memory(budget: Budget) -> Found:
    """Bytes a second of an addition that reads two tensors and writes a third, all from memory."""
    times = 1 if budget.device.type == "cpu" else 4

    def addition(step: int) -> Callable[[], object]:
        left = torch.ones(times * BYTES[step] // 4, device=budget.device)
        right, out = torch.ones_like(left), torch.ones_like(left)
        return lambda: torch.add(left, right, out=out)

    step, seconds = climb(len(BYTES), addition, BYTES[1] / BYTES[0], budget, budget.seconds / 2)
    if step == len(BYTES) - 1:
        (turns,) = in_turns([_window_of(partial(addition, step), budget)], budget)
        seconds = statistics.median(turns)
    rough = "" if step == len(BYTES) - 1 else f"out of time after {times * BYTES[step] >> 20} MiB"
    return Found((3 * times * BYTES[step] / seconds,), rough)
