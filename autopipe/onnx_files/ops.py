"""Which function computes which op of ONNX."""

from __future__ import annotations

import difflib

from autopipe.errors import ModelError
from autopipe.onnx_files.elementwise import ELEMENTWISE
from autopipe.onnx_files.layers import LAYERS
from autopipe.onnx_files.recurrent import RECURRENT
from autopipe.onnx_files.shapes import SHAPES
from autopipe.onnx_files.values import Function, NodeOf

OPS: dict[str, Function] = {**ELEMENTWISE, **LAYERS, **RECURRENT, **SHAPES}
"""By the op's name in ONNX's own domain."""

CONTROL = ("If", "Loop", "Scan", "SequenceMap")


def function_of(node: NodeOf) -> Function:
    """The function of a node's op.

    Raises:
        ModelError: there is none.
    """
    if node.op in OPS:
        return OPS[node.op]
    if node.op in CONTROL:
        raise node.refuse(
            "control flow cannot be split into stages",
            "export the model for one branch, or with the loop unrolled",
        )
    near = difflib.get_close_matches(node.op, OPS, 1)
    raise ModelError(
        f"{node.where}: this op is not read",
        hint=f"{len(OPS)} ops are{f', {near[0]} among them' if near else ''}; a model file may "
        "build the model in torch instead",
    )
