"""Sparse and nested tensors: only calls that run as they are have any, no trace and no stage.

self.adjacency              a buffer that is in no checkpoint, or an attribute: not split, each
                            rank that computes with it has it whole
conv(x, self.adjacency)     goes into the call by its name
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopipe.ir.torch_private import lend


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is of any of torch's sparse layouts, or a nested one."""
    return tensor.layout != torch.strided


def owned(model: nn.Module) -> dict[int, str]:
    """The names of the sparse tensors in a model's buffers and attributes, by their identity."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, value in (*module.named_buffers(recurse=False), *vars(module).items()):
            if isinstance(value, Tensor) and is_sparse(value):
                found.setdefault(id(value), f"{path}.{name}".lstrip("."))
    return found


def to_device(model: nn.Module, device: torch.device) -> None:
    """Move a model's sparse buffers to a device, as `model.to` would; attributes stay."""
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if is_sparse(buffer) and buffer.device != device:
                lend(module, name, buffer.to(device))
