"""Say how many bytes a plan's fullest device holds, of how many, and at which instruction."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.cluster import datasheets
from autopipe.cluster.cluster import Device
from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.schedules.instructions import COMPUTE, Kind, holders, parse
from autopipe.schedules.phrases import short
from autopipe.schedules.registry import flying
from autopipe.util import numbers
from autopipe.util.numbers import Amount, count, ranges


@dataclass(frozen=True)
class Fullest:
    """The device with the largest share of its memory used.

    Attributes:
        rank: the pipeline rank on the device.
        stages: indices of the stages that it holds.
        held: its predicted peak in bytes.
        room: bytes that tensors may fill; None if there are several limits.
        device: what it is.
    """

    rank: int
    stages: tuple[int, ...]
    held: int
    room: int | None
    device: Device


def fullest(plan: Plan) -> Fullest:
    """The fullest device among the first replica's first tensor-parallel ranks."""
    return max(shares(plan), key=lambda each: each[0])[1]


def shares(plan: Plan) -> list[tuple[float, Fullest]]:
    """For each pipeline rank, the share of its room that it fills, and the bytes behind it."""
    placed, limits = holders(programs.compute(plan)), plan.planner.limits
    numbered = predict.devices(plan)
    ranks = []
    for rank in range(plan.mesh.pp):
        device = plan.cluster.device_at(numbered[plan.mesh.rank(rank, 0)])[2]
        stages = tuple(stage for stage, holder in enumerate(placed) if holder == rank)
        held = sum(plan.stages[stage].predicted.memory.peak for stage in stages)
        room = min(device.memory, *limits) if len(limits) == 1 else device.memory
        known = None if len(limits) > 1 else room
        ranks.append((held / room, Fullest(rank, stages, held, known, device)))
    return ranks


def room(plan: Plan) -> str:
    """`105.2 MiB of the 1.0 GiB that tensors may fill, on the fullest device (stage 0)`."""
    rank = fullest(plan)
    kinds = {device.kind for device in plan.cluster.devices}
    whose = f"stage{'s' if len(rank.stages) > 1 else ''} {ranges(rank.stages)}"
    kind = f", {rank.device.kind}" if len(kinds) > 1 else ""
    where = f"the fullest device ({whose}{kind})"
    if rank.room is None:
        asked = ", ".join(numbers.memory(limit) for limit in plan.planner.limits)
        return f"{numbers.memory(rank.held)} on {where}; limits that were asked for: {asked}"
    may = "were asked for as its limit" if plan.planner.limits else "tensors may fill"
    return f"{numbers.memory(rank.held)} of the {numbers.memory(rank.room)} that {may}, on {where}"


def parts(plan: Plan) -> dict[str, int]:
    """Bytes of the fullest device at its fullest moment, by what they are; parts of 0 left out."""
    stages = [plan.stages[stage].predicted.memory for stage in fullest(plan).stages]
    low = plan.precision.removesuffix("-autocast")
    words = {
        "parameters": "fp32 master weights" if plan.masters else "parameters",
        "copies": "gathered parameters" if plan.fully_sharded else f"{low} weights",
        "gradients": "gradients",
        "optimizer": "optimizer state",
        "buffers": "buffers",
        "activations": "activations",
        "transfers": "transfers",
        "passing": "gradients on their way",
    }
    sums = {words[name]: sum(getattr(each, name) for each in stages) for name in words}
    return {name: size for name, size in sums.items() if size}


def moment(plan: Plan) -> str | None:
    """The instruction at which the device is fullest, `B3 of stage 0`; None: not known."""
    instruction_text = plan.stages[fullest(plan).stages[0]].predicted.fullest
    if not instruction_text:
        return None
    instruction = parse(instruction_text)
    if instruction.kind in COMPUTE:
        return f"{instruction.kind.value}{instruction.microbatch} of stage {instruction.stage}"
    words = short(instruction)
    return words if instruction.kind is Kind.REDUCE else f"{words}, stage {instruction.stage}"


def holding(plan: Plan) -> str:
    """`at B3 of stage 0, in GiB: 12.3 gradients, 28.2 activations (4 micro-batches in flight)`."""
    rank, at = fullest(plan), moment(plan)
    amount, program = Amount(rank.held), programs.compute(plan)[rank.rank]
    held = sum(flying(program, stage) for stage in rank.stages)
    each = ", in all its stages" if len(rank.stages) > 1 else ""
    listed, sizes = [], parts(plan)
    for name, size in zip(sizes, amount.adding_up(list(sizes.values())), strict=True):
        if size != amount(0):
            of = f" ({count(held, 'micro-batch', 'micro-batches')} in flight{each})"
            listed.append(f"{size} {name}{of if name == 'activations' else ''}")
    text = f"{f'at {at}, ' if at else ''}in {amount.unit}: {', '.join(listed)}"
    margin = None if plan.planner.limits else datasheets.margin(rank.device)
    return text if margin is None else f"{text}; besides, {numbers.memory(margin)} of margin"
