"""How far a tensor is off, and when a plan has to be equal in every bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopipe.checking.compare import off, orders_kept
from autopipe.checking.layout import RankLayout
from autopipe.planfile.regions import Region
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
        (None, [1.0], math.inf),
        ([0.0], None, math.inf),
        (None, None, 0.0),
    ],
)
def test_off(found: list[float] | None, expected: list[float] | None, share: float) -> None:
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
