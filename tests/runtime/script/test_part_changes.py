"""A gradient or a weight of which a rank has a part, changed by a mean or a norm of that part.

It is refused.
What a script does to each entry by itself is right on parts too.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopipe import ModelError
from autopipe.runtime.script.part_changes import PartChanges

STEPS = 4

Change = Callable[[Tensor, int], object]


def told(change: Change, dims: list[int], what: str = "gradient") -> int:
    """The step before whose update it is refused; STEPS: before none."""
    changes = PartChanges({"weight": dims, "bias": [0]}, what)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        weight = torch.randn(40, 30, generator=generator) * (1 + step)
        gradients = {"weight": weight, "bias": torch.ones(2)}
        changes.note(gradients)
        change(gradients["weight"], step)
        try:
            changes.check(gradients)
        except ModelError as error:
            assert f"the {what} of 'weight' was changed by its" in str(error)
            assert "--zero 0 and --tp 1" in str(error.hint)
            return step
    return STEPS


def centred(gradient: Tensor, step: int) -> None:
    gradient -= gradient.mean()


def rows_centred(gradient: Tensor, step: int) -> None:
    """Gradient centralisation: each row by its own mean."""
    gradient -= gradient.mean(dim=1, keepdim=True)


def columns_centred(gradient: Tensor, step: int) -> None:
    gradient -= gradient.mean(dim=0, keepdim=True)


def rows_of_one_norm(gradient: Tensor, step: int) -> None:
    gradient /= gradient.norm(dim=1, keepdim=True)


def rows_clipped(gradient: Tensor, step: int) -> None:
    """Those with a norm of more than the median's: unit-wise clipping."""
    norms = gradient.norm(dim=1, keepdim=True)
    gradient *= (norms.median() / norms).clamp(max=1.0)


def of_one_norm(gradient: Tensor, step: int) -> None:
    gradient /= gradient.norm()


@pytest.mark.parametrize("dims", [[0], [1], [0, 1]])
def test_the_mean_of_a_part(dims: list[int]) -> None:
    assert told(centred, dims) == 0


@pytest.mark.parametrize("change", [rows_centred, rows_of_one_norm, rows_clipped])
def test_of_rows(change: Change) -> None:
    """A rank with some rows has them whole; one with some columns has not."""
    assert told(change, [0]) == STEPS
    assert told(change, [1]) == 0


def test_of_columns() -> None:
    assert (told(columns_centred, [0]), told(columns_centred, [1])) == (0, STEPS)


def test_the_norm_of_a_part() -> None:
    """One factor may be any; two that leave the same norm are none of the script's own."""
    assert told(of_one_norm, [0]) == 1


def test_of_a_weight() -> None:
    """As of one that a script normalises after each update."""
    assert told(of_one_norm, [0], "weight") == 1
    assert told(rows_of_one_norm, [1], "weight") == 0


EACH_ENTRY: dict[str, Change] = {
    "nothing": lambda gradient, step: None,
    "halved": lambda gradient, step: gradient.mul_(0.5),
    "warmed up": lambda gradient, step: gradient.mul_(step / 10),
    "a constant": lambda gradient, step: gradient.add_(0.01),
    "clipped by values": lambda gradient, step: gradient.clamp_(-0.1, 0.1),
    "signs": lambda gradient, step: gradient.sign_(),
    "decay": lambda gradient, step: gradient.add_(torch.full_like(gradient, 0.3), alpha=0.1),
    "masked": lambda gradient, step: gradient[:20].zero_(),
    "noise": lambda gradient, step: gradient.add_(torch.randn(40, 30)),
    "no numbers": lambda gradient, step: gradient.fill_(torch.nan),
    "zeros": lambda gradient, step: gradient.zero_(),
}


@pytest.mark.parametrize("change", EACH_ENTRY)
@pytest.mark.parametrize("dims", [[0], [1]])
def test_each_entry_by_itself(change: str, dims: list[int]) -> None:
    assert told(EACH_ENTRY[change], dims) == STEPS


def test_where_a_rank_has_all_of_it() -> None:
    assert told(centred, []) == STEPS
