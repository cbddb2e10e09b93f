"""Random numbers that a script writes into weights: each rank draws for its own part.

With ranks that are processes it is told in `script_stories`.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopipe import ModelError
from autopipe.runtime.script.drawn import DrawnNumbers

Weights = dict[str, nn.Parameter]
Write = Callable[[Weights], object]


def weights(*names: str, rows: int = 8) -> Weights:
    return {name: nn.Parameter(torch.zeros(rows, 16)) for name in names}


def seeded(weights: Weights) -> None:
    torch.manual_seed(1)
    for one in weights.values():
        nn.init.xavier_uniform_(one)


def told(
    first: Weights,
    second: Weights,
    write: Write,
    other: Write | None = None,
    *,
    parts: tuple[str, str] = ("", ""),
    what: str = "weights",
) -> str:
    """What two ranks are told after their scripts have written weights; empty: nothing.

    Args:
        write: of the first rank's script, and of the second's, but for `other`.
        parts: which part of each weight each rank has.
    """
    numbers = []
    for own, part, script in zip((first, second), parts, (write, other or write), strict=True):
        torch.manual_seed(0)
        drawn = DrawnNumbers(own, dict.fromkeys(own, part), parted=True, what=what)
        with torch.no_grad():
            script(own)
        numbers.append(drawn.numbers())
    try:
        drawn.check(numbers)
    except ModelError as error:
        assert what == "weights" or "torch.Generator().manual_seed(part)" in str(error.hint)
        return str(error)
    return ""


@pytest.mark.parametrize(
    "init",
    [
        lambda one: nn.init.normal_(one, std=0.02),
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
        lambda one: one.data.uniform_(-0.1, 0.1),
        lambda one: one.copy_(torch.randn(one.shape)),
    ],
)
def test_parts_of_one_weight_that_are_initialised_anew(
    init: Callable[[nn.Parameter], object],
) -> None:
    """In plain PyTorch the second half of the rows is drawn after the first one."""

    def write(own: Weights) -> None:
        for one in own.values():
            init(one)

    found = told(weights("a"), weights("a"), write, parts=("rows 0", "rows 1"))
    assert "ranks 0 and 1 have written random numbers into their weights since the last" in found
    assert "('a')" in found


def noise(own: Weights) -> None:
    for one in own.values():
        one.add_(torch.randn(one.shape), alpha=0.01)


def begun(seed: int, *names: str) -> Weights:
    """Weights with gradients, other ones for each seed."""
    generator, made = torch.Generator().manual_seed(seed), weights(*names)
    for one in made.values():
        one.data = torch.randn(one.shape, generator=generator)
        one.grad = torch.randn(one.shape, generator=generator)
    return made


def test_noise() -> None:
    """The same on weights, or gradients, of other parts, but by a generator of each rank's own."""
    rows = ("rows 0", "rows 1")
    assert "random numbers into their weights" in told(
        begun(10, "a"), begun(11, "a"), noise, parts=rows
    )
    assert "random numbers into their weights" in told(begun(10, "a"), begun(11, "b", "c"), noise)
    gradients = begun(10, "a"), begun(11, "a")

    def on_gradients(own: Weights) -> None:
        for one in own.values():
            assert one.grad is not None
            one.grad += 0.01 * torch.randn(one.shape)

    found = told(*gradients, on_gradients, parts=rows, what="gradients")
    assert "random numbers into their gradients" in found

    def of_its_own(seed: int) -> Write:
        def write(own: Weights) -> None:
            torch.randn(3)
            generator = torch.Generator().manual_seed(seed)
            for one in own.values():
                one.add_(torch.randn(one.shape, generator=generator), alpha=0.01)

        return write

    assert not told(begun(10, "a"), begun(11, "a"), of_its_own(0), of_its_own(1), parts=rows)


def test_decay_of_layers_that_began_alike() -> None:
    """As of copies; what is added to their gradients is the same, and no random numbers."""
    first, second = begun(10, "a"), begun(10, "b")
    for own in (first, second):
        own["a" if own is first else "b"].grad = torch.randn(8, 16)

    def decayed(own: Weights) -> None:
        torch.randn(3)
        for one in own.values():
            assert one.grad is not None
            one.grad.add_(one, alpha=0.1)

    assert not told(first, second, decayed, what="gradients")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_updates_by_hand_are_no_draws(sign: float) -> None:
    """Of a mean all rows have one gradient; two classes have opposite ones. Batches are drawn."""
    first, second = begun(10, "a"), begun(11, "a")
    first["a"].grad = torch.randn(8, 16)
    second["a"].grad = sign * first["a"].grad

    def update(own: Weights) -> None:
        torch.randn(64, 16)
        for one in own.values():
            assert one.grad is not None
            one -= 0.1 * one.grad

    assert not told(first, second, update, parts=("rows 0", "rows 1"))


def test_two_of_many_ranks() -> None:
    """Each rank has drawn its own numbers for its part, but for two of them."""
    ranks = []
    for rank in range(64):
        own, part = weights("a"), f"rows {rank}"
        torch.manual_seed(0)
        drawn = DrawnNumbers(own, {"a": part}, parted=True)
        of_its_own = torch.Generator().manual_seed(17 if rank in (20, 50) else 100 + rank)
        torch.randn(3)
        with torch.no_grad():
            own["a"].normal_(generator=of_its_own)
        ranks.append((drawn, drawn.numbers()))
    with pytest.raises(ModelError, match="ranks 20 and 50 have written random numbers"):
        ranks[0][0].check([numbers for _, numbers in ranks])


def test_stages_that_are_initialised_anew() -> None:
    """Of weights of other shapes and fans too; another kind of numbers is seen by how many were
    drawn."""
    assert "written random numbers" in told(weights("a"), weights("b", "c", rows=24), seeded)

    def normal(own: Weights) -> None:
        torch.manual_seed(1)
        nn.init.normal_(own["b"])

    assert "written random numbers" in told(weights("a"), weights("b", rows=24), seeded, normal)


def test_replicas_that_draw_their_own() -> None:
    def own_seed(own: Weights) -> None:
        torch.manual_seed(2)
        seeded_not(own)

    def seeded_not(own: Weights) -> None:
        nn.init.normal_(own["a"])

    found = told(weights("a"), weights("a"), seeded_not, own_seed)
    assert "ranks 0 and 1 have the same weights, and have written other values" in found
    assert not told(weights("a"), weights("a"), seeded)


def loaded(row: int, of: int = 2) -> Write:
    """Writes a part of a whole weight, beside a batch that is drawn."""
    whole = torch.randn(8 * of, 16, generator=torch.Generator().manual_seed(3))

    def write(own: Weights) -> None:
        torch.randn(64, 16)
        for one in own.values():
            one.copy_(whole.chunk(of)[row])

    return write


def test_what_is_no_draw() -> None:
    """Slices of a loaded weight, beside random batches; what is made smaller, or equal; tables; and
    what nobody has written."""
    rows = ("rows 0", "rows 1")
    assert not told(weights("a"), weights("a"), loaded(0), loaded(1), parts=rows)
    assert not told(weights("a"), weights("b"), loaded(0), loaded(1))
    for write in (
        lambda own: torch.randn(3),
        lambda own: (torch.randn(3), own["a"].fill_(2.0)),
        lambda own: (torch.randn(3), own["a"].copy_(torch.arange(128.0).view(8, 16))),
    ):
        assert not told(weights("a"), weights("a"), write, parts=rows)
    alike = weights("a"), weights("a")
    for one in alike:
        seeded(one)

    def decayed(own: Weights) -> None:
        torch.randn(3)
        own["a"] *= 0.9

    assert not told(*alike, decayed, parts=rows), "they began alike, as copied layers do"


def test_gradients_that_autograd_leaves_conjugated() -> None:
    """Bug: each step of a complex weight that is read by .conj() ended in torch's words."""
    own = {"a": nn.Parameter(torch.randn(8, 16, dtype=torch.complex64))}
    drawn = DrawnNumbers(own, {"a": ""}, parted=True, what="gradients")
    own["a"].grad = torch.ones(8, 16, dtype=torch.complex64).conj()
    assert own["a"].grad.is_conj()
    drawn.note()
    assert drawn.numbers()
