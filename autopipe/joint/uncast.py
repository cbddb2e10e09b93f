"""A parameter's gradient as it is made, before it is cast to the parameter's dtype.

A step's 16-bit copies of parameters are made first, so autograd casts their gradients last: until
then all 16-bit gradients exist, and then all of them in two dtypes.

    autograd      dw2 (bf16) ... dw1 (bf16) ... dw2.float(), dw1.float()
    here          dw2 (bf16)        added to its sum, gone
                                ... dw1 (bf16)        added to its sum, gone

Here each gradient is cast where it is added to its sum, one at a time. (A parameter of 16 bits is
its own copy, by a view; its gradient is then a view of the gradient at the same late place.)
"""

from __future__ import annotations

import torch
from torch import fx

from autopipe.stages.op_tape import MADE


def uncast(gradient: fx.Node) -> fx.Node:
    """The node of which a gradient is a wider copy or a view of equal shape; else the gradient."""
    source = gradient.all_input_nodes[0] if gradient.all_input_nodes else gradient
    if source.op != "call_function" or MADE not in source.meta:
        return gradient
    made = source.meta[MADE]
    low = made.dtype in (torch.bfloat16, torch.float16)
    cast = low and gradient.target is torch.ops.aten._to_copy.default
    whole = (
        gradient.target is torch.ops.aten.view.default and made.shape == gradient.meta[MADE].shape
    )
    return source if cast or whole else gradient
