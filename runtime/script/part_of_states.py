"""A rank's state dict, which says that it is not the whole model's where it is written to a file.

    if rank == 0: torch.save(pipe.state_dict(), "model.pt")     the first stage of two, or rows

Plain PyTorch would have written the model. The file has a mark, by which `pipe.load_state_dict`
tells whose part it is.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

MARK = "autopipe: a part of a model"
"""In the state dict's `_metadata`, where torch keeps versions of modules, before this sentence."""


class PartOfStates(OrderedDict[str, Tensor]):
    """What one rank has of a model's state dict. Pickled, it warns, and becomes an OrderedDict.

    Args:
        told: which rank's, and how much it is, in words.
    """

    def __init__(self, tensors: Mapping[str, Tensor], told: str) -> None:
        super().__init__(tensors)
        self.told = told
        self._metadata = {"": {MARK: told}}

    def __reduce_ex__(self, protocol: object) -> Any:
        """How it is pickled, as `torch.save` does."""
        warnings.warn(
            f"what pipe.state_dict() gives is this rank's part of the model, and is written as "
            f"such: {self.told}. pipe.save('model.safetensors'), which every rank calls, writes "
            "the whole model",
            stacklevel=2,
        )
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter([*self.items()])

    def copy(self) -> Self:
        """The same tensors in another dict."""
        return type(self)(self, self.told)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)({name: one.clone() for name, one in self.items()}, self.told)


def told(own: Mapping[str, Tensor], of: int, rank: int, ranks: int) -> str | None:
    """How much of a model's state dict a rank has, in words; None: all of it.

    Args:
        own: what it has; of a DTensor it has some rows.
        of: the number of the model's tensors.
    """
    rows = sum(isinstance(tensor, DTensor) for tensor in own.values())
    if len(own) == of and not rows:
        return None
    found = f"rank {rank} of {ranks} has {len(own)} of the model's {of} tensors"
    return f"{found}, and of {rows} of them some rows alone" if rows else found


def told_of(given: object) -> str | None:
    """Whose part a state dict is, in words; None: it has no mark."""
    metadata = getattr(given, "_metadata", None)
    own = metadata.get("") if isinstance(metadata, Mapping) else None
    told = own.get(MARK) if isinstance(own, Mapping) else None
    return told if isinstance(told, str) else None
