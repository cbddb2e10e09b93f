"""Runs programs that the proof may have refused, in real processes over gloo, and tells how far.

    python hang_worker.py FOLDER      FOLDER/three.apart: programs, and how their transfers queue
                                      FOLDER/three.0: what became of their rank 0

The processes of all programs run at once. When none has moved for PATIENCE seconds they are killed.
What is left of a rank is the instruction that it was at, or how it ended. Each tensor carries the
number of its stage and micro-batch, and a stage that is given another one says so.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.runtime.comm.gloo import GlooTransport, make_groups
from autopipe.runtime.comm.transport import Handle, Transport
from autopipe.runtime.launch.world import World, interface
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.stage import Pool, StageRun, StepInput
from autopipe.schedules.deadlock import Lanes
from autopipe.schedules.instructions import (
    Channel,
    Flow,
    Instruction,
    Kind,
    Programs,
    holders,
    parse_programs,
)
from autopipe.stages.dry_run import CrossingTensor

PATIENCE = 3.0
"""Seconds without a move of anybody after which whoever still runs is taken to hang."""

LONGEST = 60.0
"""Seconds for all."""

SHAPE = (1 << 15,)
"""More numbers in a tensor than any buffer on its way takes in."""


def lanes(how: str, programs: Programs) -> Lanes | None:
    """Which transfers queue: for the proof, and for `InLine`.

    "apart"     none: tags tell all of them apart
    "channel"   those of a channel
    "flow"      those of activations between two ranks, either way, and those of gradients
    "pair"      all between two ranks: one communicator
    """
    holder = holders(programs)

    def pair(channel: Channel) -> frozenset[int]:
        return frozenset({holder[channel.source], holder[channel.target]})

    return {
        "apart": None,
        "channel": lambda channel: channel,
        "flow": lambda channel: (pair(channel), channel.flow),
        "pair": pair,
    }[how]


@dataclass
class InLine:
    """A transport with lanes: a transfer starts when the one before it on its lane is over.

    As the operations of a communicator, which run in turn.
    """

    under: Transport
    lane: Lanes
    _lines: dict[object, ThreadPoolExecutor] = field(
        default_factory=lambda: defaultdict(lambda: ThreadPoolExecutor(1))
    )

    def post(self, buffer: Tensor, channel: Channel, slot: int) -> Handle:
        return self._behind(channel, self.under.post, buffer, channel, slot)

    def send(self, tensor: Tensor, channel: Channel, slot: int) -> Handle:
        return self._behind(channel, self.under.send, tensor, channel, slot)

    def close(self) -> None:
        self.under.close()

    def _behind(self, channel: Channel, transfer: Any, *arguments: object) -> Handle:
        line = self._lines[self.lane(channel)]
        return _Later(line.submit(lambda: transfer(*arguments).wait()))


@dataclass
class _Later:
    future: Future[None]

    def wait(self) -> None:
        self.future.result()


@dataclass
class Numbers:
    """An engine that computes nothing: stage s sends 100 s + k, and back comes the negative."""

    stage: Stage

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for (_, source), argument in zip(self.stage.receives, arguments, strict=True):
            _expect(argument, 100 * source + microbatch)
        return tuple(_number(100 * self.stage.index + microbatch) for _ in self.stage.outgoing)

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        own = 100 * self.stage.index + microbatch
        for gradient in gradients:
            assert gradient is not None
            _expect(gradient, -own * len(self.stage.sends))
        return tuple(_number(-100 * source - microbatch) for _, source in self.stage.receives)

    def backward_weight(self, microbatch: int) -> None:
        pass


class Unsummed:
    """Sums nothing: there are no parameters."""

    def begin(self, stage: int) -> None:
        pass

    def arm(self, stage: int) -> None:
        pass

    def finish(self) -> None:
        pass


def _number(value: int) -> Tensor:
    return torch.full(SHAPE, float(value))


def _expect(tensor: Tensor, value: int) -> None:
    if not torch.equal(tensor, _number(value)):
        raise ValueError(f"expected {value}, found {int(tensor[0])}")


def stages_of(programs: Programs) -> tuple[list[Stage], dict[Ref, CrossingTensor]]:
    """The stages that exchange what the programs exchange: one tensor each, for all who take it."""
    channels = {i.channel for program in programs for i in program if i.flow is not None}
    forward = sorted(channel[:2] for channel in channels if channel.flow is Flow.ACTIVATION)
    back = {channel[1::-1] for channel in channels if channel.flow is Flow.GRADIENT}
    stages, boundaries = [], {}
    for index in range(len(holders(programs))):
        ref = Ref(str(index))
        receives = tuple((Ref(str(source)), source) for source, to in forward if to == index)
        sends = tuple((ref, target) for source, target in forward if source == index)
        gradients = {target: (1,) for _, target in sends if (index, target) in back}
        stages.append(
            Stage(index, index, index + 1, (index,), (), (), receives, sends, frozenset())
        )
        boundaries[ref] = CrossingTensor(SHAPE, (1,), torch.float32, gradients)
    return stages, boundaries


def rank_of(rank: int, programs: Programs, how: str, store: Path, words: Path) -> None:
    """One process. It never returns: an end of its own would be news for the others."""
    torch.set_num_threads(1)
    try:
        _run(rank, programs, how, store, words)
    except Exception as error:
        _stay(words, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _stay(words: Path, last: str) -> None:
    words.write_text(last)
    time.sleep(3600)


def _run(rank: int, programs: Programs, how: str, store: Path, words: Path) -> None:
    size, holder = len(programs), holders(programs)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size
    )
    transport: Transport = GlooTransport(holder, rank, make_groups([holder]))
    lane = lanes(how, programs)
    if lane is not None:
        transport = InLine(transport, lane)
    stages, boundaries = stages_of(programs)
    pool = Pool(torch.device("cpu"))
    runs = [
        StageRun(stage, boundaries, Numbers(stage), transport, (), pool)
        for stage in stages
        if holder[stage.index] == rank
    ]
    program = programs[rank]
    executor = Executor(runs, program, Unsummed())
    executor.watch = lambda position: None if words.write_text(str(program[position])) else None
    training = any(i.kind is Kind.BACKWARD for i in program)
    with torch.set_grad_enabled(training):
        executor.run(StepInput(lambda stage, k: (), 1.0, (0, 0, 0)))
    sent = [
        Instruction(Kind.SEND, channel.source, k, channel.flow, channel.target)
        for run in runs
        for channel, k in run._sending
    ]
    # Here, where sends that nobody has waited for are still alive: gloo breaks off others.
    _stay(words, ", and holds ".join(["ended", *map(str, sent)]))


def main(folder: Path) -> None:
    device = interface(World(0, 1, 0, 1, 0, "127.0.0.1", 0), os.environ)
    if device is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = device
    fork = multiprocessing.get_context("fork")  # torch is imported once
    words, processes = [], []
    for case in sorted(folder.iterdir()):
        programs = parse_programs(case.read_text())
        for rank in range(len(programs)):
            words.append(case.with_suffix(f".{rank}"))
            arguments = (rank, programs, case.suffix[1:], case.with_suffix(".store"), words[-1])
            processes.append(fork.Process(target=rank_of, args=arguments))
    for process in processes:
        process.start()
    began = moved = time.monotonic()
    last = dict.fromkeys(words, "")
    try:
        while time.monotonic() < min(moved + PATIENCE, began + LONGEST):
            time.sleep(0.05)
            now = {path: path.read_text() if path.exists() else "" for path in words}
            if now != last or not all(path.exists() for path in words):
                moved, last = time.monotonic(), now
    finally:
        for process in processes:
            process.kill()
            process.join()
    for path, word in last.items():  # some have seen others die before their own turn came
        path.write_text(word)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
