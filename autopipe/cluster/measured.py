"""Measured figures of a machine, and the cluster that follows from them.

    Need            figures()          Record                   cluster_of
    dtypes   --->   fp32, memory,  --> fp32: 36e9, 22      -->  Device, Link
    kernels         launch, gelu       gelu: 5e-5, 4e8, ...

A record grows: a model that computes in bf16 adds one figure to what is known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopipe.cluster.checks import check
from autopipe.cluster.cluster import Cluster, Device, Group, Kernel, Link, NodeGroup, Pace
from autopipe.cluster.collective_time import Level, all_gather, all_reduce
from autopipe.cluster.spec import LocalSpec
from autopipe.errors import AutopipeError

DTYPES = ("fp32", "bf16", "fp16", "fp64")
"""Dtypes whose matmuls are measured, the first always."""

ATTENTION, CAUSAL_ATTENTION = "attention", "causal attention"
DROPOUT_ATTENTION = "attention with dropout"
ATTENTIONS = ATTENTION, CAUSAL_ATTENTION, DROPOUT_ATTENTION

MULTIPLYING = ("conv2d", "lstm", *ATTENTIONS)
"""Ops that multiply in kernels of their own: their pace in bf16 does not follow from a matmul's.
On an EPYC with AVX512_BF16 a matmul is 1.9 times as fast in bf16 as in fp32, the forward of an
attention 0.8 times and its backward 0.4 (GPT of `benchmarks/honesty`, torch 2.13)."""

KERNELS = (
    *("linear", *MULTIPLYING),
    *("layer_norm", "batch_norm", "softmax", "log_softmax", "cross_entropy_loss", "dropout"),
    *("gelu", "silu", "tanh", "sigmoid", "exp", "pow"),
    *(f"{kernel} in bf16" for kernel in MULTIPLYING),
)
"""Ops that a CPU does neither at the speed of its memory nor at that of a matmul; in fp32 where the
name does not say otherwise."""

LIKE = {
    **dict.fromkeys(("conv1d", "conv3d", "convolution"), "conv2d"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "conv2d"),
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu", "packed_rnn"), "lstm"),
    **dict.fromkeys("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split(), "linear"),
    **dict.fromkeys("columns addmm mm bmm matmul baddbmm linalg_matmul".split(), "linear"),
    **dict.fromkeys("inner tensordot _grouped_mm grouped_mm_fallback".split(), "linear"),
    "vocabulary_loss": "linear",
    **dict.fromkeys(("group_norm", "instance_norm", "rms_norm"), "layer_norm"),
    **dict.fromkeys(("_softmax", "_safe_softmax"), "softmax"),
    **dict.fromkeys(("log", "sin", "cos", "erf"), "exp"),
    "softplus": "sigmoid",
}
"""Ops whose pace is taken from a relative's, one of `KERNELS`."""


def kernel_in(kernel: str, dtype: str) -> str:
    """The name of a kernel's figure in a dtype; that of fp32 where it has no other."""
    own = f"{kernel} in {dtype}"
    return own if own in KERNELS else kernel


MEMORY, LAUNCH, MESSAGES, COLLECTIVES = "memory", "launch", "messages", "collectives"

WHOLE = 2**24
"""Bytes that the collectives sum or gather: about a bucket of gradients, or a block."""


@dataclass(frozen=True)
class Need:
    """The figures of a machine that the costs of a model need.

    Args:
        dtypes: dtypes of matrix products, in the words of `Device.flops`.
        kernels: names of ops, in the words of `Device.kernels`; unknown ones are left out.
    """

    dtypes: tuple[str, ...]
    kernels: tuple[str, ...]

    def __or__(self, other: Need) -> Need:
        """The figures that either need has."""
        dtypes, kernels = {*self.dtypes, *other.dtypes}, {*self.kernels, *other.kernels}
        return Need(tuple(sorted(dtypes)), tuple(sorted(kernels)))


EVERYTHING = Need(DTYPES, KERNELS)


@dataclass(frozen=True)
class Found:
    """One figure: the median of all processes.

    Args:
        values: by kind of figure

            fp32                 operations a second, and the dim that halves them
            bf16, fp16, fp64     operations a second
            memory               bytes a second
            launch               seconds of one small op, forward and backward
            gelu, ...            start and rate, forward and backward
            messages             latency and bytes a second
            collectives          seconds in which `WHOLE` bytes are summed, and are gathered

        rough: why the figure is rough, or why it has no values; empty: it is exact.
    """

    values: tuple[float, ...]
    rough: str = ""


@dataclass(frozen=True)
class Record:
    """All that is known of a machine.

    Args:
        key: the circumstances in which it holds.
        day: when the last figure was measured.
    """

    key: dict[str, str]
    figures: dict[str, Found] = field(default_factory=dict)
    day: str = ""


def figures(need: Need, processes: int, gpus: bool) -> tuple[str, ...]:
    """The names of the figures that answer a need, in the order in which they are measured.

    On a GPU ops are as fast as their bytes, so kernels need no figures; a single process needs no
    figures of messages.
    """
    dtypes = [dtype for dtype in DTYPES if dtype in need.dtypes or dtype == DTYPES[0]]
    kernels = [kernel for kernel in KERNELS if kernel in need.kernels and not gpus]
    between = (MESSAGES, COLLECTIVES) if processes > 1 else ()
    return DTYPES[0], MEMORY, LAUNCH, *between, *kernels, *dtypes[1:]


def checked(record: Record) -> Record:
    """The record, if a machine can have its figures.

    Raises:
        AutopipeError: it lacks a value, or has one that no machine has.
    """
    for name, found in record.figures.items():
        if len(found.values) != _LENGTHS.get(name, 0):
            raise AutopipeError(
                f"record.figures.{name}: expected {_LENGTHS.get(name, 'no such figure')} values, "
                f"found {len(found.values)}"
            )
    check(cluster_of({**_ANY, **record.figures}, LocalSpec(2), _LENGTHS, "cpu", 1, ""))
    return record


def cluster_of(
    found: Mapping[str, Found],
    local: LocalSpec,
    names: Iterable[str],
    kind: str,
    memory: int,
    source: str,
) -> Cluster:
    """Processes on this machine as a cluster, with the found figures called `names`.

    Args:
        found: has values of fp32, memory and launch, and of several processes messages. Another
            dtype, a kernel or the pace of collectives may have none.
        memory: bytes of a device.
    """
    asked = [name for name in names if name in found]
    names = [name for name in asked if found[name].values]
    rate, half = found[DTYPES[0]].values
    rates = {name: found[name].values[0] for name in names if name in DTYPES[1:]}
    device = Device(
        kind=kind,
        memory=memory,
        flops={DTYPES[0]: rate, **rates},
        bandwidth=found[MEMORY].values[0],
        # A step runs about as many ops backward as forward.
        launch=sum(found[LAUNCH].values) / 2,
        source=source,
        half=half,
        kernels={name: _kernel(found[name].values) for name in names if name in KERNELS},
        rough=_reasons({name: found[name].rough for name in asked if found[name].rough}),
    )
    link = _link(found, local.processes, device)
    return Cluster(local.name, (NodeGroup(1, (Group(local.processes, device),)),), link, link)


def _reasons(rough: Mapping[str, str]) -> tuple[str, ...]:
    """A sentence for each reason: `gelu, tanh: ...`."""
    names = defaultdict[str, list[str]](list)
    for name, why in rough.items():
        names[why].append(name)
    return tuple(f"{', '.join(alike)}: {why}" for why, alike in names.items())


def _kernel(values: tuple[float, ...]) -> Kernel:
    forward, rate, backward, back_rate = values
    return Kernel(Pace(forward, rate), Pace(backward, back_rate))


def _link(found: Mapping[str, Found], processes: int, device: Device) -> Link:
    """The link between processes; for a single process, its own memory."""
    if processes == 1:
        return Link(latency=0.0, bandwidth=device.bandwidth)
    latency, bandwidth = found[MESSAGES].values
    if COLLECTIVES not in found or not found[COLLECTIVES].values:
        return Link(latency, bandwidth)
    summed, gathered = found[COLLECTIVES].values
    ring = (Level(processes, Link(latency, math.inf)),)
    parts = WHOLE * (processes - 1) / processes

    def rate(seconds: float, rounds: int, latencies: float) -> float:
        """Bytes a second on the wire, without latency; noise where latency takes all the time."""
        return rounds * parts / max(seconds - latencies, seconds / 10)

    return Link(
        latency,
        bandwidth,
        rate(summed, 2, all_reduce(0.0, ring)),
        rate(gathered, 1, all_gather(0.0, ring)),
    )


_LENGTHS = {
    **dict.fromkeys((MEMORY, *DTYPES), 1),
    **dict.fromkeys((DTYPES[0], LAUNCH, MESSAGES, COLLECTIVES), 2),
    **dict.fromkeys(KERNELS, 4),
}
"""Values of each figure."""

_ANY = {
    DTYPES[0]: Found((1e9, 0.0)),
    MEMORY: Found((1e9,)),
    LAUNCH: Found((1e-6, 1e-6)),
    MESSAGES: Found((1e-6, 1e9)),
}
"""For figures that a record does not have yet, so that those it has can be checked."""
