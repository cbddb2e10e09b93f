"""Ops on pictures: pixels that move, are made more or fewer, or are read between places."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from autopipe.onnx_files.values import Function, NodeOf, Value, as_tensor, ints


def _pixels(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, block = as_tensor(inputs[0]), node.get("blocksize")
    if node.op == "SpaceToDepth":
        return _blocks(x, block)
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    rows, channels, height, width = x.shape
    made = x.reshape(rows, block, block, channels // block**2, height, width)
    return made.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)


def _blocks(x: Tensor, block: int) -> Tensor:
    """Depth of space: the entries of a block of pixels become channels."""
    rows, channels, height, width = x.shape
    made = x.reshape(rows, channels, height // block, block, width // block, block)
    return made.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


def _resize(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, scales = as_tensor(inputs[0]), None
    if len(inputs) > 3 and inputs[3] is not None:
        after = ints(node, inputs[3])[2:]
    elif len(inputs) > 2 and inputs[2] is not None:
        scales = as_tensor(inputs[2]).tolist()[2:]
        after = [floor(size * scale) for size, scale in zip(x.shape[2:], scales, strict=True)]
    else:
        raise node.refuse("scales of op set 10 are not read")
    kind = _kind(node, x.shape[2:], after, scales)
    if scales is None:
        return F.interpolate(x, size=after, **kind)
    return F.interpolate(x, scale_factor=tuple(scales), **kind)


def _kind(
    node: NodeOf, before: Sequence[int], after: Sequence[int], scales: Sequence[float] | None
) -> dict[str, Any]:
    """Torch's mode for a resize, and whether corners stay where they are.

    Where a new pixel lies among the old ones, i of `after` by s = before / after:

        asymmetric            i s                      rounded down: torch's "nearest"
        half_pixel            (i + 1/2) s - 1/2        rounded, a half up: "nearest-exact"
        align_corners         i (before - 1) / (after - 1)

    A half rounded down is the same where there is none: pixels become a whole number of pixels.

    Raises:
        ModelError: torch has no such mode.
    """
    mode = node.get("mode", "nearest")
    how = node.get("coordinate_transformation_mode", "half_pixel")
    center = how in ("half_pixel", "pytorch_half_pixel")
    sizes = [*zip(before, after, strict=True)]
    if mode == "nearest":
        rounded = node.get("nearest_mode", "round_prefer_floor")
        whole = all(new % old == 0 for old, new in sizes)
        if how == "asymmetric" and rounded == "floor":
            return {"mode": "nearest"}
        if center and (
            rounded == "round_prefer_ceil" or (rounded == "round_prefer_floor" and whole)
        ):
            return {"mode": "nearest-exact"}
        raise node.refuse(f"mode={mode!r} with {how!r} and {rounded!r} is not read")
    names = {
        "linear": {1: "linear", 2: "bilinear", 3: "trilinear"}.get(len(sizes)),
        # Torch's coefficient is ONNX's default.
        "cubic": "bicubic" if len(sizes) == 2 and "cubic_coeff_a" not in node.attributes else None,
    }
    corners = how == "align_corners"
    # ONNX counts with the length before it is rounded, and has one pixel at the first one.
    odd = (
        corners
        and scales is not None
        and any(old * scale != new for (old, new), scale in zip(sizes, scales, strict=True))
    )
    odd |= how == "pytorch_half_pixel" and any(new == 1 < old for old, new in sizes)
    if not (center or corners) or names.get(mode) is None or odd or node.get("antialias", 0):
        told = " to ".join("x".join(map(str, size)) for size in (before, after))
        raise node.refuse(f"mode={mode!r} with {how!r} from {told} is not read")
    return {"mode": names[mode], "align_corners": corners}


def _upsample(node: NodeOf, inputs: Sequence[Value]) -> Value:
    """Upsample, as files before op set 10 have it: it repeats each pixel `scales` times."""
    if node.get("mode", "nearest") != "nearest":
        raise node.refuse(f"mode={node.get('mode')!r} is not read")
    scales = as_tensor(inputs[1]).tolist() if len(inputs) > 1 else node.get("scales")
    return F.interpolate(as_tensor(inputs[0]), scale_factor=tuple(scales[2:]), mode="nearest")


def _grid_sample(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, grid = map(as_tensor, inputs)
    names = {"linear": "bilinear", "cubic": "bicubic"}  # of op set 20
    mode = node.get("mode", "linear")
    return F.grid_sample(
        x,
        grid,
        names.get(mode, mode),
        node.get("padding_mode", "zeros"),
        bool(node.get("align_corners", 0)),
    )


def _affine_grid(node: NodeOf, inputs: Sequence[Value]) -> Value:
    size = ints(node, inputs[1])
    return F.affine_grid(as_tensor(inputs[0]), size, bool(node.get("align_corners", 0)))


def _local_response(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return F.local_response_norm(
        as_tensor(inputs[0]),
        node.get("size"),
        node.get("alpha", 1e-4),
        node.get("beta", 0.75),
        node.get("bias", 1.0),
    )


def _folded(node: NodeOf, inputs: Sequence[Value]) -> Value:
    shape, block = ints(node, inputs[1]), ints(node, inputs[2])
    dims, pads = len(shape), node.get("pads", [0] * 2 * len(shape))
    if dims != 2 or pads[:dims] != pads[dims:]:
        raise node.refuse("other than two dims, or unlike pads at both ends, are not read")
    return F.fold(
        as_tensor(inputs[0]),
        tuple(shape),
        tuple(block),
        tuple(node.get("dilations", [1] * dims)),
        tuple(pads[:dims]),
        tuple(node.get("strides", [1] * dims)),
    )


PICTURES: dict[str, Function] = {
    "DepthToSpace": _pixels,
    "SpaceToDepth": _pixels,
    "Resize": _resize,
    "Upsample": _upsample,
    "GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
    "LRN": _local_response,
    "Col2Im": _folded,
}
