"""A parameter's gradient as it is made, before it is cast to the parameter's dtype.

A step's copies of parameters in 16 bits are made before all else, so autograd casts their gradients
after all else: until then all are there, and then all of them twice.

    autograd      dw2 (bf16) ... dw1 (bf16) ... dw2.float(), dw1.float()
    here          dw2 (bf16)        added to its sum, gone
                                ... dw1 (bf16)        added to its sum, gone

Whoever adds a gradient to its sum casts it, one at a time.
"""

from __future__ import annotations

import torch
from torch import fx

from autopipe.stages.op_tape import MADE


def uncast(gradient: fx.Node) -> fx.Node:
    """What a gradient is a wider copy of; itself if it is none."""
    source = gradient.all_input_nodes[0] if gradient.all_input_nodes else gradient
    is_cast = gradient.target is torch.ops.aten._to_copy.default and MADE in source.meta
    low = is_cast and source.op == "call_function" and _is_low(source.meta[MADE].dtype)
    return source if low else gradient


def _is_low(dtype: torch.dtype | None) -> bool:
    return dtype in (torch.bfloat16, torch.float16)
