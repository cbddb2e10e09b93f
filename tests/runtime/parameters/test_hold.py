"""Who shares which parameter, and that every rank opens the groups for it in one order.

Groups are made up here: a group is the tuple of its ranks. What is summed over real ones is told in
`step_stories`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import Plan
from autopipe.planfile import programs
from autopipe.runtime.parameters import hold as holding
from autopipe.runtime.parameters.gradient_sum import Gradients, GradientSum
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.parameters.zero1 import OptimizerShards
from autopipe.runtime.parameters.zero2 import GradientShards
from autopipe.runtime.parameters.zero3 import GatheredStage, ParameterShards
from autopipe.schedules.instructions import holders
from autopipe.stages.bind import Split, split_as_planned
from tests.support.inprocess import traced
from tests.support.models import VOCABULARY
from tests.support.pipes import ZOO, planned

WTE = "transformer.wte.weight"
"""GPT-2's embedding and its head: in the first stage and in the last."""

Group = tuple[int, ...]


def plan_of(dp: int, zero: int, schedule: str = "1f1b") -> Plan:
    """GPT-2 on pp=2 ranks; with one or two stages on each."""
    chunks = None if schedule == "1f1b" else 2
    plan = planned("gpt2", 2, dp, 4, "interleaved" if chunks else "1f1b", chunks=chunks)
    stages = tuple(replace(stage, zero=zero) for stage in plan.stages)
    return replace(plan, schedule=schedule, stages=stages)


class Found:
    """What one rank has after `hold`, and the groups that it has opened, in order."""

    opened: list[Group]
    gradients: Gradients
    states: dict[str, Tensor]
    gathered: Mapping[int, GatheredStage]

    @property
    def groups(self) -> dict[str, Group]:
        """The group of each name whose gradient is summed over several ranks."""
        sum_ = self.gradients
        return dict(getattr(sum_, "_sum", sum_)._groups)


Hold = Callable[[Plan], list[Found]]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """`hold` on every rank of a plan in turn."""

    def run(plan: Plan) -> list[Found]:
        split = split_as_planned(traced("gpt2")[0], plan)
        placed = holders(programs.compute(plan))
        return [on(rank, plan, split, placed) for rank in range(len(plan.mesh.places))]

    def on(rank: int, plan: Plan, split: Split, placed: tuple[int, ...]) -> Found:
        place, model, found = plan.mesh.places[rank], ZOO["gpt2"].model(), Found()
        own = [stage for stage in split.stages if placed[stage.index] == place.pp]
        parameters = dict(model.named_parameters()) | dict(model.named_buffers())
        parameters |= split.graph.constants
        found.opened = []
        found.states = {name: parameters[name] for stage in own for name in stage.states}

        def new_group(ranks: list[int], backend: str, device_id: None) -> Group:
            assert backend == "gloo"
            found.opened.append(tuple(ranks))
            return tuple(ranks)

        with monkeypatch.context() as patch:
            patch.setattr(dist, "new_group", new_group)
            patch.setattr(dist, "get_world_size", len)
            patch.setattr(dist, "get_rank", lambda group: group.index(rank))
            part = RankPart(plan, place, split, placed, torch.device("cpu"))
            held = holding.hold(part, found.states, "gloo")
            found.gradients, found.gathered = held.gradients, held.gathered
        return found

    return run


def same_everywhere(found: list[Found]) -> list[Group]:
    """The groups that are opened, which must be the same on every rank, in the same order."""
    first, *others = (rank.opened for rank in found)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(("zero", "kind"), [(0, GradientSum), (1, OptimizerShards)])
def test_replicas_and_tied_stages_share_a_parameter(zero: int, kind: type, hold: Hold) -> None:
    """Ranks 0 and 1 hold stage 0, ranks 2 and 3 stage 1, and all of them the tied weight."""
    found = hold(plan_of(2, zero))
    assert same_everywhere(found) == [(0, 1), (0, 1, 2, 3), (2, 3)]
    for rank, held in enumerate(found):
        assert type(held.gradients) is kind
        replicas = (0, 1) if rank < 2 else (2, 3)
        expected = {n: replicas for n, t in held.states.items() if isinstance(t, nn.Parameter)}
        assert held.groups == {**expected, WTE: (0, 1, 2, 3)}
        assert held.gradients.shards().keys() == expected.keys()
        rows = len(held.gradients.shards()[WTE])
        assert rows == (VOCABULARY // 4 if zero else VOCABULARY)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_without_replicas_nothing_is_dealt_out(zero: int, hold: Hold) -> None:
    found = hold(plan_of(1, zero))
    assert same_everywhere(found) == [(0, 1)]
    for held in found:
        assert type(held.gradients) is GradientSum
        assert held.groups == {WTE: (0, 1)}


def test_tied_stages_of_one_rank(hold: Hold) -> None:
    """Under zb-v rank 0 holds stages 0 and 3: the sum of their gradients is autograd's."""
    assert same_everywhere(hold(plan_of(1, 0, "zb-v"))) == []
    assert same_everywhere(hold(plan_of(1, 0, "interleaved"))) == [(0, 1)]
    assert same_everywhere(hold(plan_of(2, 0, "zb-v"))) == [(0, 1), (2, 3)]


def test_stages_in_shards(hold: Hold) -> None:
    """Each over its replicas; of tied copies each data-parallel coordinate sums its own rows."""
    found = hold(plan_of(2, 3))
    assert same_everywhere(found) == [(0, 1), (2, 3), (0, 2), (1, 3)]
    for rank, held in enumerate(found):
        assert type(held.gradients) is ParameterShards
        assert {*held.gathered} == {rank // 2}
        assert held.groups == {WTE: ((0, 2), (1, 3))[rank % 2]}
        assert len(held.gradients.shards()[WTE]) == VOCABULARY // 2
        assert all(
            tensor.untyped_storage().nbytes() == 0
            for tensor in held.states.values()
            if isinstance(tensor, nn.Parameter)
        )


def test_gradients_in_shards(hold: Hold) -> None:
    """The same groups under ZeRO-2."""
    found = hold(plan_of(2, 2))
    assert same_everywhere(found) == [(0, 1), (2, 3), (0, 2), (1, 3)]
    for rank, held in enumerate(found):
        assert type(held.gradients) is GradientShards
        assert held.groups == {WTE: ((0, 2), (1, 3))[rank % 2]}
        assert len(held.gradients.shards()[WTE]) == VOCABULARY // 2


def test_several_stages_in_shards(hold: Hold) -> None:
    found = hold(plan_of(2, 3, "interleaved"))
    assert same_everywhere(found) == [(0, 1), (2, 3), (0, 2), (1, 3)]
    assert ({*found[0].gathered}, {*found[3].gathered}) == ({0, 2}, {1, 3})
    units = found[0].gathered[0].units  # the tokens' and the positions' embedding, and two blocks
    assert units[0] == (WTE, "transformer.wpe.weight")
    assert [{name.split(".")[2] for name in unit} for unit in units[1:]] == [{"0"}, {"1"}]
