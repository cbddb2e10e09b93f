"""A sharding goes into a plan and comes back as it was."""

import re
from dataclasses import replace

import pytest

from autopipe.errors import PlanError
from autopipe.planfile.parts import BlockClass, WrittenPlacement
from autopipe.sharding.local_graph import shardable
from autopipe.sharding.plan_io import fitted, read_back
from tests.support.long import chosen
from tests.support.sharded_plan import PLAN, written
from tests.support.staged import traced


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


@pytest.mark.parametrize("name", chosen(("gpt", "gpt2", "llama", "t5", "unet"), now=("gpt", "t5")))
def test_what_the_planner_writes_may_be_written_by_hand(name: str) -> None:
    plan, sharding = written(name)
    assert not plan.made, "nothing says that a planner has made it"
    assert fitted(sharding, plan, shardable(traced(name).graph), None, other=False) == sharding


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The sum over ranks is left out, each rank adds the whole bias, and a gradient's sum is.
        (("out/linear/0", "P", "S(2)", "S(1)", "P"), ("I", "S(2)", "S(1)", "P")),
        (("out/linear/0", "P", "S(2)", "S(1)", "P"), ("P", "S(2)", "S(1)", "R")),
        (("qkv/linear/0", "S(2, 3)", "R", "S(0, 3)", "S(0, 3)"),
         ("S(2, 3)", "I", "S(0, 3)", "S(0, 3)")),
        # Shards of a dim that the matrix does not have, and a parameter that is a summand.
        (("qkv.weight", "S(0, 3)"), ("S(2)",)),
        (("qkv.bias", "S(0, 3)"), ("P",)),
    ],
)  # fmt: skip
def test_a_placement_that_would_compute_something_else(
    before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """In a plan that was changed by hand it is refused. Bugs: gradients were wrong without a word,
    and torch's own errors told of shapes."""
    plan, _ = written("gpt")
    (block,) = plan.blocks
    (name, state, *inputs), (other_state, *others) = before, after
    right, wrong = (
        WrittenPlacement(name, state, tuple(inputs)),
        WrittenPlacement(name, other_state, tuple(others)),
    )
    states = list(block.states)
    states[states.index(right)] = wrong
    plan = replace(plan, blocks=(replace(block, states=tuple(states)),))
    with pytest.raises(PlanError, match=re.escape(name)) as refused:
        fitted(read_back(plan), plan, shardable(traced("gpt").graph), None, other=False)
    assert "which no rule of tensor parallelism gives" in str(refused.value)
    assert "in `states` of the plan" in (refused.value.hint or "")
