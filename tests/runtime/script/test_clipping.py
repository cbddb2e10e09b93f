"""A script that clips by the norm of a rank's part is found at its second clipping, and told.

All else that a script may do to gradients in place is none of it. Clipping by the whole norm is
told in `pipe_stories` and `part_stories`.
"""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopipe import ModelError
from autopipe.planfile.parts import Place
from autopipe.planfile.placements import Sharding
from autopipe.runtime.script.clipping import Clipping

PLACE = Place(rank=0, pp=0, dp=0, tp=0, node=0, local=0, device="cpu")
STEPS = 4

Change = Callable[[list[nn.Parameter], int], object]


class Gradients:
    """Those of two matrices, as a rank holds them; another norm in each step."""

    def __init__(self) -> None:
        self.parameters = {
            "first": nn.Parameter(torch.zeros(40, 30)),
            "last": nn.Parameter(torch.zeros(8)),
        }

    def made(self, step: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(step)
        for one in self.parameters.values():
            one.data = one.data.to(dtype)
            noise = torch.randn(one.shape, generator=generator)
            one.grad = (noise * (1 + step)).to(dtype)

    def shards(self) -> Mapping[str, nn.Parameter]:
        return self.parameters

    def owned_gradients(self) -> dict[str, Tensor]:
        return {name: one.grad for name, one in self.parameters.items() if one.grad is not None}


def clipping_of(gradients: Gradients, *, parts: bool = True) -> Clipping:
    return Clipping(
        gradients,  # type: ignore[arg-type]  # it has what is asked of it here
        Sharding(1, {}, {}),
        PLACE,
        None,
        parts=parts,
    )


def told(
    change: Change, *, parts: bool = True, dtype: torch.dtype = torch.float32, to: str = "0.5"
) -> int:
    """The step before whose update it is refused; STEPS: before none."""
    gradients = Gradients()
    clipping = clipping_of(gradients, parts=parts)
    for step in range(STEPS):
        gradients.made(step, dtype)
        clipping.note()
        change([*gradients.parameters.values()], step)
        try:
            clipping.check()
        except ModelError as error:
            assert f"pipe.clip_grad_norm_({to}) clips by" in str(error.hint)
            return step
    return STEPS


def clipped(parameters: list[nn.Parameter], step: int) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_clipped_twice(dtype: torch.dtype) -> None:
    assert told(clipped, dtype=dtype) == 1


@pytest.mark.parametrize("kind", [1.0, float("inf")])
def test_norms_of_other_kinds(kind: float) -> None:
    """As of a stage whose gradients are larger than those of the others, which stay as they are."""

    def change(parameters: list[nn.Parameter], step: int) -> None:
        nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=kind)

    assert told(change, to="1") == 1


def test_by_hand() -> None:
    """Into new tensors, which nobody has written."""

    def change(parameters: list[nn.Parameter], step: int) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        for one in parameters:
            assert one.grad is not None
            one.grad = one.grad * (0.5 / norm)

    assert told(change) == 1


def test_now_and_then() -> None:
    """Steps in which its norm was small enough are between."""
    assert told(lambda p, step: clipped(p, step) if step % 2 else None) == 3


def test_where_a_rank_has_all_of_the_model() -> None:
    assert told(clipped, parts=False) == STEPS


def by_values(parameters: list[nn.Parameter], step: int) -> None:
    """Clips all of them: each norm is the same."""
    nn.utils.clip_grad_value_(parameters, 1e-6)


def each_alone(parameters: list[nn.Parameter], step: int) -> None:
    """Divides each by its own norm, which a pipeline's rank has."""
    for one in parameters:
        assert one.grad is not None
        one.grad /= one.grad.norm()


def halved(parameters: list[nn.Parameter], step: int) -> None:
    for one in parameters:
        assert one.grad is not None
        one.grad /= 2


def noisy(parameters: list[nn.Parameter], step: int) -> None:
    for one in parameters:
        assert one.grad is not None
        one.grad += 0.01


def nothing(parameters: list[nn.Parameter], step: int) -> None:
    pass


@pytest.mark.parametrize("change", [by_values, each_alone, halved, noisy, nothing])
def test_what_is_no_clipping_by_norm(change: Change) -> None:
    assert told(change) == STEPS


def test_clipping_by_the_norm_of_the_model_is_its_own() -> None:
    """Here it is the rank's, as there is one: to 0.5 in each step."""
    gradients = Gradients()
    clipping = clipping_of(gradients)
    for step in range(STEPS):
        gradients.made(step)
        clipping.note()
        clipping.clip(0.5, torch.device("cpu"))
        clipping.check()
        norm = nn.utils.get_total_norm([*gradients.owned_gradients().values()])
        assert float(norm) == pytest.approx(0.5, rel=1e-4)


def test_a_script_may_scale_by_the_norm_of_the_model() -> None:
    """It has asked for it; a rank that has nearly all of the norm scales to one norm each time."""
    gradients = Gradients()
    clipping = clipping_of(gradients)
    for step in range(STEPS):
        gradients.made(step)
        clipping.note()
        norm = clipping.clip(torch.inf, torch.device("cpu"))
        for one in gradients.parameters.values():
            assert one.grad is not None
            one.grad *= 0.5 / norm
        clipping.check()


def test_gradients_that_went() -> None:
    """fp16's overflow leaves none; a frozen layer has none."""

    def change(parameters: list[nn.Parameter], step: int) -> None:
        for one in parameters:
            one.grad = None

    assert told(change) == STEPS
