"""Whether ranks begin with the same weights; what each has to say is gathered by hand.

Real processes, one of which has drawn other weights, are told of in `pipe_stories`.
"""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopipe import ModelError
from autopipe.ir.graph import StateSpec, TensorSpec
from autopipe.runtime.same_values import SameValues, signature

WORLD = cast(dist.ProcessGroup, "all ranks")
NAMES = "weight", "places"


def said(monkeypatch: pytest.MonkeyPatch, *held: dict[str, Tensor]) -> list[str]:
    """What each rank says, by what it holds of a parameter and a buffer."""
    kinds = {"weight": "parameter", "places": "buffer"}
    states = {
        name: StateSpec(TensorSpec((8,), torch.float32), kind) for name, kind in kinds.items()
    }
    ranks = []
    for tensors in held:
        one = SameValues(states)
        for name, tensor in tensors.items():
            one.note(name, tensor)
        ranks.append(one)
    words: list[Tensor] = []

    def all_gather(found: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
        assert group is WORLD
        words.append(mine.clone())
        heard = len(words) > len(ranks)
        found[:] = words[: len(ranks)] if heard else len(ranks) * [torch.zeros_like(mine)]

    monkeypatch.setattr(dist, "all_gather", all_gather)
    for one in ranks:  # to be heard
        one.check(WORLD, len(ranks))
    found = []
    for one in ranks:
        try:
            one.check(WORLD, len(ranks))
            found.append("")
        except ModelError as error:
            found.append(error.message)
    return found


def test_the_same_and_what_one_rank_alone_has(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, places = torch.randn(8), torch.randperm(8)
    assert said(monkeypatch, {"weight": weight}, {"places": places}, {"weight": weight}) == 3 * [""]


def test_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank says the same."""
    given = [{"weight": torch.randn(8)} for _ in range(2)]
    words = "have other values of the parameter 'weight': each has drawn its own while it built"
    assert said(monkeypatch, {}, *given) == 3 * [f"ranks 1 and 2 {words} the model"]


def test_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation has the same norm."""
    given = [{"places": torch.tensor(order)} for order in ([0, 1, 3, 2], [0, 1, 2, 3])]
    assert "other values of the buffer 'places'" in said(monkeypatch, *given)[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(300, 300),
        torch.randn(8, dtype=torch.complex64),
        torch.randn(8) > 0,
        torch.zeros(0),
        torch.tensor(torch.nan),
        torch.eye(8).to_sparse(),
        torch.randn(8, dtype=torch.bfloat16),
    ],
    ids=["large", "complex", "bool", "empty", "nan", "sparse", "bf16"],
)
def test_any_tensor_and_its_last_bit(tensor: Tensor) -> None:
    """Processors may differ in a function's last bit."""
    one, other = signature(tensor), signature(tensor.to(tensor.dtype, copy=True))
    assert torch.equal(one, other) and one.isfinite().all()
    if tensor.is_floating_point() and tensor.dim() and tensor.layout == torch.strided:
        off = signature(tensor * (1 + 1e-6)) - one
        assert off.abs().max() <= 1e-5 * one[1]


def test_alone() -> None:
    SameValues({}).check(None, 1)
