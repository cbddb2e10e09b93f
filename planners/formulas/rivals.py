"""Find a plan's rivals: plans of other meshes, for less memory or for a slower link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from autopipe.cluster.cluster import Link
from autopipe.cluster.collective_time import Topology
from autopipe.errors import AutopipeError
from autopipe.frontend.measured_optimizer import optimizer_factor
from autopipe.frontend.model_file import ModelFile
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.planfile.contents import Plan
from autopipe.planners.driver import request
from autopipe.planners.driver.candidate import Candidate, candidate_at
from autopipe.planners.driver.loss_parts import with_parts
from autopipe.planners.driver.refine import plan_that_fits
from autopipe.planners.formulas.lengths import TracedAgain
from autopipe.planners.model.estimate import PipelineDegrees
from autopipe.planners.model.problem import Constraints, Problem
from autopipe.planners.search.dynamic import dynamic
from autopipe.rows.least_rows import least_rows, or_two
from autopipe.scaling import links
from autopipe.tracing.capture import user_checkpoints
from autopipe.util.progress import Say, phase
from autopipe.util.stopwatch import Stopwatch

SLOWER, SMALLER = 8, 2
"""How many times less bandwidth, and memory, the plans are searched for that are best then."""

SCARCE = {
    "memory": f"found for devices with 1/{SMALLER} of the memory",
    "link": f"found for a farthest link of 1/{SLOWER} of the bandwidth",
}
"""What is said of those plans."""


def rivals(plan: Plan, file: ModelFile, traced: TracedAgain, most: int, say: Say) -> list[Plan]:
    """Plans of the same step on the same devices, the best of each of the other meshes first.

    Args:
        most: the largest number of rivals.
        say: gets a line of talk at a time.
    """
    job = job_of(plan, file, traced, say)
    distinct: list[Plan] = []
    with phase("plans beside it", of=most) as done:
        for other in _searched(plan, job):
            if all(not _same(other, known) for known in (plan, *distinct)):
                distinct.append(other)
                done()
            if len(distinct) >= most:
                break
    return distinct


def job_of(plan: Plan, file: ModelFile, traced: TracedAgain, say: Say) -> request.Job:
    """The job that a plan answers: its rows, devices, precision, and compiled stages or not."""
    trace, made_by = traced.fixed(), file.optimizer_for(plan)
    flow, blocks = analyse(trace.graph), find_blocks(trace.graph)
    limits = plan.planner.limits
    asked = request.PlanRequest(
        model=file.model,
        inputs=file.inputs,
        loss=file.loss,
        optimizer=made_by,
        precision=plan.precision,
        grad_dtype=plan.grad_dtype,
        optimizer_dtype=plan.optimizer_dtype,
        compiled=plan.compiled,
        fuse_attention=plan.fused_attention,
        cluster=plan.cluster,
        batch_size=plan.batch.rows,
        constraints=Constraints(
            memory=limits * plan.cluster.num_devices if len(limits) == 1 else None,
            turns=(),  # no sheet tells of ranks that take turns
        ),
        recompute=None,
        planner="dynamic",
        sequence_parallel=True,
        loss_over=plan.loss_over,
        loss_parts=plan.loss_parts,
        source=plan.source,
    )
    model = request.Traced(
        trace,
        flow,
        blocks,
        plan.batch.rows,
        or_two(least_rows(trace.graph), plan.asks_for_one_row),
        user_checkpoints.checkpointed_blocks(flow, blocks, say),
        trace.graph,
        offload=(),  # which no sheet tells of
    )
    factor = optimizer_factor(made_by, trace.graph)
    model = with_parts(
        model.with_fused_attention if plan.fused_attention else model, plan.loss_parts
    )
    return request.Job(asked, model, plan.cluster, factor)


def _searched(plan: Plan, job: request.Job) -> Iterator[Plan]:
    """The plans of the best alternatives, and the best ones with less memory or a slower link."""
    candidates: dict[int, Candidate] = {}

    def candidate(tp: int) -> Candidate:
        if tp not in candidates:
            candidates[tp] = candidate_at(job, tp, Stopwatch())
        return candidates[tp]

    chosen = candidate(plan.mesh.tp)
    problem = chosen.counted().problem
    alternatives = plan.planner.alternatives
    scarce = {"memory": _less_memory(problem), "link": _slower_link(problem)}
    for alternative in alternatives[:2]:
        yield from _of_mesh(candidate(alternative.tp), (alternative.pp, alternative.dp))
    for resource, scarcer in scarce.items():
        for rival in _where_scarce(chosen, scarcer):
            binding = f"{SCARCE[resource]}, where: {rival.planner.binding}"
            yield replace(rival, planner=replace(rival.planner, binding=binding))
    for alternative in alternatives[2:]:
        yield from _of_mesh(candidate(alternative.tp), (alternative.pp, alternative.dp))


def _of_mesh(candidate: Candidate, mesh: PipelineDegrees) -> Iterator[Plan]:
    """The best plan of a mesh, if any fits."""
    with suppress(AutopipeError):
        answer = candidate.search(candidate.counted().problem, (), mesh)
        yield plan_that_fits(candidate, answer, mesh)


def _where_scarce(candidate: Candidate, scarcer: Problem) -> Iterator[Plan]:
    """The plan that is best for other devices, on those that there are; none if nothing fits."""
    with suppress(AutopipeError):
        # By a search that knows nothing of other problems: their decisions are not this one's.
        yield plan_that_fits(candidate, dynamic(scarcer))


def _less_memory(problem: Problem) -> Problem:
    machine = problem.machine
    return replace(
        problem,
        machine=replace(machine, memory=tuple(size // SMALLER for size in machine.memory)),
    )


def _slower_link(problem: Problem) -> Problem:
    """The problem with a slower link between the farthest devices."""
    topology = problem.machine.topology

    def slower(link: Link) -> Link:
        return links.faster(link, 1 / SLOWER)

    across = None if topology.across is None else slower(topology.across)
    between = slower(topology.between) if across is None else topology.between
    within = topology.within
    if len(set(topology.nodes)) == 1:
        within = tuple(slower(link) for link in within)
    made = Topology(topology.nodes, topology.sites, within, between, across)
    return replace(problem, machine=replace(problem.machine, topology=made))


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans decide the same."""
    return (one.mesh, one.batch, one.schedule, one.zero, one.boundaries) == (
        other.mesh,
        other.batch,
        other.schedule,
        other.zero,
        other.boundaries,
    ) and all(
        (a.first, a.last, a.recompute) == (b.first, b.last, b.recompute)
        for a, b in zip(one.stages, other.stages, strict=True)
    )
