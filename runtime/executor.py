"""Runs one rank's program: a table from instruction to method, and one loop over the program.

What is alive of micro-batch k, and the instructions that make it and let it go (activations of a
middle stage; gradients go the other way):

    POST Fk     WAIT Fk       Fk                     SEND Fk     FREE Fk         Bk
    |- posted --|- arrived ---|- arrived, kept ------|-----------|---------------|
                              |- outgoing -----------|- sending -|
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from autopipe.graph import Ref
from autopipe.partition import Stage
from autopipe.randomness import stream
from autopipe.rehearsal import Boundary
from autopipe.runtime.engine import Engine
from autopipe.runtime.meter import Meter
from autopipe.runtime.transport import Handle, Transport
from autopipe.schedule import Flow, Instruction, Kind, Program


@dataclass(frozen=True)
class Step:
    """What one step brings: the batch in micro-batches, the seeds of the losses, random streams.

    Args:
        inputs: `inputs(k)` are the stage's leaves of micro-batch k.
        seed: the gradient of each micro-batch's first result, a number.
        stream: the run's seed, the step, and the global number of micro-batch 0.
    """

    inputs: Callable[[int], Sequence[Tensor]]
    seed: float
    stream: tuple[int, int, int]


@dataclass
class Pool:
    """Receive buffers by layout: as many are ever made as are alive at once."""

    device: torch.device
    free: dict[tuple[object, ...], list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def take(self, boundary: Boundary) -> Tensor:
        """A buffer for the tensor; its values are those of an earlier one."""
        free = self.free[boundary.shape, boundary.strides, boundary.dtype]
        return free.pop() if free else _empty(boundary, boundary.strides, self.device)

    def give(self, boundary: Boundary, buffer: Tensor) -> None:
        """Nobody reads the buffer any longer."""
        self.free[boundary.shape, boundary.strides, boundary.dtype].append(buffer)


def _empty(boundary: Boundary, strides: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty_strided(boundary.shape, strides, dtype=boundary.dtype, device=device)


Transferred = tuple[Kind, Flow | None, int | None, int]
"""A posted receive or a send under way: (POST or SEND, flow, peer, micro-batch)."""


class Executor:
    """One stage of one pipeline.

    Args:
        stage: what it receives and sends.
        boundaries: the layout of every tensor that crosses a cut.
        owned: the stage's parameters, buffers and constants.
        reduce: sums gradients over data-parallel ranks and tied copies.
    """

    def __init__(
        self,
        stage: Stage,
        boundaries: Mapping[Ref, Boundary],
        engine: Engine,
        transport: Transport,
        owned: Sequence[Tensor],
        reduce: Callable[[], None],
        device: torch.device | str = "cpu",
    ) -> None:
        self.stage = stage
        self.boundaries = boundaries
        self.engine = engine
        self.transport = transport
        self.pool = Pool(torch.device(device))
        self.meter: Meter | None = None
        self.seconds: dict[Kind, float] = defaultdict(float)
        self._owned = owned
        self._reduce = reduce
        self._posted: dict[Transferred, list[tuple[Tensor, Handle]]] = {}
        self._sending: dict[Transferred, list[tuple[Tensor, Handle]]] = {}
        self._arrived: dict[int, dict[Ref, Tensor]] = defaultdict(dict)
        self._outgoing: dict[tuple[Flow, int], dict[Ref, Tensor]] = {}
        self._unsent: dict[tuple[Flow, int], int] = {}
        self._gradients: dict[int, dict[Ref, Tensor]] = defaultdict(dict)
        self._results: dict[int, tuple[Tensor, ...]] = {}
        self._methods: dict[Kind, Callable[[Instruction, Step], None]] = {
            Kind.POST: self._post,
            Kind.WAIT: self._wait,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND: self._send,
            Kind.FREE: self._free,
            Kind.REDUCE: self._reduce_gradients,
        }

    def run(self, program: Program, step: Step) -> list[tuple[Tensor, ...]]:
        """Run one step; returns the graph's results of each micro-batch in the last stage."""
        self.seconds.clear()
        self._results.clear()
        for instruction in program:
            began = perf_counter()
            with torch.profiler.record_function(str(instruction)):
                self._methods[instruction.kind](instruction, step)
            self.seconds[instruction.kind] += perf_counter() - began
        return [self._results[k] for k in sorted(self._results)]

    def crossing(self, flow: Flow | None, peer: int | None) -> list[Ref]:
        """The tensors of one channel between this stage and `peer`, in the order of their slots."""
        refs = [ref for ref, other in (*self.stage.receives, *self.stage.sends) if other == peer]
        if flow is Flow.ACTIVATION:
            return refs
        later = max(self.stage.index, peer or 0)  # gradients come from the later of the two stages
        return [ref for ref in refs if later in self.boundaries[ref].gradients]

    def _post(self, instruction: Instruction, step: Step) -> None:
        _, _, k, flow, peer = instruction
        assert flow is not None and peer is not None
        posted = []
        for slot, ref in enumerate(self.crossing(flow, peer)):
            boundary = self.boundaries[ref]
            if flow is Flow.ACTIVATION:
                buffer = self.pool.take(boundary)
            else:
                # Not from the pool: backward may make a view of it a parameter's gradient.
                buffer = _empty(boundary, boundary.gradients[peer], self.pool.device)
            self._count("transfers", boundary.bytes)
            posted.append((buffer, self.transport.post(buffer, peer, flow, slot)))
        self._posted[Kind.POST, flow, peer, k] = posted

    def _wait(self, instruction: Instruction, step: Step) -> None:
        _, _, k, flow, peer = instruction
        posted = self._posted.pop((Kind.POST, flow, peer, k))
        refs = self.crossing(flow, peer)
        for ref, (buffer, handle) in zip(refs, posted, strict=True):
            handle.wait()
            if flow is Flow.ACTIVATION:
                self._arrived[k][ref] = buffer
                self._count("transfers", -self.boundaries[ref].bytes)
                self._count("activations", self.boundaries[ref].bytes)
            elif ref in self._gradients[k]:  # the later stages' sum first, as one process adds
                self._gradients[k][ref] += buffer
                self._count("transfers", -self.boundaries[ref].bytes)
            else:
                self._gradients[k][ref] = buffer

    def _forward(self, instruction: Instruction, step: Step) -> None:
        k = instruction.microbatch
        here = self.stage.index
        received = [
            self._arrived[k][ref]
            .detach()
            .requires_grad_(torch.is_grad_enabled() and here in self.boundaries[ref].gradients)
            for ref, _ in self.stage.receives
        ]
        inputs = step.inputs(k)
        run, number, first = step.stream
        counted = (
            self.meter.keeping((*self._owned, *received, *inputs)) if self.meter else nullcontext()
        )
        self._count("transfers", self._bytes(self.stage.outgoing))
        with stream(run, number, first + k), counted:
            results = self.engine.forward(k, (*received, *inputs))
        outgoing = dict(zip(self.stage.outgoing, results, strict=False))
        self._leave(Flow.ACTIVATION, k, {ref: t.detach() for ref, t in outgoing.items()})
        if len(results) > len(outgoing):
            # A loss may be a view of a received tensor, whose buffer is used again.
            self._results[k] = tuple(
                result.detach().clone() if isinstance(result, Tensor) else result
                for result in results[len(outgoing) :]
            )
        if not torch.is_grad_enabled():
            self._release(k, recycle=False)  # what is being sent may be a view of it

    def _backward(self, instruction: Instruction, step: Step) -> None:
        k = instruction.microbatch
        gradients = self._gradients.pop(k, {})
        seeds: list[Tensor | None] = [gradients.get(ref) for ref in self.stage.outgoing]
        for number, result in enumerate(self._results.get(k, ())):
            is_loss = number == 0 and isinstance(result, Tensor)
            seeds.append(torch.full_like(result, step.seed) if is_loss else None)
        here = self.stage.index
        returning = [
            ref for ref, _ in self.stage.receives if here in self.boundaries[ref].gradients
        ]
        # They come as what was saved goes, in autograd's order: counted as if there was room for
        # both, which is the most that it can be and what a plan predicts.
        self._count("transfers", self._bytes(returning))
        made = self.engine.backward_input(k, seeds)
        self.engine.backward_weight(k)
        back = {
            ref: gradient if gradient is not None else torch.zeros_like(self._arrived[k][ref])
            for (ref, _), gradient in zip(self.stage.receives, made, strict=False)
            if ref in returning
        }
        self._leave(Flow.GRADIENT, k, back)
        self._count("transfers", -self._bytes(gradients))
        self._release(k, recycle=True)

    def _leave(self, flow: Flow, k: int, tensors: dict[Ref, Tensor]) -> None:
        """Hold tensors until every stage that needs one of them has it."""
        if not tensors:
            return
        peers = self.stage.sends if flow is Flow.ACTIVATION else self.stage.receives
        self._outgoing[flow, k] = tensors
        self._unsent[flow, k] = len({other for ref, other in peers if ref in tensors})

    def _release(self, k: int, *, recycle: bool) -> None:
        arrived = self._arrived.pop(k, {})
        self._count("activations", -self._bytes(arrived))
        for ref, buffer in arrived.items():
            if recycle:
                self.pool.give(self.boundaries[ref], buffer)

    def _send(self, instruction: Instruction, step: Step) -> None:
        _, _, k, flow, peer = instruction
        assert flow is not None and peer is not None
        outgoing = self._outgoing[flow, k]
        sending = []
        for slot, ref in enumerate(self.crossing(flow, peer)):
            boundary = self.boundaries[ref]
            gradient = flow is Flow.GRADIENT
            strides = boundary.gradients[self.stage.index] if gradient else boundary.strides
            tensor = outgoing[ref]
            if tensor.stride() != strides:  # the layout that the other side has made room for
                tensor = _empty(boundary, strides, self.pool.device).copy_(tensor)
            sending.append((tensor, self.transport.send(tensor, peer, flow, slot)))
        self._sending[Kind.SEND, flow, peer, k] = sending

    def _free(self, instruction: Instruction, step: Step) -> None:
        _, _, k, flow, peer = instruction
        assert flow is not None
        for _, handle in self._sending.pop((Kind.SEND, flow, peer, k)):
            handle.wait()
        self._unsent[flow, k] -= 1
        if self._unsent[flow, k] == 0:
            del self._unsent[flow, k]
            self._count("transfers", -self._bytes(self._outgoing.pop((flow, k))))

    def _reduce_gradients(self, instruction: Instruction, step: Step) -> None:
        self._reduce()

    def _bytes(self, refs: Iterable[Ref]) -> int:
        return sum(self.boundaries[ref].bytes for ref in refs)

    def _count(self, kind: str, bytes: int) -> None:
        if self.meter is not None:
            self.meter.hold(kind, bytes)
