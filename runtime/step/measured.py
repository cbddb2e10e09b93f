"""Measure a step's seconds and bytes in each stage of a rank, in the terms of a plan's prediction.

forward, backward     seconds of a micro-batch
memory                bytes: parameters, their copies in 16 bits, gradients, optimizer state,
                      buffers; activations and transfers at the fullest moment of the step, if a
                      `Meter` counted them
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autopipe.ir.partition import Stage
from autopipe.ir.tensors import tensors_in
from autopipe.planfile.parts import Memory, StagePrediction
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.prepare import Rank
from autopipe.schedules.instructions import Kind

BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def stages_of_step(
    rank: Rank, executor: Executor, meter: Meter | None, optimizer: torch.optim.Optimizer | None
) -> dict[int, StagePrediction]:
    """The measurements of each stage of this rank, by its index.

    A tensor that two stages of a rank share counts with the first.

    Args:
        executor: the executor that ran the step.
        meter: the meter that counted its bytes; None: activations and transfers are 0.
        optimizer: the optimizer that updated the parameters; None: its state is 0 bytes.
    """
    by_stage: dict[int, StagePrediction] = {}
    seen: set[str] = set()
    peak = meter.at_peak if meter is not None else {}
    most = {index: stage.most for index, stage in rank.held.gathered.items()}
    fullest = max(most, key=most.__getitem__, default=None)  # one stage runs at a time
    for stage in rank.part.stages:
        names = [name for name in stage.states if name not in seen]
        seen |= set(names)
        forward, backward = _seconds(stage, executor)
        activations = peak.get((stage.index, "activations"), 0)
        transfers = peak.get((stage.index, "transfers"), 0)
        copies = executor.stages[stage.index].how.copies
        low = _bytes(copies[key] for n in names if (key := id(rank.held.states[n])) in copies)
        low += rank.held.gathered[fullest].most if stage.index == fullest else 0
        memory = _memory(rank, names, optimizer, activations, transfers, low)
        by_stage[stage.index] = StagePrediction(forward, backward, memory)
    return by_stage


def _seconds(stage: Stage, executor: Executor) -> tuple[float, float]:
    """Mean seconds of forward and of backward of a micro-batch in the step."""
    index, seconds = stage.index, executor.seconds
    rounds = sum(i.kind is Kind.FORWARD and i.stage == index for i in executor.program)
    backward = sum(seconds[index, kind] for kind in BACKWARD)
    return seconds[index, Kind.FORWARD] / rounds, backward / rounds


def _memory(
    rank: Rank,
    names: Sequence[str],
    optimizer: torch.optim.Optimizer | None,
    activations: int,
    transfers: int,
    copies: int,
) -> Memory:
    """Bytes of the states of these names, beside those that a step holds."""
    states, specs = rank.held.states, rank.part.split.graph.states
    shards = dict(rank.held.gradients.shards())
    trained = [n for n in names if n in shards and shards[n].grad is not None]
    state_of = optimizer.state if optimizer is not None else {}
    # Under ZeRO-1 and 2 forward reads the state, and the master is a shard. Under ZeRO-3 what is
    # read is there while it is gathered.
    fully = bool(rank.held.gathered)
    read = shards if fully else states
    sharded = {n for n in names if not fully and specs[n].master not in (None, states[n].dtype)}
    parameters = [n for n in names if specs[n].kind == "parameter"]

    def gradient(name: str) -> int:
        if rank.part.plan.scatters:
            return _bytes([shards[name]])
        return states[name].numel() * specs[name].summed.dtype.itemsize

    return Memory(
        parameters=_bytes(shards[n] if n in sharded else read[n] for n in parameters),
        gradients=sum(gradient(n) for n in trained),
        optimizer=_bytes(
            tensors_in([state_of[shards[n]] for n in trained if shards[n] in state_of])
        ),
        buffers=_bytes(states[n] for n in names if specs[n].kind != "parameter"),
        activations=activations,
        transfers=transfers,
        copies=copies,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
