"""Sparse tensors, which live within calls that run as they are: no trace and no stage has any.

self.adjacency              a buffer that is in no checkpoint, or an attribute: not split, each
                            rank that computes with it has it whole
conv(x, self.adjacency)     goes into the call by its name
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopipe.ir.torch_private import lend


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor is of any of torch's sparse layouts."""
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
    """Let a model have its sparse buffers on a device, as `model.to` would; attributes stay."""
    for module in model.modules():
        for name, buffer in [*module.named_buffers(recurse=False)]:
            if is_sparse(buffer) and buffer.device != device:
                lend(module, name, buffer.to(device))


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's storage, or of the tensors that a sparse one is made of."""
    if not is_sparse(tensor):
        return tensor.untyped_storage().nbytes()
    with torch.no_grad():
        if tensor.layout == torch.sparse_coo:
            tensor = tensor.coalesce()
            parts: tuple[Tensor, ...] = (tensor.indices(), tensor.values())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        else:
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return sum(part.nbytes for part in parts)
