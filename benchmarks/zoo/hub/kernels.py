"""Kernels of torchvision that this build of torch lacks."""

from __future__ import annotations

from importlib.util import find_spec

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")  # noqa: TOR901
"""Ops that are declared and never called; they live as long as it does."""


def importable() -> None:
    """Let torchvision be imported, by timm and by transformers too; call it before them.

    The wheel of a package index is compiled for a torch with CUDA, and its library is not loaded
    by one without; then Python code that describes its ops finds none of them.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for op in ("nms", "qnms"):
            _LIBRARY.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
