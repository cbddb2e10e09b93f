"""A gradient or a weight of which a rank has a part, changed by a number of that part.

It is refused.
What a script does to each entry by itself is right on parts too.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopipe import ModelError
from autopipe.runtime.script.part_changes import PartChanges, check_rates

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


def pruned(cut: Callable[[Tensor], Tensor]) -> bool:
    """Whether zeros are refused that this writes in place of the smallest of four parts."""
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.{n}.weight" for n in range(4)]
    weights = {name: torch.randn(40, 30, generator=generator) for name in names}
    changes = PartChanges(dict.fromkeys(names, [0]), "weight")
    changes.note(weights)
    for one in weights.values():
        one *= cut(one)
    try:
        changes.check(weights)
    except ModelError as error:
        assert "set to 0 where they are smallest, a share of" in str(error)
        return True
    return False


def test_pruning_by_a_median_or_a_quantile_of_a_part() -> None:
    """The whole weight has another one: of each part it leaves more, or less, than this share."""
    assert pruned(lambda w: w.abs() >= w.abs().median())
    assert pruned(lambda w: w.abs() > w.abs().quantile(0.9))
    assert pruned(lambda w: w.abs() >= w.abs().flatten().topk(100).values[-1])


def test_zeros_that_are_no_part_s_choice() -> None:
    """Below a size that is the same for all; of each four entries the larger two; by chance."""
    assert not pruned(lambda w: w.abs() >= 0.5)
    assert not pruned(
        lambda w: (w.abs().view(-1, 2) == w.abs().view(-1, 2).amax(1, True)).view_as(w)
    )
    assert not pruned(lambda w: torch.arange(w.numel()).view_as(w) % 2 == 0)


def rates(rate: Callable[[torch.Size], float], whole: dict[str, torch.Size]) -> None:
    """Look at an optimizer whose rates a script has made of shapes of parts."""
    parts = {"up": torch.zeros(16, 8), "down": torch.zeros(8, 16), "bias": torch.zeros(16)}
    groups = [{"params": [p], "lr": rate(p.shape)} for p in parts.values()]
    names = {id(p): name for name, p in parts.items()}
    check_rates(torch.optim.SGD(groups, lr=0.1), names, whole)


def test_rates_by_the_shape_of_a_part() -> None:
    """Each rank has half of the bias: 0.1 / 16, and not 0.1 / 32."""
    rows = {"up": torch.Size([32, 8]), "down": torch.Size([16, 16]), "bias": torch.Size([32])}
    told = r"go with p.shape\[-1\], of the parts .* has: \[16, 8\] of 'up', which is \[32, 8\]"
    with pytest.raises(ModelError, match=told) as refused:
        rates(lambda shape: 0.1 / shape[-1], rows)
    assert "dict(model.named_parameters())[name].shape" in str(refused.value.hint)
    rates(lambda shape: 0.1, rows)
    rates(lambda shape: 0.1 if len(shape) > 1 else 0.01, rows)
    rates(lambda shape: 0.1 / shape[-1], {**rows, "bias": torch.Size([16])})  # as all of it has


def test_parts_without_a_number() -> None:
    """Bug: of a part of no rows, `max(())` and 1 / 0 were errors of a script's step."""
    parts = [torch.zeros(0), torch.zeros(0, 16), torch.zeros(16), torch.zeros(())]
    whole = {"0": torch.Size([1]), "1": torch.Size([1, 16]), "2": torch.Size([16])}
    whole["3"] = torch.Size([])
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1 / (n + 1)} for n, p in enumerate(parts)])
    names = {id(p): str(n) for n, p in enumerate(parts)}
    check_rates(optimizer, names, whole)
    for group in optimizer.param_groups:  # one of a user's own names its rates otherwise
        del group["lr"]
    check_rates(optimizer, names, whole)


def test_rates_that_go_with_parts_and_with_all() -> None:
    """All are halves: 0.1 / n of a part is 0.2 / 2n. If it is 0.1 / 2n, nobody took the part's."""
    halves = {"up": torch.Size([32, 8]), "down": torch.Size([16, 16]), "bias": torch.Size([32])}
    with pytest.warns(
        UserWarning, match=r"with p.numel\(\).* with the whole shapes, too, as 0.2 of"
    ):
        rates(lambda shape: 0.1 / shape.numel(), halves)
    rates(lambda shape: 0.1 / (2 * shape.numel()) ** 0.5, halves)
