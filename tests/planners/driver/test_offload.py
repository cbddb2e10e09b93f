"""Blocks that offload what they keep, from the user's words to the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.errors import AutopipeError, InfeasibleError, PlanError
from autopipe.planfile.again import offloaded
from autopipe.planfile.contents import Plan
from tests.support.inprocess import machine

pytestmark = pytest.mark.usefixtures("traces_remembered")

WIDTH, TOKENS, BLOCKS = 64, 32, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(BLOCKS)))


def inputs(rows: int) -> dict[str, Tensor]:
    return {"input": torch.ones(rows, TOKENS, WIDTH)}


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.square().mean()


def gpus(host: float, memory: int = 2**30) -> Cluster:
    """Two devices that compute 1e10 operations a second, so that a layer's forward takes 0.2 ms a
    row, and copy so many bytes a second to their host."""
    device = Device("made up", memory, {"fp32": 1e10}, 1e12, 0.0, "by hand", host=host)
    link = Link(0.0, 1e12)
    return Cluster("two", (NodeGroup(1, (Group(2, device),)),), link, link)


def planned(cluster: Cluster, **asked: Any) -> Plan:
    words = {
        "pp": 2,
        "dp": 1,
        "tp": 1,
        "micro_batches": 8,
        "schedule": "gpipe",
        "batch_size": 16,
        **asked,
    }
    return autopipe.plan(model, inputs, loss=squares, cluster=cluster, compile=False, **words)


def memory_of(plan: Plan) -> int:
    return max(stage.predicted.memory.peak for stage in plan.stages)


@pytest.mark.long
def test_where_memory_is_short_a_fast_link_takes_what_blocks_keep_and_a_slow_one_does_not() -> None:
    """Four layers a stage, eight micro-batches of 2 rows x 32 tokens in flight. A layer keeps of
    each token a norm's input, its 4 x 64 numbers before and after GELU, and more: some 160 kB a
    micro-batch; its forward takes 2 * 64 * 2 * 4 * 64 * 64 operations, 0.42 ms.

    link           a layer's copy       what is quicker
    100 GB/s       1.6 us               copies, which four layers' forward hides
    10 MB/s        16 ms                running again, of some or all ops
    """
    room = planned(gpus(0.0), offload="auto")
    assert not offloaded(room) and not any(stage.recompute for stage in room.stages)
    tight = int(0.75 * memory_of(room))
    fast, slow, none = (planned(gpus(host, tight), offload="auto") for host in (1e11, 1e7, 0.0))
    assert offloaded(fast) and not any(stage.recompute for stage in fast.stages)
    assert all(stage.predicted.memory.peak <= tight for stage in fast.stages)
    assert fast.prediction.step_seconds == pytest.approx(room.prediction.step_seconds)
    for plan in (slow, none):
        assert not offloaded(plan) and any(stage.recompute for stage in plan.stages)
        assert plan.prediction.step_seconds > fast.prediction.step_seconds
    # Layers are spread over a stage, and the last one, which backward begins with, stays.
    assert all("3" not in stage.offload and "7" not in stage.offload for stage in fast.stages)
    for unasked in (planned(gpus(1e11, tight), offload="off"), planned(gpus(1e11, tight))):
        assert not offloaded(unasked) and any(stage.recompute for stage in unasked.stages)


def test_what_is_left_of_copies_is_in_the_seconds_of_a_stage() -> None:
    """All layers of the only stage are asked for: O bytes at 10 MB/s, beside F and B."""
    (before,) = planned(gpus(0.0), pp=1).stages
    (away,) = planned(gpus(1e7), pp=1, offload="all").stages
    assert len(away.offload) == BLOCKS and away.predicted.spent is not None
    forward = away.predicted.forward_seconds - before.predicted.forward_seconds
    backward = away.predicted.backward_seconds - before.predicted.backward_seconds
    assert forward + backward == pytest.approx(away.predicted.spent.copying) != 0
    copies = away.predicted.forward_seconds  # O / host, of which F hides what it takes
    assert backward == pytest.approx(copies - before.predicted.backward_seconds)


def test_a_plan_that_offloads_comes_back_and_an_older_one_offloads_nothing(tmp_path: Path) -> None:
    plan = planned(gpus(1e11), offload="0")
    assert [*offloaded(plan)] == [str(n) for n in range(BLOCKS)], "the class of the first"
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    text = (tmp_path / "plan.json").read_text()
    assert '"offload"' in text
    older = replace(plan, stages=tuple(replace(stage, offload=()) for stage in plan.stages))
    older.save(tmp_path / "older.json")
    lines = (tmp_path / "older.json").read_text().splitlines()
    kept = "\n".join(line for line in lines if '"offload"' not in line)
    (tmp_path / "older.json").write_text(kept.replace(",\n    }", "\n    }"))
    assert not offloaded(Plan.load(tmp_path / "older.json"))


def test_a_block_that_offloads_runs_nothing_again() -> None:
    plan = planned(gpus(1e11), recompute="all", offload=["1", "5"])
    assert [stage.offload for stage in plan.stages] == [("1",), ("5",)]
    again = {path for stage in plan.stages for path in stage.recompute}
    assert again == {str(n) for n in range(BLOCKS)} - {"1", "5"}


@pytest.mark.parametrize(
    ("asked", "cluster", "kind", "sentence"),
    [
        ({"offload": "9"}, gpus(1e9), PlanError, "no block and no class of blocks '9'"),
        (
            {"offload": "all", "recompute": "all"},
            gpus(1e9),
            PlanError,
            "offload=all was asked for, and recompute=all too",
        ),
        # Bugs: the blocks and ops that were to run again were offloaded, without a word.
        (
            {"offload": "all", "recompute": "3"},
            gpus(1e9),
            PlanError,
            "offload=all was asked for, and recompute=3 too",
        ),
        (
            {"offload": "all", "recompute": "norms"},
            gpus(1e9),
            PlanError,
            "offload=all was asked for, and recompute=norms too",
        ),
        (
            {"offload": ["off", "all"]},
            gpus(1e9),
            PlanError,
            "offload=off was asked for, and offload=all too, which contradict each other",
        ),
        pytest.param(
            {"offload": ["1", "auto"]},
            gpus(1e9),
            PlanError,
            "offload=auto was asked for, and offload=1 too, which contradict each other",
            marks=pytest.mark.long,
        ),
        ({"offload": "all"}, gpus(0.0), AutopipeError, "two does not say how fast its made up"),
        (
            {"offload": "all", "schedule": "zb-h1"},
            gpus(1e9),
            InfeasibleError,
            "zb-h1 and blocks that offload what they keep do not go together",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    asked: dict[str, Any], cluster: Cluster, kind: type[AutopipeError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as refusal:
        planned(cluster, **asked)
    assert refusal.value.hint


@pytest.mark.long
def test_what_only_autograd_can_run_offloads_nothing_and_is_refused_where_it_is_asked_for() -> None:
    """An LSTM keeps what only its real kernel knows."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.lstm(x)[0]
            return found

    def two() -> nn.Module:
        return nn.Sequential(Recurrent(), Recurrent())

    with pytest.raises(PlanError, match="stage 0: its blocks are to offload what they keep"):
        autopipe.plan(
            two, inputs, loss=squares, cluster=machine(1), batch_size=2, pp=1, offload="all"
        )
