"""How long a step takes: kernels by the roofline, sums by their links, stages by the simulator.

    step = pipeline of (F, I, W) of each stage + sums of gradients + optimizer

The rates are those of `autopipe.presets`, the roofline is `autopipe.roofline`, exchanges are those
of `autopipe.communication`, and the pipeline is the schedule as `autopipe.simulate` walks it.
`Constants` has what these leave open.
"""

from __future__ import annotations

import math
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
    """What the package's model does not know of the programs that published the runs.

    Args:
        flash, flash1: FlashAttention's rate as a share of a matmul's of its dims.
        misaligned: the rate of matmuls whose dims are no multiples of 8, so that rows do not begin
            at 16 bytes, as a share of the rate of others.
        overlap: the share of FSDP's exchanges that hides behind computing.
        sums: the share of its links that a sum of gradients reaches.
    """

    flash: float = 0.9
    flash1: float = 0.5
    misaligned: float = 0.6
    overlap: float = 1.0
    sums: float = 1.0
    rate: float = 1.0
    passes: float = 1.0
    per_micro: float = 0.0
    tensor: float = 1.0
    wave: float = 0.0
    hopper: float = 1.0
    flash_hopper: float = 1.0
    half: float = 64.0
    launch: float = 5e-6
    ds: float = 1.0
    ds_hop: float = 1.0
    norm: float=1.0
    fusedpass: float = 1.0


FITTED = Constants()


@dataclass(frozen=True)
class Seconds:
    """A step by what it is spent on: pipeline with its bubble, sums of gradients, optimizer."""

    pipeline: float
    sums: float
    optimizer: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.pipeline + self.sums + self.optimizer


def predict(run: Run, machine: Machine, constants: Constants = FITTED) -> Seconds:
    """The step of a run.

    Raises:
        Unsupported: the device has no tensor cores' rate, or the schedule is not built.
    """
    return _Rank(run, machine, constants).seconds()


@dataclass(frozen=True)
class _Rank:
    """One rank of each stage, with what its seconds depend on."""

    run: Run
    machine: Machine
    constants: Constants

    def seconds(self) -> Seconds:
        run, layers = self.run, pipeline.layers_of(self.run)
        costs = [self._stage(number, count) for number, count in enumerate(layers)]
        n = run.micro_batch * run.model.seq
        boundary = 2 * n * run.model.hidden / run.tp
        hop = Link(self.machine.hop.latency, self.machine.hop.bandwidth, boundary)

        def links(channel: Channel) -> Link:
            return hop

        forward, inputs, weights = zip(*costs, strict=True)
        backward = [i + w for i, w in zip(inputs, weights, strict=True)]
        steps = Costs(forward, backward, inputs, weights, [0.0] * len(layers), links)
        owned = max(map(self._parameters, range(len(layers)), layers)) * run.chunks
        return Seconds(
            pipeline.seconds(run, steps), self._sums(owned), self._optimizer(owned)
        )

    def _stage(self, number: int, layers: int) -> tuple[float, float, float]:
        """Seconds of F, I and W of one micro-batch."""
        run = self.run
        parts = [(layer(run), layers)]
        parts += [(embedding(run), 1)] if number == 0 else []
        parts += [(head(run), 1)] if number == run.stages - 1 else []
        found = [0.0, 0.0, 0.0]
        for work, times in parts:
            for index, seconds in enumerate(self._work(work)):
                found[index] += times * seconds
        found[0] += self.constants.per_micro / 3
        found[1] += self.constants.per_micro / 3
        found[2] += self.constants.per_micro / 3
        return found[0], found[1], found[2]

    def _work(self, work: Work) -> tuple[float, float, float]:
        forward = self._kernels(work.forward) + self._exchanged(work.sums_forward)
        inputs = self._kernels(work.backward_input) + self._exchanged(work.sums_backward)
        weights = self._kernels(work.backward_weight)
        if self.run.framework == "fsdp" or self.run.sharding == 3:
            return self._gathered(work, forward, inputs + weights)
        return forward, inputs, weights

    def _gathered(self, work: Work, forward: float, backward: float) -> tuple[float, float, float]:
        """Weights are gathered for each pass and gradients scattered, beside computing."""
        levels, constants = self.machine.data, self.constants
        gather = all_gather(2 * work.parameters, levels) / constants.sums
        scatter = gather * self.run.gradient_bytes / 2
        back = scatter + (gather if self.run.sharding == 3 else 0.0)

        def beside(computing: float, exchanging: float) -> float:
            hidden = min(computing, exchanging) * constants.overlap
            return computing + exchanging - hidden

        return beside(forward, gather), beside(backward, back), 0.0

    def _kernels(self, kernels: Iterable[Kernel]) -> float:
        return sum(map(self._kernel, kernels))

    def _kernel(self, kernel: Kernel) -> float:
        device, constants = self.machine.device, self.constants
        import dataclasses
        device = dataclasses.replace(device, half=constants.half, launch=constants.launch)
        dtype = "bf16" if "bf16" in device.flops else "fp16"
        newer = device.bandwidth > 2e12
        share = constants.hopper if newer else constants.rate
        if kernel.what:
            share *= constants.flash1 if kernel.what == "flash1" else constants.flash
            if newer: share *= constants.flash_hopper
        elif any(dim % 8 for dim in kernel.dims):
            share *= constants.misaligned
        if not kernel.dims:
            return kernel_seconds(device, dtype, 0, kernel.bytes * constants.passes, (), kernel.times)
        return kernel_seconds(
            device, dtype, kernel.flops / share, kernel.bytes, kernel.dims, kernel.times, 0 if kernel.what or kernel.batched else constants.wave
        )

    def _exchanged(self, sums: Iterable[float]) -> float:
        """Sums over the tensor-parallel ranks."""
        if self.run.tp == 1:
            return 0.0
        return sum(all_reduce(size, self.machine.tensor) for size in sums) * self.constants.tensor

    def _parameters(self, number: int, layers: int) -> float:
        run = self.run
        found = layers * layer(run).parameters
        found += embedding(run).parameters if number == 0 else 0.0
        return found + (head(run).parameters if number == run.stages - 1 else 0.0)

    def _sums(self, owned: float) -> float:
        """Gradients over the data-parallel ranks, and tied embeddings over first and last stage."""
        run, machine, found = self.run, self.machine, 0.0
        if run.dp > 1 and run.framework != "fsdp" and run.sharding < 3:
            scattered = all_gather(run.gradient_bytes * owned, machine.data)
            found += (scattered + all_gather(2 * owned, machine.data)) / self.constants.sums
        if run.model.tied and run.pp > 1:
            size = run.gradient_bytes * run.model.embedding_parameters / run.tp
            found += machine.hop.latency + size / machine.hop.bandwidth
        return found

    def _optimizer(self, owned: float) -> float:
        """Adam reads and writes its state: so many bytes a weight, over the memory's bandwidth."""
        each = 14 if self.run.pure else 34
        shards = self.run.dp if self.run.sharding else 1
        return each * owned / shards / self.machine.device.bandwidth


def tokens_a_second(run: Run, seconds: float) -> float:
    """Tokens a second of one device."""
    return run.batch * run.model.seq / seconds / run.devices if seconds else math.inf
