"""Make a plan for few processes here: the plan itself on fewer replicas, or a similar one.

same_cuts   the plan's stages, placements, schedule, precision        fewer replicas, fewer
            and ZeRO stage, to the letter                             micro-batches
planned     another plan, of a smaller model or a smaller mesh,       under the words that the
                                                                      plan stands for
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autopipe.checking.fit import Degrees
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.again import named, offloaded, repeated
from autopipe.planfile.contents import Plan, signed
from autopipe.planfile.parts import IN_PARTS, WHOLE, Batch, Mesh, Place, Transfer
from autopipe.planners.driver import make_plan
from autopipe.stages.sent_parts import in_parts_of
from autopipe.util.progress import Say

RATES = {"fp32": 1e10, "fp64": 5e9, "bf16": 2e10, "fp16": 2e10}


def this_machine(processes: int) -> Cluster:
    """A cluster of processes on this machine, with room for anything and made-up rates.

    Whether a split is right does not depend on its speed, so nothing is measured.
    """
    cpu = Device("cpu", 2**40, RATES, 1e10, 1e-6, "made up: a check is not about speed")
    link = Link(1e-4, 1e9)
    return Cluster(f"local:{processes}", (NodeGroup(1, (Group(processes, cpu),)),), link, link)


def same_cuts(plan: Plan, degrees: Degrees) -> Plan:
    """The plan with fewer replicas, micro-batches and rows, its ranks on this machine's CPU.

    Raises:
        PlanError, ScheduleError: in its run, if its schedule does not allow so few micro-batches.
    """
    mesh = Mesh(degrees.pp, degrees.dp, degrees.tp, ())
    places = [
        Place(rank := mesh.rank(pp, dp, tp), pp, dp, tp, 0, rank, "cpu")
        for pp in range(mesh.pp)
        for dp in range(mesh.dp)
        for tp in range(mesh.tp)
    ]
    return signed(
        replace(
            plan,
            cluster=this_machine(len(places)),
            mesh=replace(mesh, places=tuple(places)),
            batch=Batch(degrees.batch, degrees.micro_batches),
            work=None,
        )
    )


def in_double(plan: Plan, other: Plan) -> Plan:
    """The plan with its stages unchanged, for the fp64 model of which `other` is a plan."""

    def wide(tensors: Iterable[Transfer]) -> tuple[Transfer, ...]:
        return tuple(replace(t, dtype="float64") if t.dtype == "float32" else t for t in tensors)

    stages = [replace(s, receives=wide(s.receives), sends=wide(s.sends)) for s in plan.stages]
    model = ("fingerprint", "trail", "inputs", "reads", "products", "regions")
    of_model = {name: getattr(other, name) for name in model}
    return signed(replace(plan, stages=tuple(stages), **of_model))


def words_of(plan: Plan) -> dict[str, Any]:
    """The constraints under which another plan splits in the way of this one."""
    words: dict[str, Any] = {
        "precision": plan.precision,
        "grad_dtype": plan.grad_dtype,
        "optimizer_dtype": plan.optimizer_dtype,
        "compile": plan.compiled,
        "fuse_attention": plan.fused_attention,
        "zero": plan.zero,
        "recompute": _recomputed(plan) or "none",
        "offload": _offloaded(plan) or "off",
        "loss_over": plan.loss_over,
        "loss_parts": plan.loss_parts or "off",
        "lengths": plan.lengths,
    }
    if plan.mesh.tp > 1:
        words["transfers"] = IN_PARTS if in_parts_of(plan) else WHOLE
    if plan.mesh.pp > 1:
        words["turns"] = plan.turns or "off"
        words |= {"schedule": plan.schedule, "window": plan.boundaries[0].window}
        if plan.schedule == "interleaved":
            words["chunks"] = len(plan.stages) // plan.mesh.pp
        if plan.schedule == "eager-1f1b":
            words["depth"] = plan.boundaries[0].depth
    return words


def _recomputed(plan: Plan) -> list[str]:
    """The blocks and ops that run again in backward, by names that a smaller model has too.

    Classes of blocks and their ops are named after the first member, which a smaller model keeps.
    If some blocks of a class run again whole and others by op, the second member, which is kept
    too, runs again whole and all others by op.
    """
    again = repeated(plan, plan.stages)
    whole_blocks = {path for group in again if not group.ops for path in group.blocks}
    single = {path: group.ops for group in again for path in group.blocks if group.ops}
    found: dict[str, None] = {}
    for kind in plan.blocks:
        if whole_blocks & {*kind.members}:
            found[kind.members[1] if single.keys() & {*kind.members} else kind.name] = None
    first = {member: kind.name for kind in plan.blocks for member in kind.members}
    for path, ops in single.items():
        found |= dict.fromkeys(named(first.get(path, path), op) for op in ops)
    return [*found]


def _offloaded(plan: Plan) -> list[str]:
    """The offloaded blocks, by names that a smaller model has too: classes or, if other blocks of
    the class run again, its second member, which then does not."""
    away, again = {*offloaded(plan)}, repeated(plan, plan.stages)
    running = {path for group in again for path in group.blocks}
    return [
        kind.members[1] if running & {*kind.members} else kind.name
        for kind in plan.blocks
        if away & {*kind.members}
    ]


def planned(file: ModelFile, degrees: Degrees, words: dict[str, Any], say: Say) -> Plan:
    """Plan `file` for `degrees` on this machine; all else as `words` say.

    Raises:
        AutopipeError: as `make_plan.plan`.
    """
    turns = words.get("turns")
    if isinstance(turns, tuple) and sum(turns) != degrees.pp:
        words = words | {"turns": (1, degrees.pp - 1) if degrees.pp > 2 else "off"}
    return make_plan.plan(
        file.model,
        file.inputs,
        loss=file.loss,
        optimizer=file.optimizer or "adamw",
        cluster=this_machine(degrees.ranks),
        batch_size=degrees.batch,
        pp=degrees.pp,
        dp=degrees.dp,
        tp=degrees.tp,
        micro_batches=degrees.micro_batches,
        say=say,
        **words,
    )
