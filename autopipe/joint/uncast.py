"""A parameter's gradient as it is made, before it is cast to the parameter's dtype.

A step's copies of parameters in 16 bits are made before all else, so autograd casts their gradients
after all else: until then all are there, and then all of them twice.

    autograd      dw2 (bf16) ... dw1 (bf16) ... dw2.float(), dw1.float()
    here          dw2 (bf16)        added to its sum, gone
                                ... dw1 (bf16)        added to its sum, gone

Whoever adds a gradient to its sum casts it, one at a time. A copy of a parameter that is of 16 bits
itself is a view of it, and its gradient is one of the gradient, at the same late place.
"""

from __future__ import annotations

import torch
from torch import fx

from autopipe.stages.op_tape import MADE


def uncast(gradient: fx.Node) -> fx.Node:
    """What a gradient is a wider copy of, or all of in the same shape; itself if it is neither."""
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
