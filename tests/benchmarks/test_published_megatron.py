"""What Megatron-LM's layers do not wait for in backward: which rows have it, and its seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.efficiency import BESIDE
from benchmarks.published.cluster import cluster_of
from benchmarks.published.megatron import without_waits
from benchmarks.published.rows import Run, read
from tests.support.plans import chain
from tests.support.published_rows import row

CLUSTER = cluster_of("A100-SXM4-80GB", None, 8, 8, "", "")
WIRE = CLUSTER.within


def backwards(run: Run) -> list[float]:
    """Seconds that are left of backwards of 2 s, of stages of 2 layers and of 1."""
    plan = chain(2, 4)
    layers = (
        ("layers.0.up.weight", "layers.1.up.weight", "layers.1.up.bias"),
        ("layers.2.up.weight",),
    )
    stages = tuple(
        replace(
            stage,
            parameters=("tokens.weight", *names),
            predicted=replace(stage.predicted, backward_seconds=2.0),
        )
        for stage, names in zip(plan.stages, layers, strict=True)
    )
    found = without_waits(run, CLUSTER, replace(plan, stages=stages))
    return [stage.predicted.backward_seconds for stage in found.stages]


@pytest.mark.parametrize(
    ("says", "asynchronous", "adds"),
    [
        ({"source": "Megatron-LM"}, True, True),
        ({"source": "Korthikanti et al. 2022", "precision": "fp16"}, True, False),
        ({"source": "Narayanan et al. SC'21 Megatron-LM", "precision": "fp16"}, False, False),
        ({"source": "Megatron-LM", "notes": "TP/DP/PP communication overlap off"}, False, True),
        ({"source": "Qi et al. 2024 Zero Bubble", "precision": "fp16"}, False, True),
        ({"source": "NeMo"}, False, True),  # whose exchanges are beside products forward too
        ({"source": "Megatron-DeepSpeed"}, False, False),
        ({"source": "Scaling"}, False, False),
    ],
)
def test_which_rows_wait_for_less(says: dict[str, str], asynchronous: bool, adds: bool) -> None:
    software = read(row(**says)).software
    assert (software.asynchronous, software.adds) == (asynchronous, adds)


def test_exchanges_beside_products_take_the_share_that_computing_loses() -> None:
    """Two ranks scatter half of 2 x 512 x 1024 elements of 16 bits, and gather as much: for each of
    two column-parallel layers of a transformer's layer. Without sequence parallelism they sum."""
    says = {"source": "Korthikanti et al. 2022", "precision": "fp16"}
    size = 2 * 2 * 512 * 1024
    once = WIRE.steps(1) + size / 2 / WIRE.gathers
    layer = 2 * 2 * (1 - BESIDE) * once
    found = backwards(read(row(**says, seq_parallel=1)))
    assert found == pytest.approx([2.0 - 2 * layer, 2.0 - layer])
    summed = 2 * (1 - BESIDE) * (WIRE.steps(2) + size / WIRE.sums)
    assert backwards(read(row(**says))) == pytest.approx([2.0 - 2 * summed, 2.0 - summed])


def test_gradients_are_added_by_the_products_that_make_them() -> None:
    """12 h^2 of a layer, of which each of two ranks has half: two reads and a write of 4 bytes
    each, or of 2 where gradients are summed in 16 bits."""
    for precision, size in (("bf16", 4), ("fp16", 2)):
        run = read(row(source="Qi et al. 2024 Zero Bubble", precision=precision))
        layer = 3 * size * 12 * 1024**2 / 2 / CLUSTER.copying
        assert backwards(run) == pytest.approx([2.0 - 2 * layer, 2.0 - layer])
