"""Kernels that this build of torch lacks: torchvision's, and products of groups in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

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


@contextmanager
def grouped_products_in_fp64() -> Iterator[None]:
    """Within, products of experts' rows take any dtype: torch's own take no fp64."""

    def products(rows: Tensor, matrices: Tensor, offs: Tensor, **_: Any) -> Tensor:
        ends = [0, *offs.tolist()]
        each = zip(ends, ends[1:], matrices, strict=False)
        return torch.cat([rows[begin:end] @ matrix for begin, end, matrix in each])

    with ExitStack() as until:
        for home, name in ((torch, "_grouped_mm"), (F, "grouped_mm")):
            if hasattr(home, name):
                until.enter_context(patch.object(home, name, products))
        yield
