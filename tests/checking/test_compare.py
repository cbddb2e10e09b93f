"""How far a tensor is off, and when a plan has to be equal in every bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe import ModelError
from autopipe.checking.compare import TensorRow, compared, off, orders_kept
from autopipe.checking.layout import RankLayout
from autopipe.checking.random_ops import RandomNodes
from autopipe.checking.split import CLIP, RankStep
from autopipe.checking.unsplit import Unsplit
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import BATCH, Plan
from autopipe.planfile.regions import Region
from autopipe.planners.driver import make_plan
from tests.support.inprocess import machine
from tests.support.pipes import planned

NAN = float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "share"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.0, 0.5], [0.0, 0.0], math.inf),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN, 2.0], [1.0, 2.0], math.inf),
        ([1.0], [1.0, 2.0], math.inf),
        ([2.0 + 1.0j], [2.0 + 2.0j], 0.5),  # bug: imaginary parts were thrown away
        ([2.0 + 1.0j], [2.0], math.inf),
        (None, [1.0], math.inf),
        ([0.0], None, math.inf),
        (None, None, 0.0),
    ],
)
def test_off(found: list[complex] | None, expected: list[complex] | None, share: float) -> None:
    one, other = (None if x is None else torch.tensor(x) for x in (found, expected))
    assert off(one, other) == share


def test_what_is_nothing_but_rounding_is_measured_by_the_floor() -> None:
    assert off(torch.tensor([2e-9]), torch.tensor([1e-9]), floor=1e-3) == pytest.approx(1e-6)


def test_which_plans_keep_the_order_of_all_sums() -> None:
    plan = planned("keywords", 2, 1, 4)
    assert orders_kept(plan)
    assert not orders_kept(replace(plan, compiled=True))
    assert not orders_kept(replace(plan, loss_parts=4))
    assert not orders_kept(replace(plan, fused_attention=True))
    assert orders_kept(planned("keywords", 2, 2, 4))
    assert not orders_kept(planned("gpt2", 2, 1, 4))  # its embedding is tied to its head
    three = planned("keywords", 2, 2, 4, zero=3)
    assert three.fully_sharded
    assert not orders_kept(three)
    of_numbers = Region(
        module="part", method="forward", call=0, why="", given="", gives="", states=(),
        written=(), results=(), random=False, flops=0, saved=0, keeps=(), launches=1,
    )  # fmt: skip
    assert orders_kept(replace(plan, regions=(of_numbers,)))
    # Bug: a part that reads a tensor twice, which others read too, was called different for a bit.
    by_gradients = replace(of_numbers, carrying=(0,))
    assert not orders_kept(replace(plan, regions=(by_gradients,)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_whole_tensor_comes_back_from_its_parts(zero: int, frozen: bool) -> None:
    """Every replica has what is frozen whole, but under ZeRO-3."""
    plan = planned("keywords", 2, 2, 4, zero=zero)
    name = plan.stages[0].parameters[0]
    layout = RankLayout.of(plan, [name] if frozen else ())
    whole = torch.arange(32.0 * 32).view(32, 32)
    places = [place for place in plan.mesh.places if layout.placed[0] == place.pp]
    parts = [(place, layout.trained(name, whole, place)) for place in places]
    is_whole = zero == 0 or (frozen and zero < 3)
    assert sum(part.numel() for _, part in parts) == whole.numel() * (2 if is_whole else 1)
    blank: Tensor = torch.zeros_like(whole)
    assert torch.equal(layout.whole(name, blank, parts), whole)


class Centred(nn.Module):
    """Its centre, which is frozen, and a count follow the rows of each replica."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 4), nn.Linear(4, 1)
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            self.calls += 1
            self.centre.lerp_(hidden.mean(0), 0.5)
        found: Tensor = self.down(hidden - self.centre).square().mean()
        return found


def rows_of(count: int) -> dict[str, Tensor]:
    return {"x": torch.arange(8.0 * count).view(count, 8).sin()}


def on_two_replicas() -> tuple[ModelFile, Plan]:
    file = ModelFile("net.py", Centred, rows_of, None, None, None, None, None)
    plan = make_plan.plan(
        Centred, rows_of, loss_over="micro-batch", cluster=machine(2), batch_size=8, dp=2,
        micro_batches=2,
    )  # fmt: skip
    return file, plan


def right_ranks(file: ModelFile, plan: Plan, batch: dict[str, Tensor]) -> list[list[RankStep]]:
    """A step of ranks that do what plain PyTorch does: each has the model, and a replica's rows."""
    unsplit = Unsplit(file, plan, RandomNodes, None)
    made = unsplit.step(batch, 1.0)
    unsplit.update(made.gradients, min(CLIP * float(made.norm) / (float(made.norm) + 1e-6), 1.0))
    trained = {name: p.detach().clone() for name, p in unsplit.model.named_parameters()}
    return [
        [
            RankStep(
                made.loss,
                dict(made.gradients),
                made.norm,
                {**trained, "centre": of_replica["centre"]},
                {"calls": of_replica["calls"]},
            )
        ]
        for of_replica in made.buffers
    ]


def wrong_in(
    file: ModelFile, plan: Plan, batch: dict[str, Tensor], ranks: list[list[RankStep]]
) -> dict[str, tuple[str, ...]]:
    unsplit = Unsplit(file, plan, RandomNodes, None)
    rows: list[TensorRow] = compared(unsplit, plan, [batch], ranks, exact=True)
    return {row.what: row.wrong for row in rows if row.wrong}


def test_what_is_frozen_and_follows_the_rows_is_each_replica_s_own() -> None:
    """Bug: that of the first replica was compared with the second one's, and said to differ."""
    file, plan = on_two_replicas()
    batch = rows_of(8)
    ranks = right_ranks(file, plan, batch)
    assert wrong_in(file, plan, batch, ranks) == {}
    ranks[0][0].parameters["centre"] = ranks[1][0].parameters["centre"]
    assert wrong_in(file, plan, batch, ranks) == {"parameters": ("centre",)}


def test_a_buffer_that_no_rank_has_is_missed() -> None:
    """Bug: a trace that loses each write of a buffer leaves no stage that has it, and what no rank
    had was not compared."""
    file, plan = on_two_replicas()
    batch = rows_of(8)
    ranks = right_ranks(file, plan, batch)
    del ranks[1][0].buffers["calls"]
    assert wrong_in(file, plan, batch, ranks) == {"buffers": ("calls",)}
    # Bug: where runs with parameters off by rounding followed, as in 16 bits, it was not.
    ranks[0][0].gradients["up.weight"] = 2 * ranks[0][0].gradients["up.weight"]
    sides = [Unsplit(file, plan, RandomNodes, None) for _ in range(2)]
    rows = compared(sides[0], plan, [batch], ranks, sides[1], exact=False)
    assert [row.wrong for row in rows if row.what == "buffers"] == [("calls",)]


def test_a_loss_that_is_no_number_shows_nothing() -> None:
    """Bug: nan equals nan, so whatever ranks did was `the same`."""
    file, plan = on_two_replicas()
    batch = {"x": torch.full((8, 8), NAN)}
    ranks = right_ranks(file, plan, batch)
    with pytest.raises(ModelError, match="the loss of step 1 is nan, in plain PyTorch too"):
        wrong_in(file, plan, batch, ranks)


class Overflowing(Centred):
    """Its gradients are no numbers, as those of a run in fewer bits may be."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.inf


def test_rounding_that_knows_no_bounds_excuses_nothing() -> None:
    """Bug: where plain PyTorch in fp32 has a number and in 16 bits has none, any gradient was near
    enough, a missing one too."""
    file, plan = on_two_replicas()
    batch = rows_of(8)
    ranks = right_ranks(file, plan, batch)
    del ranks[0][0].gradients["up.weight"]
    unsplit = Unsplit(file, plan, RandomNodes, None)
    wide = Unsplit(replace(file, model=Overflowing), plan, RandomNodes, None)
    rows = compared(unsplit, plan, [batch], ranks, wide, exact=False)
    assert [row.wrong for row in rows if row.what == "gradients"] == [("up.weight",)]


class Boundless(Unsplit):
    """Parameters off by rounding give gradients that are no numbers."""

    def nudged(self, batch: Any, scale: float, seed: int) -> dict[str, Tensor]:
        return {n: torch.full_like(p, torch.inf) for n, p in self.model.named_parameters()}


class Larger(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.25


def test_a_run_without_bounds_leaves_the_bounds_of_others() -> None:
    """Bug: what plain PyTorch in fp32 had shown of rounding was forgotten, and a gradient within it
    said to differ, where one run with parameters off by rounding had no number."""
    file, plan = on_two_replicas()
    batch = rows_of(8)
    ranks = right_ranks(file, plan, batch)
    for of_rank in ranks:
        of_rank[0].gradients["up.weight"] = 1.1 * of_rank[0].gradients["up.weight"]
    del ranks[1][0].buffers["calls"]  # so that such runs are made
    unsplit = Boundless(file, plan, RandomNodes, None)
    wide = Unsplit(replace(file, model=Larger), plan, RandomNodes, None)
    rows = compared(unsplit, plan, [batch], ranks, wide, exact=False)
    assert [row.wrong for row in rows if row.what == "gradients"] == [()]


def test_what_no_rows_move_moves_alike_in_replicas_of_a_loss_over_the_batch() -> None:
    """Bug: the one pass over the batch moved the first replica's alone, and a right plan was said
    to differ in the second."""
    file, plan = on_two_replicas()
    unsplit = Unsplit(file, replace(plan, loss_over=BATCH), RandomNodes, None)
    steps = [unsplit.step(rows_of(8), 1.0) for _ in range(2)]
    assert [[float(own["calls"]) for own in made.buffers] for made in steps] == [[1, 1], [2, 2]]
