"""The order in which `torch.einsum` multiplies three tensors and more, in a trace.

Where opt_einsum is installed, torch asks it for the order with the fewest operations. It compares
counts that depend on the rows, and a trace in which these are compared holds for its rows alone.
Here it gets the shapes of two rows, as a trace has them: all orders compute the same, to rounding.

    einsum("bld,bln,bld->bldn", dt, B, u)    dt [b, 6, 16], b a symbol    ->  shapes of b = 2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import expression

ROWS = 2


@contextmanager
def of_two_rows() -> Iterator[None]:
    """Within, orders are chosen for two rows, and no number of rows is compared."""
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
    """A size of two rows."""
    if isinstance(size, int):
        return size
    found = expression(size)
    return int(found.subs(dict.fromkeys(found.free_symbols, ROWS)))
