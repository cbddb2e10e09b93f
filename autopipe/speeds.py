"""How fast one process computes: matmuls, memory, and the ops that are as fast as neither.

    matmul of (m, k) @ (k, n)    rate * m / (m + h) * k / (k + h) * n / (n + h)     h, rate fitted
                                 to linear layers, forward and backward: three of the same dims
    any other op                 start + operations / rate            from a small and a large one

What is measured is what a model does: results are allocated, weights come from memory and not from
a cache, autograd records. An op is measured in a chain of itself, x -> f(x) -> f(f(x)), so that
asking autograd for its backward counts once for many; and behind a matmul, as ops of a model are,
which has taken the caches for its weights. An op that follows itself starts in half the time.

    forward     matmul  f  matmul  f  matmul  f       f takes what passes between
    backward    f  matmul  f  matmul  f  matmul       the gradient of its result and of the matmul's

A shared machine is a tenth quicker in one second than in the next, and what is compared is measured
in turns, so that a slow second is in every figure alike:

    round    0 (warms up)    1          2                 each figure: the median of its column
             a  b  c  d      a b c d    a b c d    ...
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.cluster import Kernel, Pace

WINDOW = 0.05
"""Seconds of uninterrupted repetition that make one figure."""

WINDOWS = 5
"""Windows of which the median is taken, after one to warm up."""

SHORT = 0.01
"""The same for one op of many, with what stands between: all of them together take seconds."""

COLD = 2**26
"""Bytes of weights that are used in turn, or of a chain: more than a core's share of the caches."""


def now(device: torch.device) -> float:
    """The clock, once all that was asked of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(ops: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of one call of each of `ops`, in turns."""
    rounds = [[_window(op, device) for op in ops] for _ in range(WINDOWS + 1)]
    return [statistics.median(column) for column in zip(*rounds[1:], strict=True)]


def _window(op: Callable[[], object], device: torch.device) -> float:
    begin, calls = now(device), 0
    # Asked of the device each time: a GPU's queue takes seconds of work in a millisecond.
    while now(device) - begin < WINDOW:
        op()
        calls += 1
    return (now(device) - begin) / calls


# --- Matmuls -------------------------------------------------------------------------------------

Dims = tuple[int, int, int]

ON_CPU: tuple[Dims, ...] = ((32, 1024, 1024), (128, 256, 256), (256, 384, 1536), (1024, 768, 768))
ON_GPU: tuple[Dims, ...] = ((256, 1024, 1024), (1024, 2048, 2048), (4096, 4096, 4096))


def matmuls(
    dtype: torch.dtype, device: torch.device, half: float | None = None
) -> tuple[float, float]:
    """Operations a second of large matmuls, and the dim that halves them; `half` if it is known."""
    sizes = ON_CPU if device.type == "cpu" else ON_GPU
    found = seconds([_layers(dims, dtype, device) for dims in sizes], device)
    each = [taken / (3 * LAYERS) for taken in found]
    return fit(list(zip(sizes, each, strict=True)), half)


LAYERS = 4
"""Linear layers of which one call is made: three matmuls each, of the same dims in other places."""


def _layers(dims: Dims, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Forward and backward of some layers. Nothing is added to gradients: costs have that apart."""
    m, k, n = dims
    x = torch.randn(m, k, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.randn(m, n, dtype=dtype, device=device)
    bias = torch.zeros(n, dtype=dtype, device=device, requires_grad=True)
    turns = -(-COLD // (LAYERS * k * n * dtype.itemsize))
    weights = torch.randn(turns, LAYERS, n, k, dtype=dtype, device=device)
    layers = [[weight.requires_grad_() for weight in some] for some in weights]
    turn = count()

    def run() -> object:
        own = layers[next(turn) % turns]
        results = [F.linear(x, weight, bias) for weight in own]
        return torch.autograd.grad(results, [x, bias, *own], [gradient] * LAYERS)

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

# --- Memory and launches -------------------------------------------------------------------------


def memory(device: torch.device) -> float:
    """Bytes a second of an addition that reads two tensors and writes one, none in a cache."""
    size = 2**26 if device.type == "cpu" else 2**28
    left = torch.ones(size // 4, device=device)
    right, out = torch.ones_like(left), torch.ones_like(left)
    (each,) = seconds([lambda: torch.add(left, right, out=out)], device)
    return 3 * size / each


def launch(device: torch.device) -> tuple[float, float]:
    """Seconds of one addition of 8 numbers that autograd records, and of its backward.

    It is called as a stage's graph calls it, some in a row: what does next to nothing in a model
    (views, additions) comes in groups of three to five between two matmuls.
    """
    add = torch.ops.aten.add.Tensor

    def group(x: Tensor) -> Tensor:
        for _ in range(GROUP):
            x = add(x, 1.0)
        return x

    chain = Chain(group, torch.ones(8, device=device), 16)
    ((forward, backward),) = chained([chain], device, WINDOW)
    return forward / GROUP, backward / GROUP


GROUP = 4
"""Ops in a row of which the launch is measured."""

# --- Other ops -----------------------------------------------------------------------------------

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Subject:
    """An op to measure on tensors of `shape` with more and more rows before it.

    Args:
        make: the function, of one tensor to another of the same shape.
        rows: few, which is nearly all start, and many.
        operations: of a row, forward and backward; None: one an element.
    """

    make: Callable[[torch.device], Function]
    shape: tuple[int, ...]
    rows: tuple[int, int] = (4, 512)
    operations: tuple[float, float] | None = None


def _plain(function: Function) -> Callable[[torch.device], Function]:
    return lambda device: function


def _linear(device: torch.device) -> Function:
    return nn.Linear(64, 64, device=device)


def _convolution(device: torch.device) -> Function:
    return nn.Conv2d(64, 64, 3, padding=1, device=device)


def _recurrent(device: torch.device) -> Function:
    lstm = nn.LSTM(256, 256, batch_first=True, device=device)

    def run(x: Tensor) -> Tensor:
        found: Tensor = lstm(x)[0]
        return found

    return run


def _norm(device: torch.device) -> Function:
    return nn.LayerNorm(512, device=device)


def _batch_norm(device: torch.device) -> Function:
    return nn.BatchNorm2d(64, device=device)


def _attention(*, causal: bool = False, dropout: float = 0.0) -> Callable[[torch.device], Function]:
    return lambda device: (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal, dropout_p=dropout)
    )


def _entropy(device: torch.device) -> Function:
    """Of 512 classes; the result is spread over the logits' shape again, at no cost."""

    def run(x: Tensor) -> Tensor:
        targets = torch.zeros(len(x), dtype=torch.int64, device=device)
        return F.cross_entropy(x, targets).expand(x.shape)

    return run


_HEADS, _TOKENS, _HEAD = 4, 128, 64
_SCORES = 4.0 * _HEADS * _TOKENS * _TOKENS * _HEAD
_FILTERS = 2.0 * 16 * 16 * 64 * 64 * 9
_CELLS = 2.0 * 32 * (256 + 256) * 1024
_SEQUENCES = (_HEADS, _TOKENS, _HEAD)

SUBJECTS = {
    "linear": Subject(_linear, (4, 64), (1, 2), (0.0, 0.0)),
    "conv2d": Subject(_convolution, (64, 16, 16), (1, 8), (_FILTERS, 2 * _FILTERS)),
    "lstm": Subject(_recurrent, (32, 256), (1, 8), (_CELLS, 2 * _CELLS)),
    "attention": Subject(_attention(), _SEQUENCES, (1, 4), (_SCORES, 2.5 * _SCORES)),
    "causal attention": Subject(
        _attention(causal=True), _SEQUENCES, (1, 4), (_SCORES / 2, 1.25 * _SCORES)
    ),
    "attention with dropout": Subject(
        _attention(dropout=0.1), _SEQUENCES, (1, 4), (_SCORES, 2.5 * _SCORES)
    ),
    "layer_norm": Subject(_norm, (512,)),
    "batch_norm": Subject(_batch_norm, (64, 16, 16), (1, 16)),
    "softmax": Subject(_plain(lambda x: F.softmax(x, -1)), (512,)),
    "log_softmax": Subject(_plain(lambda x: F.log_softmax(x, -1)), (512,)),
    "cross_entropy_loss": Subject(_entropy, (512,)),
    "dropout": Subject(_plain(F.dropout), (512,)),
    "gelu": Subject(_plain(F.gelu), (512,)),
    "silu": Subject(_plain(F.silu), (512,)),
    "tanh": Subject(_plain(torch.tanh), (512,)),
    "sigmoid": Subject(_plain(torch.sigmoid), (512,)),
    "exp": Subject(_plain(lambda x: torch.exp(-x)), (512,)),
    "pow": Subject(_plain(lambda x: torch.pow(x, 3.0)), (512,)),
}
"""What models are made of that a CPU does not do at the speed of its memory."""


def kernels(device: torch.device) -> dict[str, Kernel]:
    """The pace of each op of `SUBJECTS`; none on a GPU, where they are as fast as their bytes."""
    if device.type != "cpu":
        return {}
    chains = [chain for subject in SUBJECTS.values() for chain in _chains(subject, device)]
    found = chained(chains, device, SHORT)
    pairs = zip(SUBJECTS.items(), found[::2], found[1::2], strict=True)
    return {name: _kernel(subject, small, large) for (name, subject), small, large in pairs}


def _chains(subject: Subject, device: torch.device) -> list[Chain]:
    """Of few rows, and of many.

    What a step makes is read again in its backward, when it is in no cache any more. An op that
    takes as long as its elements is measured so; what computes for longer does not notice.
    """
    function = subject.make(device)
    few, many = (torch.rand(rows, *subject.shape, device=device) for rows in subject.rows)
    long = 4 if subject.operations else COLD // 2 // many.nbytes  # as much again stands between
    return [Chain(function, few, 8), Chain(function, many, long)]


def _kernel(subject: Subject, small: tuple[float, float], large: tuple[float, float]) -> Kernel:
    few, many = subject.rows
    operations = subject.operations or (float(math.prod(subject.shape)),) * 2
    return Kernel(
        *(pace(few * n, a, many * n, b) for n, a, b in zip(operations, small, large, strict=True))
    )


def pace(few: float, short: float, many: float, long: float) -> Pace:
    """The pace that takes `short` seconds for `few` operations and `long` for `many`."""
    if many == few:
        return Pace(short)
    # Noise can make few operations the slower ones; then all of it is start.
    each = max(long - short, long / 10) / (many - few)
    return Pace(max(short - few * each, 0.0), 1 / each)


@dataclass(frozen=True)
class Chain:
    """`ops` functions in a row, from `x` on."""

    function: Function
    x: Tensor
    ops: int


def chained(
    chains: Sequence[Chain], device: torch.device, window: float
) -> list[tuple[float, float]]:
    """Seconds of one function of each chain, and of its backward; the chains take turns."""
    rounds = [[_round(chain, device, window) for chain in chains] for _ in range(WINDOWS + 1)]
    return [
        (statistics.median(f for f, _ in column), statistics.median(b for _, b in column))
        for column in zip(*rounds[1:], strict=True)
    ]


def _round(chain: Chain, device: torch.device, window: float) -> tuple[float, float]:
    once = _among_matmuls if device.type == "cpu" else _queued
    begin = now(device)
    passes: list[tuple[float, float]] = []
    while not passes or now(device) - begin < window:
        passes.append(once(chain, device))
    forward, backward = (statistics.fmean(way) / chain.ops for way in zip(*passes, strict=True))
    return forward, backward


def _queued(chain: Chain, device: torch.device) -> tuple[float, float]:
    """All of a chain's functions, and their backwards: a device that queues has no time of one."""
    value = chain.x.detach().requires_grad_()
    begin = now(device)
    for _ in range(chain.ops):
        value = chain.function(value)
    middle = now(device)
    torch.autograd.backward(value, torch.ones_like(value))
    return middle - begin, now(device) - middle


TOKENS, WIDTH, TURNS = 128, 256, 8
"""Of the matmuls between ops: small; their weights, 2 MiB, are more than a core's own cache."""


def _among_matmuls(chain: Chain, device: torch.device) -> tuple[float, float]:
    """The same, without the matmuls that stand between.

    Autograd runs what was recorded last first, so that the matmul's gradient is asked for when the
    function behind it is through. Hooks note when.
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
    """With gradients to add to, as in all micro-batches but the first."""
    found = []
    for _ in range(TURNS):
        weight = (torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5).requires_grad_()
        weight.grad = torch.zeros_like(weight)
        found.append(weight)
    return tuple(found)
