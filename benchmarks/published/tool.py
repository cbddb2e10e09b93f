"""A published run put to the tool: its model, its cluster, its layout, one call of `autopipe.plan`.

    Run --> Transformer (module.py), Cluster (cluster.py), constraints --> autopipe.plan --> Outcome

The model is built as a user would write it, and traced and planned by the code that `autopipe plan`
runs. Nothing is fitted.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import autopipe
from autopipe.cluster.cluster import Cluster, Device, Link
from autopipe.planfile import predict, programs
from autopipe.planfile.again import repeated
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Prediction
from autopipe.report.fullest import fullest
from autopipe.schedules.instructions import format_programs
from autopipe.schedules.registry import SCHEDULES
from autopipe.schedules.simulate import simulate
from benchmarks.published import deepspeed
from benchmarks.published.cluster import (
    cluster_of,
    devices_changed,
    with_early_kernels,
    with_flash1,
)
from benchmarks.published.megatron import without_waits
from benchmarks.published.module import Transformer
from benchmarks.published.rows import Run, Unsupported
from benchmarks.published.zero_bubble import zb_2p

Asked = Mapping[str, Any]
"""Arguments of `autopipe.plan`."""

AGAIN = "layers.0.attention.out/linear/0", "layers.0.feed_forward.up/linear/0"
"""Every other matmul, which torchtitan runs again where it checkpoints by op
(`activation_checkpoint.py`): of seven a layer `wk`, a part of `qkv` here, `wo` and `w3`."""

ROOM = 100
"""How many times a device's memory a plan may fill where its layout is given."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a plan says of itself.

    Args:
        layout: its mesh, schedule and recomputation, in words.
        seconds: of a step.
        bubble: the share of it in which a rank does not compute.
        needed: bytes of tensors on the fullest device.
        capacity: those that tensors may fill there.
        bytes: `needed` by what they are for.
    """

    layout: str
    seconds: float
    bubble: float
    needed: int
    capacity: int
    bytes: dict[str, int]

    @property
    def fits(self) -> bool:
        """The device has room for it."""
        return self.needed <= self.capacity


def outcome(plan: Plan, cluster: Cluster) -> Outcome:
    """What a plan says of itself on the devices of `cluster`."""
    full, mesh = fullest(plan), plan.mesh
    kinds = [vars(plan.stages[stage].predicted.memory) for stage in full.stages]
    chunks = len(plan.stages) // mesh.pp
    again = "; ".join(map(str, repeated(plan, plan.stages)))
    words = [f"tp={mesh.tp} pp={mesh.pp} dp={mesh.dp} m={plan.batch.micro_batches}"]
    if mesh.pp > 1:
        words.append(plan.schedule if not plan.programs else "written")
    if plan.schedule == "interleaved":
        words.append(f"chunks={chunks}")
    words += [f"zero={plan.zero}"] if plan.zero else []
    words += [f"again: {again}"] if again else []
    return Outcome(
        layout=" ".join(words),
        seconds=plan.prediction.step_seconds,
        bubble=plan.prediction.bubble,
        needed=full.held,
        capacity=min(device.memory for device in cluster.devices),
        bytes={kind: sum(each[kind] for each in kinds) for kind in kinds[0]},
    )


def own_layout(run: Run) -> Outcome:
    """What the tool says of the layout that ran.

    Devices have memory without end here, so that a layout that is said not to fit has a step too.
    Where the run's fused kernels keep what eager ones do, seconds are of compiled stages, and bytes
    of stages that run op by op; where its loss alone is not fused, what passes within an op is.

    Raises:
        Unsupported: the tool has not what the run used.
        AutopipeError: the tool refuses the model or the layout.
    """
    found, software = _layout(run, compiled=run.software.fused), run.software
    keeps = run.dropout and software.keeps_dropout
    if not keeps and not software.eager_loss:
        return found
    kept = _layout(run, compiled=False)
    if keeps:
        return dataclasses.replace(found, needed=kept.needed, bytes=kept.bytes)
    passing = max(kept.bytes["passing"], found.bytes["passing"])
    parts = {**found.bytes, "passing": passing}
    needed = found.needed - found.bytes["passing"] + passing
    return dataclasses.replace(found, needed=needed, bytes=parts)


def _layout(run: Run, *, compiled: bool) -> Outcome:
    cluster = _cluster(run)
    waits = deepspeed.waits(run, cluster)
    with tempfile.TemporaryDirectory() as folder:
        layout: Asked = {
            "pp": run.pp,
            "dp": run.dp,
            "tp": run.tp,
            "micro_batches": run.micro_batches,
        }
        plan = autopipe.plan(
            **_asked(run, roomy(_idle(cluster) if waits else cluster)),
            **layout,
            **_schedule(run, Path(folder)),
            planner="uniform" if run.software.even else "dynamic",
            zero=min(run.sharding, 1) if run.sharding < 3 else 3,
            recompute=_recompute(run),
            compile=compiled,
            fuse_attention=False,  # the module writes it out where the run's software did
            sequence_parallel=run.sequence_parallel,
        )
    plan = without_waits(run, cluster, plan)
    found = outcome(plan if run.software.sums else _summed_after(plan), cluster)
    found = dataclasses.replace(found, seconds=found.seconds + waits)
    return _with_its_loss(run, plan, found)


def _summed_after(plan: Plan) -> Plan:
    """The plan, as if gradients were summed when the last backward has ended."""
    whole = [sum(each) for each in predict.sums(plan)]
    found = simulate(programs.step(plan), dataclasses.replace(predict.costs(plan), reduce=whole))
    return dataclasses.replace(plan, prediction=Prediction(found.seconds, found.bubble))


def _with_its_loss(run: Run, plan: Plan, found: Outcome) -> Outcome:
    """Without the two gradients of logits in fp32 that a run's fused loss does not have."""
    has_loss = len(plan.stages) - 1 in fullest(plan).stages
    if not run.software.fused_loss or plan.compiled or not has_loss:
        return found
    gradients = 2 * 4 * run.micro_batch * run.model.seq * run.model.vocab // run.tp
    parts = {**found.bytes, "passing": found.bytes["passing"] - gradients}
    return dataclasses.replace(found, needed=found.needed - gradients, bytes=parts)


def free_choice(run: Run) -> Outcome:
    """What the tool would have chosen for the same model, devices and batch.

    Raises:
        Unsupported, AutopipeError: as `own_layout`.
    """
    cluster = _cluster(run)
    return outcome(autopipe.plan(**_asked(run, cluster)), cluster)


def replaced(run: Run) -> list[str]:
    """What of the run cannot be said to the tool, and what is said instead."""
    cluster = _cluster(run)
    found: list[str] = []
    if run.sharding == 2:
        found.append("ZeRO-2 as ZeRO-1")
    if run.half and _precision(run, cluster) == "bf16":
        found.append("fp16 as bf16")
    if run.schedule == "zb-2p":
        found.append("zb-2p as the written ZB-H2")
    return found


def _cluster(run: Run) -> Cluster:
    found = cluster_of(run.gpu, run.memory_gb, run.devices, run.per_node, run.within, run.between)
    if run.software.overlaps and run.sequence_parallel:
        # Chunk by chunk beside the matmul that makes or reads them: one of tp is waited for.
        inside = found.within
        within = dataclasses.replace(
            inside,
            bandwidth=run.tp * inside.bandwidth,
            summing=run.tp * inside.summing,
            gathering=run.tp * inside.gathering,
        )
        found = dataclasses.replace(found, within=within)
    if run.software.early:
        found = devices_changed(found, with_early_kernels)
    first = run.attention == "flash1" or run.software.early and run.attention == "flash"
    return devices_changed(found, with_flash1) if first else found


def _asked(run: Run, cluster: Cluster) -> Asked:
    """The question: all but the layout."""
    return {
        "model": partial(Transformer, run),
        "inputs": partial(_batch, run),
        "cluster": cluster,
        "batch_size": run.micro_batch * run.micro_batches * run.dp,
        "precision": _precision(run, cluster),
        "grad_dtype": _precision(run, cluster) if run.low_gradients and not run.pure else None,
    }


def _precision(run: Run, cluster: Cluster) -> str:
    """fp16 is as fast as bf16; only where there is no bf16 it is asked for by its name."""
    if run.pure:
        return "fp32"  # which leaves a model of 16 bits as it is
    return "bf16" if all("bf16" in device.flops for device in cluster.devices) else "fp16"


def _schedule(run: Run, folder: Path) -> Asked:
    """The schedule by its name; ZB-2p, which has none, is written into a file.

    ZB-2p is found by search, within the memory of ZB-H2 (Qi et al., 2024, section 3): the one that
    the paper writes by hand for that memory stands for it.
    """
    if run.schedule == "zb-2p":
        path = folder / "zb-2p"
        path.write_text(format_programs(zb_2p(run.pp, run.micro_batches)))
        return {"schedule": str(path)}
    if run.schedule not in SCHEDULES:
        raise Unsupported(f"schedule {run.schedule}")
    chunks = run.chunks if run.schedule == "interleaved" else None
    return {"schedule": run.schedule, "chunks": chunks}


def _recompute(run: Run) -> str | list[str]:
    """What runs again: whole blocks, or ops of all of them."""
    gathers = ["gathers"] if run.software.gathers and run.sequence_parallel else []
    if run.recompute == "alternate":  # the first layer's name would mean all of its class
        return [f"layers.{n}" for n in range(1, run.model.layers, 2)]
    if run.recompute == "elementwise":
        return ["elementwise", *AGAIN]
    if run.recompute == "attention":
        return ["attention", *gathers]
    return "all" if run.recompute == "full" else gathers or "none"


def roomy(cluster: Cluster) -> Cluster:
    """The cluster, its devices with memory without end."""

    def larger(device: Device) -> Device:
        return dataclasses.replace(device, memory=ROOM * device.memory)

    return devices_changed(cluster, larger)


def _idle(cluster: Cluster) -> Cluster:
    """The cluster with links that take no time: what goes over them is counted apart."""
    link = Link(0.0, 1e18)
    return dataclasses.replace(cluster, within=link, between=link)


def _batch(run: Run, rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(rows, run.model.seq, dtype=torch.long)
    return {"tokens": tokens, "labels": tokens}
