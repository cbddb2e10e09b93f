"""How long a step takes: kernels by the roofline, sums by their links, stages by the simulator.

    step = pipeline of (F, I, W) of each stage + sums of gradients + optimizer

The rates are those of `autopipe.presets`, the roofline is `autopipe.roofline`, exchanges are those
of `autopipe.communication`, and the pipeline is the schedule as `autopipe.simulate` walks it.
`Constants` has what these leave open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.communication import all_gather, all_reduce
from autopipe.roofline import kernel_seconds
from autopipe.schedule import Channel
from autopipe.simulate import Costs, Link
from benchmarks.published import pipeline
from benchmarks.published.machine import Machine
from benchmarks.published.rows import Run, Unsupported
from benchmarks.published.transformer import Kernel, Work, embedding, head, layer


@dataclass(frozen=True)
class Constants:
    """What the package's model does not know of the programs that published the runs; fitted.

    Args:
        flash, flash1: the rate of FlashAttention, and of its first version, as a share of a
            matmul's, forward and backward together.
        flash_newer: that share again on H100 and later, whose own instructions they do not use.
        misaligned: the rate of matmuls whose dims are no multiples of 8, so that rows do not begin
            at 16 bytes, as a share of the rate of others.
        gradients: the share of its links that a sum of gradients reaches.
        deepspeed: the share of its links that a sum of a layer's results reaches under DeepSpeed.
        wait: seconds for which such a sum of 8 ranks waits besides; of t ranks (t - 1) / 7 of it.
    """

    flash: float = 0.48
    flash1: float = 0.43
    flash_newer: float = 0.58
    misaligned: float = 0.38
    gradients: float = 0.63
    deepspeed: float = 0.5
    wait: float = 1e-3


FITTED = Constants()


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


def predict(run: Run, machine: Machine, constants: Constants = FITTED) -> Seconds:
    """The step of a run.

    Raises:
        Unsupported: the device has no rate for 16 bits.
    """
    rank = Rank(run, machine, constants)
    return Seconds(pipeline.seconds(run, rank.costs()), rank.gradients(), rank.optimizer())


@dataclass(frozen=True)
class Rank:
    """A rank of each stage, and what its seconds depend on."""

    run: Run
    machine: Machine
    constants: Constants

    def costs(self) -> Costs:
        """Seconds of F, I and W of every stage, and the links between them."""
        run, hop = self.run, self.machine.hop
        layers = pipeline.layers_of(run)
        found = [self._stage(number, count) for number, count in enumerate(layers)]
        forward, inputs, weights = zip(*found, strict=True)
        backward = [i + w for i, w in zip(inputs, weights, strict=True)]
        # Every tensor-parallel rank sends its part of what they all have (SC21, section 4.1).
        boundary = 2 * run.micro_batch * run.model.seq * run.model.hidden / run.tp
        link = Link(hop.latency, hop.bandwidth, boundary)

        def links(channel: Channel) -> Link:
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

    def _stage(self, number: int, layers: int) -> tuple[float, float, float]:
        """Seconds of F, I and W of one micro-batch."""
        run = self.run
        parts = [(layer(run), layers)]
        parts += [(embedding(run), 1)] if number == 0 else []
        parts += [(head(run), 1)] if number == run.stages - 1 else []
        forward, inputs, weights = 0.0, 0.0, 0.0
        for work, times in parts:
            f, i, w = self._work(work)
            forward, inputs, weights = forward + times * f, inputs + times * i, weights + times * w
        return forward, inputs, weights

    def _work(self, work: Work) -> tuple[float, float, float]:
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
        device, constants, share = self.machine.device, self.constants, 1.0
        dtype = next((name for name in ("bf16", "fp16") if name in device.flops), None)
        if dtype is None:
            raise Unsupported(f"{device.kind} has no rate for 16 bits")
        if kernel.what:
            share = constants.flash1 if kernel.what == "flash1" else constants.flash
            share *= constants.flash_newer if self.machine.newer else 1.0
        elif any(dim % 8 for dim in kernel.dims):
            share = constants.misaligned
        return kernel_seconds(
            device, dtype, kernel.flops / share, kernel.bytes, kernel.dims, kernel.times
        )

    def _exchanged(self, sums: tuple[float, ...]) -> float:
        """Seconds of sums over the tensor-parallel ranks."""
        run, constants = self.run, self.constants
        if run.tp == 1:
            return 0.0
        seconds = sum(all_reduce(size, self.machine.tensor) for size in sums)
        if run.framework != "deepspeed":
            return seconds
        return seconds / constants.deepspeed + len(sums) * constants.wait * (run.tp - 1) / 7

    def _owned(self) -> float:
        """Weights of the rank that has most."""
        run, layers = self.run, pipeline.layers_of(self.run)
        owned = [count * layer(run).parameters for count in layers]
        owned[0] += embedding(run).parameters
        owned[-1] += head(run).parameters
        return max(sum(owned[rank :: run.pp]) for rank in range(run.pp))


MATRICES = 4
"""Matrices of a layer: qkv, out, up and down."""
