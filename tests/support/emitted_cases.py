"""Plans of models of the zoo as files: to emit one, and to run it from its files or from the plan.

A step runs in this process, a thread a rank, as `support.inprocess` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopipe import Plan
from autopipe.emit.emit import emit
from autopipe.planfile import programs
from autopipe.runtime.comm.threads import local_network
from autopipe.runtime.parameters.hold import HeldParameters
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.step import prepare
from autopipe.runtime.step.emitted_files import Emitted
from autopipe.runtime.step.executor import Executor
from autopipe.schedules.instructions import holders
from autopipe.stages.bind import split_as_planned
from tests.support import inprocess
from tests.support.inprocess import Cut, Unsummed
from tests.support.pipes import planned, traced_once
from tests.support.zoo import ZOO


@dataclass(frozen=True)
class Case:
    """A plan of a model of the zoo: two rows to a micro-batch, four micro-batches."""

    name: str
    plan: Plan

    def emit(self, folder: Path, **options: Any) -> Path:
        zoo = ZOO[self.name]
        with traced_once(self.name):
            emit(zoo.model(), self.plan, folder, loss=zoo.loss, source="net.py", **options)
        return folder

    def run(self, folder: Path | None = None) -> dict[str, Tensor]:
        """The losses of two steps, the gradients of the second one, and the buffers after it.

        Args:
            folder: run the files in it, and not what the plan says.
        """
        emitted = Emitted.load(folder, self.plan) if folder is not None else None
        plan = emitted.plan if emitted is not None else self.plan
        found, flow, blocks = inprocess.traced(self.name)
        split = split_as_planned(found, plan)
        cut = Cut(self.name, found, flow, blocks, split.stages, None, 2)  # type: ignore[arg-type]
        model, compute = ZOO[self.name].model(), programs.compute(plan)
        placed, device = holders(compute), torch.device("cpu")
        executors, owned = list[Executor](), list[dict[str, Tensor]]()
        for place, transport in zip(plan.mesh.places, local_network(placed), strict=True):
            own: dict[str, Tensor] = {}
            for stage in split.stages:
                if placed[stage.index] == place.pp:
                    own = inprocess.own_states(cut, stage, model) | own
            part = RankPart(plan, place, split, placed, device)
            held = HeldParameters(own, Unsummed(), {})  # type: ignore[arg-type]
            rank = prepare.Rank(part, compute, transport, held, emitted=emitted)
            executors.append(prepare.training(rank, 2))
            owned.append(own)
        results: dict[str, Tensor] = {}
        for number in range(2):
            for tensor in (tensor for own in owned for tensor in own.values()):
                tensor.grad = None
            batch = ZOO[self.name].inputs(plan.batch.rows)
            losses = inprocess.step(executors, cut, batch, 0.25, number)
            results |= {f"loss {number}.{k}": loss for k, (loss, *_) in enumerate(losses)}
        return results | inprocess.gradients(owned) | inprocess.buffers(cut, owned)


@cache
def case(name: str, pp: int, schedule: str = "1f1b", **constraints: Any) -> Case:
    """A plan for one pipeline."""
    return Case(name, planned(name, pp, 1, 4, schedule, **constraints))


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit by bit, and by the same names."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
