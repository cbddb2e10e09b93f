"""The backward of a user's own op, which may read values, on a rehearsal's tensors without values.

A `torch.library.custom_op` is one op to a graph: nobody looks into it. Its backward is Python that
runs as it is, and may read numbers, as the loop over experts of transformers before 5.24 does:

    for expert, end in enumerate(ctx.offsets.tolist()):
        torch.mm(grad[start:end], weight[expert].T, out=grad_input[start:end])
        start = end

Whatever the numbers are, a gradient has the shape of its tensor, so that 0 does for shapes and
strides. Such loops end with 0; what they make on the way may be more bytes than a rehearsal sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopipe.errors import AutopipeError, ModelError
from autopipe.frontend import user_lines
from autopipe.ir.torch_private import TorchDispatchMode


class _AnsweredByZero(TorchDispatchMode):
    """Within, each number that is read of a tensor is 0."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        return False if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0


@contextmanager
def zeros_read() -> Iterator[None]:
    """Within, a backward that reads a number of a tensor without values finds 0.

    Raises:
        ModelError: a user's own backward fails nevertheless, with its line.
    """
    try:
        # A script's set_detect_anomaly(True) would look at values, too.
        with torch.autograd.set_detect_anomaly(False), _AnsweredByZero():
            yield
    except AutopipeError:
        raise
    except Exception as error:  # whatever the user's backward raises
        place = user_lines.of_error(error)
        if not place:
            raise
        raise ModelError(
            f"{place}: a backward is planned on tensors without values, and this one raises "
            f"{type(error).__name__}: {error}",
            hint="let the backward call another torch.library.custom_op that computes it, and "
            "give that one a register_fake",
        ) from error
