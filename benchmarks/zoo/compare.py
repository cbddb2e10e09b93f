"""Compare what a split and the unsplit run left behind: how far off, and what differs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.zoo.one_process import Result

CLOSE = 1e-5
"""How far a sum in another order may be off, as a share of the largest entry."""

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""A share of the largest gradient of all below which a difference is that of roundings: gradients
that are 0 but for roundings, as of a bias before a batch norm, have no digits to compare."""


def compared(
    found: Result, expected: Result, close: float = CLOSE
) -> tuple[float, bool, list[str]]:
    """The worst difference of a gradient, whether all is equal in every bit, and what differs."""
    differing, worst = [], 0.0
    pairs = list(zip(found.losses, expected.losses, strict=True))
    bitwise = all(torch.equal(a, b) for a, b in pairs)
    if any(_off(a, b, 0.0) > close for a, b in pairs):
        differing.append("loss")
    largest = _largest(expected.gradients.values())
    for name, other in expected.gradients.items():
        gradient = found.gradients.get(name)
        if gradient is None:
            off = 0.0 if not bool(other.any()) else float("inf")
        else:
            off = _off(gradient, other, ROUNDING / CLOSE * largest)
            bitwise &= torch.equal(gradient, other)
        worst = max(worst, off)
        if off > close:
            differing.append(name)
    differing += [
        name
        for name, gradient in found.gradients.items()
        if name not in expected.gradients and bool(gradient.any())
    ]
    largest = _largest(expected.buffers.values())
    for name, buffer in found.buffers.items():
        other = expected.buffers.get(name)
        if other is not None and not torch.equal(buffer, other):
            bitwise = False
            if _off(buffer, other, ROUNDING / CLOSE * largest) > close:
                differing.append(f"buffer {name}")
    return worst, bitwise, differing


def _largest(tensors: Iterable[Tensor]) -> float:
    """The largest entry of all floating-point tensors: others are held to a share of it.

    Some gradients, and some running means, are zero but for rounding.
    """
    floats = (x for x in tensors if x.numel() and (x.is_floating_point() or x.is_complex()))
    return max((float(x.detach().abs().max().nan_to_num(0, 0, 0)) for x in floats), default=0.0)


def _off(found: Tensor, expected: Tensor, floor: float) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected) or not expected.numel():
        return 0.0
    a, b = found.detach(), expected.detach()
    if a.is_complex():
        a, b = (torch.view_as_real(tensor.resolve_conj()) for tensor in (a, b))
    a, b = a.double(), b.double()
    if torch.equal(a.isfinite(), b.isfinite()):
        a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    scale = max(float(b.abs().max()), floor)
    return float((a - b).abs().max()) / scale if scale else float("inf")


def rounded(found: Result, expected: Result) -> list[str]:
    """Gradients that are not equal in every bit, though no sum of theirs has another order."""
    return [
        name
        for name, gradient in found.gradients.items()
        if name not in found.regrouped and name in expected.gradients
        if not torch.equal(gradient, expected.gradients[name])
    ]
