"""Ranks that scale gradients, or move weights along them, each by a number of its own part's."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe import ModelError
from autopipe.runtime.script.own_numbers import Moves, OwnNumbers, Scale, numbers

NOTHING = Scale()


def part(seed: int, scale: float = 1.0) -> dict[str, nn.Parameter]:
    """A rank's weights with gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in {"weight": (40, 30), "bias": (8,)}.items():
        made[name] = nn.Parameter(torch.randn(shape, generator=generator))
        made[name].grad = torch.randn(shape, generator=generator) * scale
    return made


def gradients_of(weights: Mapping[str, nn.Parameter]) -> list[Tensor]:
    return [one.grad for one in weights.values() if one.grad is not None]


def norm_of(weights: Mapping[str, nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm(gradients_of(weights))


@torch.no_grad()
def sam(weights: Mapping[str, nn.Parameter]) -> None:
    """Up the gradient, by 0.05 in all."""
    norm = norm_of(weights)
    for one in weights.values():
        assert one.grad is not None
        one += 0.05 / norm * one.grad


@torch.no_grad()
def adaptive_sam(weights: Mapping[str, nn.Parameter]) -> None:
    norm = nn.utils.get_total_norm([one.abs() * one.grad for one in weights.values()])  # type: ignore[operator]  # there is one
    for one in weights.values():
        assert one.grad is not None
        one += 0.05 / norm * one.square() * one.grad


@torch.no_grad()
def hand_made(weights: Mapping[str, nn.Parameter]) -> None:
    for one in weights.values():
        assert one.grad is not None
        one -= 0.1 * one.grad


@torch.no_grad()
def decayed(weights: Mapping[str, nn.Parameter]) -> None:
    for one in weights.values():
        one *= 0.99


Change = Callable[[Mapping[str, nn.Parameter]], object]


def moved(weights: dict[str, nn.Parameter], change: Change, *, norms: bool = True) -> Scale | None:
    moves = Moves({"weight": [0]}, norms=norms)
    moves.note(weights)
    change(weights)
    return moves.moved(weights)


def test_a_move_along_the_gradient() -> None:
    weights = part(0)
    norm = float(norm_of(weights))
    found = moved(weights, sam)
    assert found is not None
    assert found.one == pytest.approx(0.05 / norm, rel=1e-4)
    assert found.every == pytest.approx(0.05 / norm, rel=1e-4)
    assert found.norm == pytest.approx(0.05, rel=1e-4)


def test_rows_that_are_scaled_each_by_its_own_norm() -> None:
    """Which a rank of few rows has whole: no number for all of them."""
    for parted, known in (([0], True), ([1], False)):
        moves, weights = Moves({"weight": parted}, norms=False), part(0)
        weights["weight"].data, weights["weight"].grad = torch.ones(40, 2), torch.ones(40, 2)
        moves.note(weights)
        weights["weight"].grad *= 0.5
        assert bool(moves.scaled(weights).one) is known


def test_other_moves() -> None:
    assert moved(part(0), lambda weights: None) is None
    assert moved(part(0), decayed) == NOTHING
    by_hand = moved(part(0), hand_made)
    assert by_hand is not None and by_hand.every == pytest.approx(-0.1, rel=1e-4)
    adaptive = moved(part(0), adaptive_sam)
    assert adaptive is not None and adaptive.every > 0


def test_gradients_that_are_scaled() -> None:
    weights = part(0)
    moves = Moves({}, norms=True)
    moves.note(weights)
    assert moves.scaled(weights) == Scale(1.0, 1.0), "they were not"
    nn.utils.clip_grad_norm_(weights.values(), 0.5)
    assert moves.scaled(weights).norm == pytest.approx(0.5, rel=1e-4)
    for one in gradients_of(weights):
        one += 0.01
    assert moves.scaled(weights) == NOTHING


def test_one_gradient_that_is_clipped_by_its_own_norm() -> None:
    """A stage has all of it, so that each stage may have another factor."""
    weights = part(0)
    moves = Moves({}, norms=True)
    moves.note(weights)
    nn.utils.clip_grad_norm_([weights["weight"]], 0.5)
    assert moves.scaled(weights) == NOTHING
    assert moves.scaled(weights, least=1).every < 1


def test_a_rank_of_one_weight() -> None:
    """It may have been clipped by its own norm as one of many, or by the rank's: the other stage's
    tells which."""
    lone = {"weight": part(0)["weight"]}
    moves = Moves({}, norms=True)
    moves.note(lone)
    nn.utils.clip_grad_norm_(lone.values(), 0.5)
    scaled = moves.scaled(lone)
    assert (scaled.one, scaled.every) == (0.0, 0.0) and 0 < scaled.lone < 1
    assert scaled.norm == pytest.approx(0.5, rel=1e-4)
    by_norm = moved(lone, sam)
    assert by_norm is not None and by_norm.norm == pytest.approx(0.05, rel=1e-4)
    several = moved(part(1), sam)
    assert several is not None
    assert compared(places(0, 1), (by_norm, several)) == 0
    assert compared(places(0, 1), (by_norm, Scale(lone=0.3, norm=0.05))) == 1, "each weight's own?"


def places(*stages: int) -> Any:
    """A plan of ranks of these stages."""
    ranks = [SimpleNamespace(rank=rank, pp=pp) for rank, pp in enumerate(stages)]
    return SimpleNamespace(mesh=SimpleNamespace(places=ranks))


def compared(plan: Any, *steps: tuple[Scale, Scale]) -> int:
    """The step that is refused; the number of steps: none is."""
    own = OwnNumbers(plan)
    for number, (first, second) in enumerate(steps):
        try:
            own.check([numbers(NOTHING, first), numbers(NOTHING, second)])
        except ModelError as error:
            assert "ranks 0 and 1 have moved their weights along the gradients by" in str(error)
            assert "float('inf')" in str(error.hint)
            return number
    return len(steps)


def test_ranks_with_parts_of_the_same_weights_move_them_alike() -> None:
    plan = places(0, 0)
    assert compared(plan, (Scale(0.1, 0.1), Scale(0.1, 0.1))) == 1
    assert compared(plan, (Scale(0.1, 0.1), Scale(0.11, 0.11))) == 0
    assert compared(plan, (Scale(0.1, 0.0), Scale(0.11, 0.0))) == 0, "by the norm of each weight"
    assert compared(plan, (NOTHING, Scale(0.1, 0.1))) == 1, "one could not tell"


def test_stages_have_no_norm_in_common() -> None:
    first, second = (moved(part(seed, scale=1 + seed), sam) for seed in (0, 1))
    assert first is not None and second is not None
    assert compared(places(0, 1), (first, second)) == 0


def test_stages_have_no_changing_ratio() -> None:
    """As of the largest gradient of each; a rate of its own for each stage is let be, and one that
    falls for all."""
    plan = places(0, 1)
    rates = [(Scale(0, 0.1 * 0.9**n), Scale(0, 0.01 * 0.9**n)) for n in range(3)]
    assert compared(plan, *rates) == 3
    assert compared(plan, (Scale(0, 0.1), Scale(0, 0.2)), (Scale(0, 0.12), Scale(0, 0.17))) == 1
