"""Check that ranks which hold the same parameter, buffer or constant begin with equal values.

Each rank builds the model by itself. A model that draws unseeded numbers has other weights on each
rank: replicas would train apart, and no loss would show it. Ranks compare a norm and two weighted
sums of each tensor, with a tolerance for the last bit, in which processors may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.errors import ModelError
from autopipe.ir.graph import StateSpec
from autopipe.ir.torch_private import is_fake

MOST = 2**16
"""Entries of a tensor that are looked at: numbers that are drawn differ everywhere."""

NEAR = 1e-3
"""What sums may be apart, as a share of the tensor's norm. Of other draws they are about as far
apart as that is large."""

FIGURES = 4
"""What a rank says of a tensor: whether it has it, its norm, and two sums."""


def signature(tensor: Tensor) -> Tensor:
    """The figures of a tensor that ranks compare.

    Args:
        tensor: of any shape, layout and dtype.

    Returns:
        1, its norm, and its sums with two waves as weights: float64 [FIGURES], on the CPU.
    """
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    flat = dense.reshape(-1)
    flat = flat[:: -(-len(flat) // MOST) or 1]
    flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
    numbers = flat.to("cpu", torch.float64).nan_to_num(posinf=1.0, neginf=-1.0)
    places = torch.arange(len(numbers), dtype=torch.float64, device="cpu")
    sums = [(numbers * (places * pace).cos()).sum() for pace in (1.0, 2.3)]
    return torch.stack([numbers.new_ones(()), numbers.norm(), *sums])


class SameValues:
    """Notes the signatures of this rank's tensors, and compares them with other ranks'.

    Args:
        states: all of the model, in an order that all ranks have.
    """

    def __init__(self, states: Mapping[str, StateSpec]) -> None:
        self._states = states
        self._mine = torch.zeros(len(states), FIGURES, dtype=torch.float64, device="cpu")
        self._at = {name: number for number, name in enumerate(states)}

    def note(self, name: str, tensor: Tensor) -> None:
        """Note a whole tensor of this rank; a tensor without values is skipped."""
        if not (is_fake(tensor) or tensor.is_meta):
            self._mine[self._at[name]] = signature(tensor)

    def check(self, world: dist.ProcessGroup | None, ranks: int) -> None:
        """Compare the tensors that ranks have in common; all ranks call it.

        Args:
            world: the group of all ranks; None: there is one rank.

        Raises:
            ModelError: two ranks have different values of a tensor; raised on every rank,
                names both.
        """
        if world is None:
            return
        gathered = [torch.empty_like(self._mine) for _ in range(ranks)]
        dist.all_gather(gathered, self._mine, group=world)
        for name, number in self._at.items():
            differing = _differing([of_rank[number].tolist() for of_rank in gathered])
            if differing is not None:
                first, second = differing
                raise ModelError(
                    f"ranks {first} and {second} have other values of the "
                    f"{self._states[name].kind} {name!r}: each has drawn its own while it built "
                    "the model",
                    hint="call torch.manual_seed(0) on every rank before the model is built, and "
                    "numpy.random.seed(0) or random.seed(0) where it draws by these; or give "
                    "weights=",
                )


def _differing(of_ranks: Sequence[Sequence[float]]) -> tuple[int, int] | None:
    """The first rank that has a tensor, and one that has another."""
    holders = [rank for rank, (has, *_) in enumerate(of_ranks) if has]
    for other in holders[1:]:
        _, norm, *sums = of_ranks[holders[0]]
        distance = max(abs(a - b) for a, b in zip((norm, *sums), of_ranks[other][1:], strict=True))
        if distance > NEAR * norm + 1e-30:
            return holders[0], other
    return None
