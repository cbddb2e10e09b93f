"""How long a step takes: kernels by the roofline, sums by their links, stages by the simulator.

    step = pipeline of (F, I, W) of each stage + sums of gradients + optimizer

The rates are those of `cluster.datasheets`, the roofline is `ir.op_seconds`, exchanges are
those of `cluster.collective_time`, and the pipeline is the schedule as `schedules.simulate` walks
it. `constants.py` has what these leave open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.cluster.collective_time import all_gather, all_reduce
from autopipe.cluster.efficiency import STEADY, STEADY_NEWER
from autopipe.ir.op_seconds import kernel_seconds
from autopipe.schedules.instructions import Channel
from autopipe.schedules.simulate import Costs, LinkTime
from benchmarks.published import pipeline
from benchmarks.published.constants import Constants
from benchmarks.published.machine import Machine
from benchmarks.published.rows import Run, Unsupported
from benchmarks.published.transformer import Kernel, Parts, Work, parts_of


@dataclass(frozen=True)
class Seconds:
    """A step by what it is spent on: pipeline with its bubble, sums of gradients, optimizer."""

    pipeline: float
    gradients: float
    optimizer: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.pipeline + self.gradients + self.optimizer


def predict(run: Run, machine: Machine, constants: Constants) -> Seconds:
    """The step of a run.

    Raises:
        Unsupported: the device has no rate for 16 bits.
    """
    rank = Rank(run, machine, parts_of(run), constants)
    return Seconds(pipeline.seconds(run, rank.costs()), rank.gradients(), rank.optimizer())


@dataclass(frozen=True)
class Rank:
    """A rank of each stage, and what its seconds depend on."""

    run: Run
    machine: Machine
    parts: Parts
    constants: Constants

    def costs(self) -> Costs:
        """Seconds of F, I and W of every stage, and the links between them."""
        run, hop = self.run, self.machine.hop
        layers = pipeline.layers_of(run)
        each, first, last = map(self._work, self.parts)
        forward, inputs, weights = ([count * part for count in layers] for part in each)
        for sums, more, most in zip((forward, inputs, weights), first, last, strict=True):
            sums[0] += more
            sums[-1] += most
        backward = [i + w for i, w in zip(inputs, weights, strict=True)]
        # Every tensor-parallel rank sends its part of what they all have (SC21, section 4.1).
        boundary = 2 * run.micro_batch * run.model.seq * run.model.hidden / run.tp
        link = LinkTime(hop.latency, hop.bandwidth, boundary)

        def links(channel: Channel) -> LinkTime:
            return link

        return Costs(forward, backward, inputs, weights, [0.0] * run.stages, links)

    def gradients(self) -> float:
        """Seconds of summing gradients over data-parallel ranks, and those of tied embeddings.

        FSDP's and ZeRO-3's are part of backward. Others begin when the pipeline has ended; a
        reduce-scatter and an all-gather of weights in 16 bits, as under ZeRO-1, or an all-reduce.
        """
        run, machine, found = self.run, self.machine, 0.0
        if run.dp > 1 and run.sharding < 3 and run.framework != "fsdp":
            scattered = all_gather(run.gradient_bytes * self._owned(), machine.data)
            found += (
                scattered + all_gather(2 * self._owned(), machine.data)
            ) / self.constants.gradients
        if run.model.tied and run.pp > 1:
            size = run.gradient_bytes * run.model.embedding_parameters / run.tp
            found += machine.hop.latency + size / machine.hop.bandwidth
        return found

    def optimizer(self) -> float:
        """Seconds of Adam: it reads and writes its state.

        fp32 weight and two moments 24 bytes, gradient for its norm and for the update 8, weight in
        16 bits 2; or all four in 16 bits, 14.
        """
        shards = self.run.dp if self.run.sharding else 1
        each = 14 if self.run.pure else 34
        return each * self._owned() / shards / self.machine.device.bandwidth

    def _work(self, work: Work) -> tuple[float, float, float]:
        """Seconds of F, I and W of one micro-batch."""
        forward = self._beside(self._kernels(work.forward), self._exchanged(work.sums_forward))
        inputs = self._beside(
            self._kernels(work.backward_input), self._exchanged(work.sums_backward)
        )
        weights = self._kernels(work.backward_weight)
        if self.run.framework == "fsdp" or self.run.sharding == 3:
            return self._gathered(work, forward, inputs + weights)
        return forward, inputs, weights

    def _beside(self, computing: float, exchanging: float) -> float:
        if self.run.async_tp:
            return max(computing, exchanging)
        return computing + exchanging

    def _gathered(self, work: Work, forward: float, backward: float) -> tuple[float, float, float]:
        """Weights are gathered for each pass, gradients scattered.

        FSDP does it beside computing. DeepSpeed's ZeRO-3 of 2021 does not, and gathers each of a
        layer's four matrices by itself on a ring through all ranks, with the latency of each hop.
        """
        run, levels = self.run, self.machine.data
        gather = all_gather(2 * work.parameters, levels) / self.constants.gradients
        if run.framework == "deepspeed" and levels:
            gather += MATRICES * (run.dp - 1) * levels[-1].link.latency
            return forward + gather, backward + 2 * gather, 0.0
        scatter = gather * run.gradient_bytes / 2
        back = scatter + (gather if run.sharding == 3 else 0.0)
        return max(forward, gather), max(backward, back), 0.0

    def _kernels(self, kernels: Iterable[Kernel]) -> float:
        return sum(map(self._kernel, kernels))

    def _kernel(self, kernel: Kernel) -> float:
        device, constants, newer = self.machine.device, self.constants, self.machine.newer
        dtype = next((name for name in ("bf16", "fp16") if name in device.flops), None)
        if dtype is None:
            raise Unsupported(f"{device.kind} has no rate for 16 bits")
        share = constants.steady_newer / STEADY_NEWER if newer else constants.steady / STEADY
        if kernel.what:
            share *= constants.flash1 if kernel.what == "flash1" else constants.flash
            share *= constants.flash_newer if newer else 1.0
        elif kernel.dims:
            share *= (min(map(_alignment, kernel.dims)) / ALIGNED) ** constants.misaligned
        return kernel_seconds(
            device, dtype, kernel.flops / share, kernel.bytes, kernel.dims, kernel.times
        )

    def _exchanged(self, sums: tuple[float, ...]) -> float:
        """Seconds of sums over the tensor-parallel ranks."""
        waits = 0.0
        if self.run.framework == "deepspeed":
            waits = len(sums) * self.constants.wait * (self.run.tp - 1) / 7
        return waits + sum(all_reduce(size, self.machine.tensor) for size in sums)

    def _owned(self) -> float:
        """Weights of the rank that has most."""
        run, layers = self.run, pipeline.layers_of(self.run)
        owned = [count * self.parts.layer.parameters for count in layers]
        owned[0] += self.parts.embedding.parameters
        owned[-1] += self.parts.head.parameters
        return max(sum(owned[rank :: run.pp]) for rank in range(run.pp))


MATRICES = 4
"""Matrices of a layer: qkv, out, up and down."""

ALIGNED = 64
"""Elements of 16 bits in the 128 bytes by which A100 and later read memory."""


def _alignment(dim: float) -> float:
    """The largest power of two that divides a dim, at most `ALIGNED`; dims are whole numbers."""
    whole = round(dim)
    return min(whole & -whole, ALIGNED) if whole else ALIGNED
