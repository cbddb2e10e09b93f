"""A sharding goes into a plan and comes back as it was."""

from dataclasses import replace

import pytest

from autopipe.errors import PlanError
from autopipe.planfile.parts import BlockClass, WrittenPlacement
from autopipe.sharding.plan_io import read_back
from tests.support.long import chosen
from tests.support.sharded_plan import PLAN, written


@pytest.mark.parametrize(
    "name", chosen(("gpt", "gpt2", "llama", "t5", "unet", "frozen"), now=("gpt2", "unet", "frozen"))
)
def test_what_is_written_is_read(name: str) -> None:
    plan, sharding = written(name)
    assert read_back(plan) == sharding


def test_blocks_that_are_dealt_out_alike_are_written_once() -> None:
    plan, _ = written("gpt")
    assert [len(block.members) for block in plan.blocks] == [4]
    (block,) = plan.blocks
    assert WrittenPlacement("qkv.weight", "S(0, 3)") in block.states
    assert WrittenPlacement("out/linear/0", "P", ("S(2)", "S(1)", "P")) in block.states
    sent = [(c.tensor, c.forward, c.backward) for c in block.collectives]
    assert sorted(sent) == [
        ("down/linear/0", "all-reduce", ""),
        ("norm1/layer_norm/0", "", "all-reduce"),
        ("norm2/layer_norm/0", "", "all-reduce"),
        ("out/linear/0", "all-reduce", ""),
    ]


def test_a_placement_that_is_none() -> None:
    wrong = BlockClass("h.0", ("h.0",), (WrittenPlacement("w", "S(0)"), WrittenPlacement("v", "Q")))
    with pytest.raises(PlanError) as refused:
        read_back(replace(PLAN, mesh=replace(PLAN.mesh, tp=2), blocks=(wrong,)))
    assert str(refused.value).startswith("plan.blocks[0].states[1]: 'Q' is no placement")
