"""The order in which `torch.einsum` multiplies three tensors and more, in a trace.

Where opt_einsum is installed, torch asks it for the order with the fewest operations. It compares
counts that depend on the rows, and a trace in which these are compared holds for its rows alone.
Here it gets the shapes of the example, two rows as long as the plan's: all orders compute the same,
to rounding, but one by other lengths may take more operations for each token.

    einsum("bld,bln,bld->bldn", dt, B, u)    dt [b, s, 16], symbols    ->  shapes of b = 2, s = 6
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import hint

MADE = 2
"""The size of a dim that depends on values of tensors, which a trace has not."""


@contextmanager
def of_the_example() -> Iterator[None]:
    """Within, orders are chosen for the example, and no number of rows is compared."""
    library = opt_einsum.get_opt_einsum()
    if library is None:
        yield
        return
    plain = library.contract_path

    def contract_path(equation: str, *operands: Any, **options: Any) -> Any:
        if not all(isinstance(operand, Tensor) for operand in operands):
            return plain(equation, *operands, **options)
        shapes = [tuple(map(_number, operand.shape)) for operand in operands]
        return plain(equation, *shapes, shapes=True, **options)

    with patched(library, "contract_path", contract_path):
        yield


def _number(size: int | torch.SymInt) -> int:
    """A size in the example."""
    if isinstance(size, int):
        return size
    found = hint(size)
    return MADE if found is None else found
