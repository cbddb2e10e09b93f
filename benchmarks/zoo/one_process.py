"""All ranks of a plan in this process: the runtime's own executors, programs and stages.

Only the network between stages (`runtime.comm.threads`) and the sums over ranks are simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.tree import flatten
from autopipe.ir.dataflow import analyse
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.placements import Sharding
from autopipe.sharding.collectives import together
from autopipe.sharding.plan_io import read_back
from autopipe.stages.bind import split_as_planned
from autopipe.stages.dry_run import Known, rehearse
from autopipe.stages.lower import lower
from autopipe.stages.rng import stream
from autopipe.stages.step_programs import step_programs
from autopipe.tracing.traced import Trace
from tests.support import inprocess, simulated
from tests.support.regroup import regrouped


@dataclass(frozen=True)
class Result:
    """What a step left behind.

    Attributes:
        losses: of each micro-batch.
        gradients, buffers: by name; of what nothing reads none.
        saved: bytes kept for backward, the most of each rank added up.
        regrouped: gradients that are sums over stages, in another order than of one process.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    saved: int | None = None
    regrouped: frozenset[str] = frozenset()


def in_stages(plan: Plan, trace: Trace, model: nn.Module, batch: Any, known: Known) -> Result:
    """A step of a plan without tensor parallelism: a thread for each rank, with its executor.

    Args:
        known: what planning has rehearsed, which ranks of a real run rehearse once more.
    """
    split = split_as_planned(trace, plan)
    graph, rows = split.graph, plan.batch.microbatch_rows(1)
    again = tuple(block for stage in plan.stages for block in stage.recompute)
    rehearsal = rehearse(graph, split.stages, split.blocks, rows, recompute=again, known=known)
    cut = inprocess.Cut(
        "", split.trace, analyse(graph), split.blocks, split.stages, rehearsal, rows, again
    )
    windows = [boundary.window for boundary in plan.boundaries]
    steps = step_programs(
        programs.compute(plan),
        split.stages,
        rehearsal.boundaries,
        windows,
        programs.sends_ahead(plan),
    )
    made, owned = inprocess.ready(cut, steps, metered=True, model=model)
    results = inprocess.step(made, cut, batch, 1 / plan.batch.micro_batches)
    saved = sum(
        size
        for executor in made
        if executor.meter is not None
        for (_, kind), size in executor.meter.at_peak.items()
        if kind == "activations"
    )
    losses = [result[0].detach() for result in results]
    gradients, buffers = inprocess.gradients(owned), inprocess.buffers(cut, owned)
    return Result(losses, gradients, buffers, saved, frozenset(regrouped(cut)))


def dealt_out(plan: Plan, trace: Trace, model: nn.Module, batch: Any) -> Result:
    """A step of a plan with tensor parallelism alone: a thread for each rank."""
    sharding = read_back(plan)
    whole = simulated.states_of(trace, model)
    rows, count = plan.batch.microbatch_rows(1), plan.batch.micro_batches
    leaves = flatten(batch)

    def run(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        split = split_as_planned(trace, plan, rank, sharding)
        (stage,) = split.stages
        own = simulated.dealt({name: whole[name] for name in stage.states}, sharding, rank)
        graph, reads = split.graph, trace.reads
        module = lower(graph, stage, split.blocks, own, reads, rows, last=True).module
        losses = []
        for k in range(count):
            of_it = slice_rows(trace.inputs, leaves, k * rows, (k + 1) * rows)
            with stream(0, 0, k):
                loss = module(*(of_it[path].clone() for path in stage.inputs))[0]
                loss.backward(torch.full_like(loss, 1 / count))
            losses.append(loss.detach())
        return losses, own

    outcomes = simulated.everywhere(simulated.Meeting(sharding.ranks), run)
    parts = [own for _, own in outcomes]
    return Result(outcomes[0][0], _whole_gradients(parts, sharding, whole), _buffers(parts[0]))


def _whole_gradients(
    parts: list[dict[str, Tensor]], sharding: Sharding, whole: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Each gradient as one process has it, from the ranks' parts.

    Raises:
        AssertionError: ranks that hold the same parameter have other gradients of it.
    """
    found = {}
    for name, first in parts[0].items():
        if first.grad is None:
            continue
        gradients = [own[name].grad for own in parts]
        assert all(gradient is not None for gradient in gradients), name
        lies = sharding.states.get(name)
        if lies is None:
            close = torch.allclose(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
            assert close, f"{name} is replicated, and its gradients differ, {gradients}"
            found[name] = gradients[0]
        elif lies.sharded:
            found[name] = together(gradients, lies, whole[name].shape[lies.dim])
        else:
            found[name] = torch.stack(gradients).sum(0)
    return found


def _buffers(own: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in own.items() if not isinstance(tensor, nn.Parameter)}
