"""Runs one stage: a method for each instruction, over the tensors that each micro-batch has alive.

The tensors of micro-batch k, and the instructions that make them and let them go (activations of a
middle stage; gradients go the other way):

    POST Fk     WAIT Fk       Fk                     SEND Fk     FREE Fk         Bk
    |- posted --|- arrived ---|- arrived, kept ------|-----------|---------------|
                              |- outgoing -----------|- sending -|

With B split into I and W, what has arrived lives on until W, which needs it for the weights.

All tensors are on the rank's own device. Received activations are the pool's buffers, which B or W
gives back. A received gradient is given to autograd, which may keep it as a parameter's `.grad`.
The stage holds what it sends until FREE. Backward adds to the parameters' `.grad`, which
`Pipe.step` has cleared before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.ir.torch_private import storage_key
from autopipe.runtime.comm.transport import Handle, Transport
from autopipe.runtime.step.engine import Engine, JointEngine
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.microbatches import EVEN, LossWeights
from autopipe.schedules.instructions import Channel, Flow, Instruction, Kind
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.precision import FP32, Arithmetic, computing
from autopipe.stages.rng import stream


@dataclass(frozen=True)
class StepInput:
    """What one step is run on: the batch in micro-batches, the seeds of losses, random streams.

    Args:
        inputs: `inputs(stage, k)` are the batch's tensors that a stage reads of micro-batch k,
            [rows, ...] each, on the rank's device.
        seed: the gradient of each micro-batch's loss, a number: its share of the whole batch.
        stream: the run's seed, the step, and the global number of micro-batch 0.
        weights: multiply the seed.
    """

    inputs: Callable[[Stage, int], Sequence[Tensor]]
    seed: float
    stream: tuple[int, int, int]
    weights: LossWeights = EVEN


@dataclass
class Pool:
    """Receive buffers by layout: as many are ever made as are alive at once."""

    device: torch.device
    free: dict[tuple[object, ...], list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def take(self, boundary: CrossingTensor) -> Tensor:
        """A buffer for the tensor; its values are those of an earlier one."""
        free = self.free[boundary.shape, boundary.strides, boundary.dtype]
        return free.pop() if free else empty(boundary, boundary.strides, self.device)

    def give(self, boundary: CrossingTensor, buffer: Tensor) -> None:
        """Take back a buffer that nobody reads any longer."""
        self.free[boundary.shape, boundary.strides, boundary.dtype].append(buffer)


def empty(boundary: CrossingTensor, strides: tuple[int, ...], device: torch.device) -> Tensor:
    """Room for a crossing tensor, or for its gradient, which may lie otherwise in memory."""
    return torch.empty_strided(boundary.shape, strides, dtype=boundary.dtype, device=device)


Transfer = tuple[Channel, int]
"""A posted receive or a send under way: its channel and micro-batch."""


class StageRun:
    """One stage of one pipeline.

    `results` are the loss and what else the graph returns, of each micro-batch, detached and on the
    rank's device; only the last stage has any. `how` is what the last step was computed in.

    Args:
        stage: what it receives and sends.
        boundaries: the layout of every tensor that crosses a cut.
        owned: the stage's parameters, buffers and constants.
        pool: the rank's receive buffers, shared by its stages.
    """

    def __init__(
        self,
        stage: Stage,
        boundaries: Mapping[Ref, CrossingTensor],
        engine: Engine,
        transport: Transport,
        owned: Sequence[Tensor],
        pool: Pool,
    ) -> None:
        self.stage = stage
        self.boundaries = boundaries
        self.engine = engine
        self.transport = transport
        self.pool = pool
        self.meter: Meter | None = None
        if isinstance(engine, JointEngine):
            engine.hold = partial(self._count, "activations")
        self.results: dict[int, tuple[Tensor, ...]] = {}
        self.how = FP32
        self._accumulates = False
        self._owned = owned
        self._inward, self._outward = stage.incoming, stage.outgoing
        self._crossing: dict[Channel, list[tuple[Ref, CrossingTensor]]] = {}
        self._posted: dict[Transfer, list[tuple[Tensor, Handle]]] = {}
        self._sending: dict[Transfer, list[tuple[Tensor, Handle]]] = {}
        self._arrived: dict[int, dict[Ref, Tensor]] = defaultdict(dict)
        self._outgoing: dict[tuple[Flow, int], dict[Ref, Tensor]] = {}
        self._unsent: dict[tuple[Flow, int], int] = {}
        self._targets: dict[tuple[Flow, int], set[Channel]] = defaultdict(set)
        self._gradients: dict[int, dict[Ref, Tensor]] = defaultdict(dict)
        self._returning = [ref for ref in self._inward if stage.index in boundaries[ref].gradients]
        self._seeds: dict[tuple[torch.dtype, float], Tensor] = {}

    def call(self, instruction: Instruction) -> Callable[[StepInput], None]:
        """The function that carries out an instruction; it takes what the step is run on."""
        k = instruction.microbatch
        compute = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
        }
        if instruction.kind is Kind.SEND:
            self._targets[instruction.channel.flow, k].add(instruction.channel)
        if instruction.kind in compute:
            return partial(compute[instruction.kind], k)
        transfer = {
            Kind.POST: self._post,
            Kind.WAIT: self._wait,
            Kind.SEND: self._send,
            Kind.FREE: self._free,
        }
        return partial(transfer[instruction.kind], instruction.channel, k)

    def begin(self, how: Arithmetic) -> None:
        """A step begins, to be computed in `how`; no parameter has a gradient yet."""
        self.results.clear()
        self.how = how
        self._seeds.clear()
        self._accumulates = False

    def crossing(self, channel: Channel) -> list[tuple[Ref, CrossingTensor]]:
        """The tensors of one channel of this stage, in the order of their slots."""
        if channel not in self._crossing:
            peer = channel.source if channel.target == self.stage.index else channel.target
            later = max(self.stage.index, peer)  # gradients come from the later of the two stages
            self._crossing[channel] = [
                (ref, self.boundaries[ref])
                for ref, other in (*self.stage.receives, *self.stage.sends)
                if other == peer
                and (channel.flow is Flow.ACTIVATION or later in self.boundaries[ref].gradients)
            ]
        return self._crossing[channel]

    def _post(self, channel: Channel, k: int, step: StepInput) -> None:
        posted = []
        for slot, (_, boundary) in enumerate(self.crossing(channel)):
            if channel.flow is Flow.ACTIVATION:
                buffer = self.pool.take(boundary)
            else:
                # Not from the pool: backward may make a view of it a parameter's gradient, or send
                # a view of it on.
                buffer = empty(boundary, boundary.gradients[channel.source], self.pool.device)
            if self.meter is not None:
                self._count("transfers", boundary.bytes)
            posted.append((buffer, self.transport.post(buffer, channel, slot)))
        self._posted[channel, k] = posted

    def _wait(self, channel: Channel, k: int, step: StepInput) -> None:
        posted = self._posted.pop((channel, k))
        for (ref, boundary), (buffer, handle) in zip(self.crossing(channel), posted, strict=True):
            handle.wait()
            if channel.flow is Flow.ACTIVATION:
                self._arrived[k][ref] = buffer
                if self.meter is not None:
                    self._count("transfers", -boundary.bytes)
                    self._count("activations", boundary.bytes)
            elif ref in self._gradients[k]:  # the later stages' sum first, as one process adds
                self._gradients[k][ref] += buffer
                self._count("transfers", -boundary.bytes)
            else:
                self._gradients[k][ref] = buffer

    def _forward(self, k: int, step: StepInput) -> None:
        training = torch.is_grad_enabled()
        arrived = self._arrived[k]
        received = [
            arrived[ref].detach().requires_grad_(training and ref in self._returning)
            for ref in self._inward
        ]
        inputs = step.inputs(self.stage, k)
        self._count_all("transfers", self._outward)
        with self._stream(k, step), self._computing(), self._keeping(received, inputs):
            results = self.engine.forward(k, (*received, *inputs))
        sent = zip(self._outward, results, strict=False)
        self._leave(Flow.ACTIVATION, k, {ref: tensor.detach() for ref, tensor in sent})
        if len(results) > len(self._outward):
            # A loss may be a view of a received tensor, whose buffer is used again.
            self.results[k] = tuple(
                result.detach().clone() if isinstance(result, Tensor) else result
                for result in results[len(self._outward) :]
            )
        if not training:
            self._release(k, recycle=False)  # what is being sent may be a view of it

    def _backward(self, k: int, step: StepInput) -> None:
        self._backward_input(k, step)
        self._backward_weight(k, step)

    def _backward_input(self, k: int, step: StepInput) -> None:
        gradients = self._gradients[k]
        seeds: list[Tensor | None] = [gradients.get(ref) for ref in self._outward]
        for number, result in enumerate(self.results.get(k, ())):
            is_loss = number == 0 and isinstance(result, Tensor)
            seeds.append(self._seed(result, k, step) if is_loss else None)
        # Autograd frees saved tensors while it makes these gradients, in an order we do not know.
        # Both are counted in full: an upper bound, and what the plan predicts.
        self._count_all("transfers", self._returning)
        with self._stream(k, step), self._keeping((), ()):  # recomputed blocks save anew
            made = self.engine.backward_input(k, seeds)
        back = {
            ref: gradient if gradient is not None else torch.zeros_like(self._arrived[k][ref])
            for ref, gradient in zip(self._inward, made, strict=False)
            if ref in self._returning
        }
        if back and not self._accumulates:
            back = self._apart(back)
        self._accumulates = True
        self._leave(Flow.GRADIENT, k, back)

    def _apart(self, back: dict[Ref, Tensor]) -> dict[Ref, Tensor]:
        """The gradients to send, none of them in the memory of a parameter's.

        Of `x.view(12) + p.view(12)` autograd gives both the same tensor; the next micro-batch would
        add to it while it is still being sent.
        """
        parameters = {storage_key(t.grad) for t in self._owned if t.grad is not None}
        return {
            ref: gradient.clone() if storage_key(gradient) in parameters else gradient
            for ref, gradient in back.items()
        }

    def _seed(self, loss: Tensor, k: int, step: StepInput) -> Tensor:
        """The gradient of a micro-batch's loss; the same tensor for all that weigh alike."""
        key = loss.dtype, step.weights.loss(k) * step.seed
        if key not in self._seeds:
            self._seeds[key] = torch.full_like(loss, key[1])
        return self._seeds[key]

    def _backward_weight(self, k: int, step: StepInput) -> None:
        with self._stream(k, step):
            self.engine.backward_weight(k)
        self._count_all("transfers", self._gradients.pop(k, ()), -1)
        self._release(k, recycle=True)

    def _stream(self, k: int, step: StepInput) -> stream:
        run, number, first = step.stream
        return stream(run, number, first + k)

    def _computing(self) -> AbstractContextManager[None]:
        return nullcontext() if self.how is FP32 else computing(self.how)

    def _leave(self, flow: Flow, k: int, tensors: dict[Ref, Tensor]) -> None:
        """Hold tensors until every stage that needs one of them has it."""
        if not tensors:
            return
        self._outgoing[flow, k] = tensors
        self._unsent[flow, k] = len(self._targets[flow, k])

    def _release(self, k: int, *, recycle: bool) -> None:
        arrived = self._arrived.pop(k, {})
        self._count_all("activations", arrived, -1)
        for ref, buffer in arrived.items():
            if recycle:
                self.pool.give(self.boundaries[ref], buffer)

    def _send(self, channel: Channel, k: int, step: StepInput) -> None:
        outgoing = self._outgoing[channel.flow, k]
        gradient = channel.flow is Flow.GRADIENT
        sending = []
        for slot, (ref, boundary) in enumerate(self.crossing(channel)):
            strides = boundary.gradients[self.stage.index] if gradient else boundary.strides
            tensor = outgoing[ref]
            if tensor.stride() != strides:  # the layout that the other side has made room for
                tensor = empty(boundary, strides, self.pool.device).copy_(tensor)
            sending.append((tensor, self.transport.send(tensor, channel, slot)))
        self._sending[channel, k] = sending

    def _free(self, channel: Channel, k: int, step: StepInput) -> None:
        for _, handle in self._sending.pop((channel, k)):
            handle.wait()
        flow = channel.flow
        self._unsent[flow, k] -= 1
        if self._unsent[flow, k] == 0:
            del self._unsent[flow, k]
            self._count_all("transfers", self._outgoing.pop((flow, k)), -1)

    def _keeping(
        self, received: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> AbstractContextManager[None]:
        if self.meter is None:
            return nullcontext()
        owned = (*self._owned, *self.how.copies.values(), *received, *inputs)
        return self.meter.keeping(self.stage.index, owned)

    def _count_all(self, kind: str, refs: Iterable[Ref], sign: int = 1) -> None:
        if self.meter is not None:
            self._count(kind, sign * sum(self.boundaries[ref].bytes for ref in refs))

    def _count(self, kind: str, bytes: int) -> None:
        if self.meter is not None:
            self.meter.hold(self.stage.index, kind, bytes)
