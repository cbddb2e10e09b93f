"""What one rank of the benchmark does: build both sides, check them, run them in turn, report.

    round 1    one process   autopipe 1f1b   torch Schedule1F1B
    round 2    autopipe 1f1b   torch Schedule1F1B   one process          the order rotates
    round 3    torch Schedule1F1B   one process   autopipe 1f1b

All sides live at the same time in the same processes. A step's time is from the instant that all
ranks have agreed on to the moment the last one is done; the clock is the machine's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from autopipe.runtime.comm.choose import transport_for
from autopipe.runtime.comm.cma_transport import DirectTransport
from autopipe.runtime.comm.transport import Transport
from autopipe.schedules.instructions import Channel, Flow, holders
from benchmarks.pipeline import link, memory, ours, theirs
from benchmarks.pipeline.case import COUNTERPARTS, SINGLE, Case, ours_of, row, theirs_of
from benchmarks.pipeline.stages import BOUNDARY_BYTES, Model, Side, build, loss

PRIORITY = 10
"""Of a rank under SCHED_FIFO. gloo's threads inherit it: above the thread that computes they would
spin on a lock that it holds."""

WARM_UP = 2
"""Rounds that are not counted."""

TRIES = 10
"""Transfers timed before the depths of eager 1F1B are chosen."""

TIMEOUT = 60.0
"""Seconds that one rank waits for another before it gives up."""


def main(case: Case) -> None:
    """Run a case; rank 0 prints its rows on stdout."""
    rank = int(os.environ["RANK"])
    if case.relay:
        os.environ.update(link.enter(case.relay, rank))
    _settle(case, rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    lines = Lines()
    if not case.depths:
        chain = lines.of(range(case.ranks))
        case = replace(case, depths=ours.depths_for(case, transfer_seconds(chain, rank)))
    sides = build_sides(case, rank, lines)
    if case.memory:
        sides.pop(SINGLE)
        rows = [memory.row(name, side, case.conditions()) for name, side in sides.items()]
    else:
        times = measure(case, sides, rank)
        rows = [row(case, schedule, times, os.getloadavg()[0]) for schedule in case.schedules]
    if rank == 0:
        for found in rows:
            print(json.dumps({**found, "transport": lines.name}), flush=True)
    dist.barrier()
    lines.close()
    dist.destroy_process_group()


def _settle(case: Case, rank: int) -> None:
    """Cores of its own, and one thread that computes."""
    torch.set_num_threads(1)
    every = sorted(os.sched_getaffinity(0))
    first = rank * case.cores
    os.sched_setaffinity(0, {every[(first + n) % len(every)] for n in range(case.cores)})
    if case.fifo:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))


class Lines:
    """The transports that autopipe would use, one for each placement of stages on ranks."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], Transport] = {}

    def of(self, stages: Sequence[int]) -> Transport:
        """That of a placement; every rank asks for the same ones in the same order.

        Args:
            stages: the rank of each stage.
        """
        key = tuple(stages)
        if key not in self._made:
            edges = ours.edges_of(len(key))
            self._made[key] = transport_for(torch.device("cpu"), [key], edges, TIMEOUT)
        return self._made[key]

    @property
    def name(self) -> str:
        """What they all are: ranks do not move."""
        made = next(iter(self._made.values()))
        return "direct" if isinstance(made, DirectTransport) else "gloo"

    def close(self) -> None:
        """Close them."""
        for transport in self._made.values():
            transport.close()


def transfer_seconds(transport: Transport, rank: int) -> float:
    """Seconds one way of a boundary tensor between ranks 0 and 1, its receive posted ahead."""
    tensor, times = torch.zeros(BOUNDARY_BYTES // 4), []
    if rank < 2:
        buffer = torch.empty_like(tensor)
        there, back = Channel(0, 1, Flow.ACTIVATION), Channel(1, 0, Flow.GRADIENT)
        out, into = (there, back) if rank == 0 else (back, there)
        coming = transport.post(buffer, into, 0)
        for _ in range(TRIES):
            began = time.monotonic()
            if rank == 0:
                transport.send(tensor, out, 0).wait()
            coming.wait()
            times.append((time.monotonic() - began) / 2)
            coming = transport.post(buffer, into, 0)
            if rank == 1:
                transport.send(tensor, out, 0).wait()
        last = transport.send(tensor, out, 0)  # ends the last receive of the other
        coming.wait()
        last.wait()
    found = torch.tensor(median(times) if rank == 0 else 0.0, dtype=torch.float64)
    dist.broadcast(found, 0)
    return found.item()


def nap_seconds(case: Case, chunks: int, rank: int) -> float:
    """How long to sleep so that a micro-batch takes `case.ms`, with all that runs besides."""
    asked = case.ms / 1e3
    found = torch.tensor(asked, dtype=torch.float64)
    if rank == 0:
        model, times = _build(case, chunks, asked), []
        for _ in range(5):
            began = time.monotonic()
            _one_process(model)
            times.append(time.monotonic() - began)
        taken = median(times) / case.ranks / case.micro_batches
        found.fill_(max(asked / 10, 2 * asked - taken))
    dist.broadcast(found, 0)
    return found.item()


def _build(case: Case, chunks: int, seconds: float) -> Model:
    return build(case.compute, case.ranks, chunks, case.micro_batches, seconds, case.rate)


def build_sides(case: Case, rank: int, lines: Lines) -> dict[str, Side]:
    """Every side by its name, those of equally many stages a rank on the same modules."""
    models: dict[int, Model] = {}

    def model(chunks: int) -> Model:
        if chunks not in models:
            seconds = nap_seconds(case, chunks, rank) if case.compute == "sleep" else case.ms / 1e3
            models[chunks] = _build(case, chunks, seconds)
        return models[chunks]

    own = {schedule: model(ours.chunks_of(schedule)) for schedule in case.schedules}
    programs = {
        schedule: ours.programs_of(schedule, own[schedule], case.ranks, case.window, case.depths)
        for schedule in case.schedules
    }
    sides = {SINGLE: Side(model(1), lambda: lambda: _one_process(model(1)))}
    for schedule, stages in own.items():
        transport = lines.of(holders(programs[schedule]))
        sides[ours_of(schedule)] = Side(
            stages, partial(ours.make, schedule, stages, programs[schedule], rank, transport)
        )
        sides[theirs_of(schedule)] = Side(
            stages, partial(theirs.make, COUNTERPARTS[schedule], stages, rank, case.ranks)
        )
    return sides


def _one_process(model: Model) -> None:
    """The model without a pipeline, micro-batch after micro-batch."""
    for x, target in zip(
        model.batch.split(model.rows), model.target.split(model.rows), strict=True
    ):
        for stage in model.stages:
            x = stage(x)
        loss(x, target).backward()


def check(name: str, side: Side, step: Callable[[], None]) -> None:
    """Refuse to time a side whose gradients are not those of one process, but for rounding.

    Raises:
        RuntimeError: they are not; the message names the side.
    """
    side.model.zero_grad()
    _one_process(side.model)
    expected = [parameter.grad for parameter in side.model.parameters()]
    side.model.zero_grad()
    step()
    found = [parameter.grad for parameter in side.model.parameters()]
    held = torch.tensor([gradient is not None for gradient in found], dtype=torch.int64)
    dist.all_reduce(held)
    if not torch.equal(held, torch.ones_like(held)):
        raise RuntimeError(f"{name}: each gradient on one rank is expected, found {held.tolist()}")
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:  # on another rank
            continue
        if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            raise RuntimeError(f"{name}: gradients differ from those of one process")
    side.model.zero_grad()


def measure(case: Case, sides: dict[str, Side], rank: int) -> dict[str, list[float]]:
    """Seconds of each round, by side; the same on every rank."""
    names = list(sides)
    steps = {name: side.make() for name, side in sides.items()}
    for name in names:
        if name != SINGLE:
            check(name, sides[name], steps[name])
    gc.collect()
    gc.freeze()  # what importing torch has left is not searched again
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(WARM_UP + case.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            idle = name == SINGLE and rank > 0
            seconds = _timed(steps[name], idle=idle, delay=case.delay_ms / 1e3)
            sides[name].model.zero_grad()
            if number >= WARM_UP:
                times[name].append(seconds)
        if rank == 0:
            print(f"round {number + 1} of {WARM_UP + case.rounds}", file=sys.stderr)
    return times


def _timed(step: Callable[[], None], *, idle: bool, delay: float) -> float:
    """Seconds from a start that all ranks agree on to the end of the last one."""
    # Long enough to hear of it on a slow link.
    start = torch.tensor(time.monotonic() + 0.005 + 10 * delay, dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    time.sleep(max(0.0, start.item() - time.monotonic()))
    if not idle:
        step()
    end = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(end, dist.ReduceOp.MAX)
    return (end - start).item()


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])))
