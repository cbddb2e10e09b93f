"""Small plans that are valid; tests change what they are about.

`example_plan` has something in every field, `chain` has as many stages as one likes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopipe.cluster import spec
from autopipe.cluster.cluster import Cluster, Group, Link, NodeGroup
from autopipe.planfile.contents import FORMAT, Plan
from autopipe.planfile.parts import (
    Alternative,
    Batch,
    BlockClass,
    Boundary,
    InputSpec,
    Memory,
    Mesh,
    Place,
    PlannerNote,
    Prediction,
    Read,
    StagePlan,
    StagePrediction,
    Transfer,
    WrittenPlacement,
)
from autopipe.planfile.work import Spent, Work


def example_plan() -> Plan:
    """Two stages on two devices: an embedding and a block each, and a tied weight.

    rank 0 (stage 0)   embed, block 0  --hidden-->  block 1, head   rank 1 (stage 1)
    """
    machine = spec.parse("2xA100-80GB")
    assert isinstance(machine, Cluster)
    predicted = StagePrediction(
        forward_seconds=0.001,
        backward_seconds=0.002,
        memory=Memory(
            parameters=4096,
            gradients=4096,
            optimizer=8192,
            buffers=0,
            activations=2048,
            transfers=512,
        ),
        spent=Spent(1.2e-3, 0.6e-3, 0.3e-3, recompute=0.9e-3),
        fullest="0B0",
    )
    places = tuple(
        Place(rank=rank, pp=rank, dp=0, tp=0, node=0, local=rank, device="A100-80GB")
        for rank in range(2)
    )
    hidden = Transfer("block.0/add/0", shape=("b", 12, 32), dtype="float32", peer=1, gradient=True)
    received = Transfer("block.0/add/0", ("b", 12, 32), "float32", peer=0, gradient=True)
    return Plan(
        format=FORMAT,
        versions={"torch": "2.13.0", "autopipe": "0.1.0"},
        source="examples/gpt.py",
        fingerprint="5f1d0c",
        trail="5f1d0c embed/embedding/0 ...",
        inputs=(
            InputSpec("ids", ("b", 12), "int64", batch_dim=0, low=0, high=63),
            InputSpec("scale", (), "python", batch_dim=None, value=0.1),
        ),
        reads=(Read("bool", True, "model.py:12"),),
        cluster=machine,
        mesh=Mesh(pp=2, dp=1, tp=1, places=places),
        batch=Batch(rows=8, micro_batches=4),
        precision="fp32",
        optimizer="adamw",
        schedule="1f1b",
        programs=(),
        work=Work(1.56e12, (312e12, 312e12), "bf16", measured=False, tokens=96),
        boundaries=(Boundary(window=2, depth=0),),
        blocks=(
            BlockClass("block", ("block.0", "block.1"), (WrittenPlacement("up.weight", "S(0)"),)),
        ),
        stages=(
            StagePlan(
                first="embed/embedding/0",
                last="block.0/add/0",
                nodes=9,
                parameters=("embed.weight", "block.0.up.weight"),
                receives=(),
                sends=(hidden,),
                recompute=("block.0",),
                zero=0,
                predicted=predicted,
            ),
            StagePlan(
                first="block.1/layer_norm/0",
                last="head/linear/0",
                nodes=10,
                parameters=("embed.weight", "block.1.up.weight"),
                receives=(received,),
                sends=(),
                recompute=(),
                zero=0,
                predicted=predicted,
            ),
        ),
        prediction=Prediction(step_seconds=0.015047246545454546, bubble=0.20251190383898204),
        planner=PlannerNote(
            name="dynamic",
            step_seconds=0.0155,
            bound_seconds=0.015,
            binding="stage 1 is the slowest",
            next_best=Alternative(
                pp=1,
                dp=2,
                tp=1,
                micro_batches=1,
                schedule="1f1b",
                step_seconds=0.02,
                slower=0.29,
                cause="by the bubble",
            ),
            others=(
                Alternative(
                    pp=1,
                    dp=1,
                    tp=2,
                    micro_batches=4,
                    schedule="1f1b",
                    step_seconds=None,
                    slower=0.12,
                    cause="by its bound",
                ),
            ),
        ),
    )


def chain(
    pp: int,
    micro_batches: int,
    change: Callable[[int], float] = lambda stage: 1e-3,
    schedule: str = "1f1b",
    chunks: int = 1,
) -> Plan:
    """A chain of stages on `pp` ranks; a forward takes `change(stage)` seconds, a backward twice.

    Each holds 70 GiB and sends the next what the example's first stage does: 12 * 32 floats a row,
    one row a micro-batch, over links that hardly take time.
    """
    plan = example_plan()
    memory = Memory(20 * 2**30, 20 * 2**30, 10 * 2**30, 0, 19 * 2**30, 2**30)
    stages = pp * chunks
    (sent,) = plan.stages[0].sends
    return replace(
        plan,
        work=None,
        cluster=replace(
            plan.cluster,
            name=f"{pp}xA100-80GB",
            nodes=(NodeGroup(1, (Group(pp, plan.cluster.row[0]),)),),
            within=Link(0.0, 1e12),
        ),
        mesh=Mesh(pp, 1, 1, tuple(Place(rank, rank, 0, 0, 0, rank, "cpu") for rank in range(pp))),
        batch=Batch(micro_batches, micro_batches),
        schedule=schedule,
        boundaries=(Boundary(2, 0),) * (stages - 1),
        stages=tuple(
            replace(
                plan.stages[0],
                predicted=StagePrediction(change(stage), 2 * change(stage), memory),
                receives=(replace(sent, peer=stage - 1),) if stage > 0 else (),
                sends=(replace(sent, peer=stage + 1),) if stage < stages - 1 else (),
            )
            for stage in range(stages)
        ),
    )


def on(cluster: str | Cluster, places: list[tuple[int, int]]) -> Plan:
    """The example's stages at these (node, local) of a cluster."""
    plan = example_plan()
    found = spec.parse(cluster) if isinstance(cluster, str) else cluster
    assert isinstance(found, Cluster)
    own = tuple(Place(rank, rank, 0, 0, *at, "A100-80GB") for rank, at in enumerate(places))
    return replace(plan, cluster=found, mesh=replace(plan.mesh, places=own))


def in_turns(micro_batches: int = 4) -> Plan:
    """Three stages on four ranks, two of them at the second stage."""
    plain = chain(4, micro_batches)
    (sent,) = plain.stages[0].sends
    a, b, _, d = plain.stages

    def entry(of: StagePlan, first: str, turns: int, sources: str, targets: str) -> StagePlan:
        def transfers(peers: str) -> tuple[Transfer, ...]:
            return tuple(replace(sent, peer=int(peer)) for peer in peers)

        return replace(
            of, first=first, turns=turns, receives=transfers(sources), sends=transfers(targets)
        )

    return replace(
        plain,
        boundaries=(Boundary(2, 0),) * 2,
        stages=(
            entry(a, "a", 1, "", "12"),
            entry(b, "b", 2, "0", "3"),
            entry(b, "b", 2, "0", "3"),
            entry(d, "d", 1, "12", ""),
        ),
    )
