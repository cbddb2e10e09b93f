"""Which function computes which op of ONNX, and which attributes it reads.

Ignoring an attribute would change the model without a word: a node whose function ignores one is
refused, unless its value is the op's default (`module` leaves those out) or changes no number.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopipe.errors import ModelError
from autopipe.onnx_files.elementwise import ELEMENTWISE
from autopipe.onnx_files.layers import LAYERS
from autopipe.onnx_files.pictures import PICTURES
from autopipe.onnx_files.recurrent import RECURRENT
from autopipe.onnx_files.sequences import SEQUENCES
from autopipe.onnx_files.shapes import SHAPES
from autopipe.onnx_files.values import Function, NodeOf, Value

if TYPE_CHECKING:
    import onnx

OPS: dict[str, Function] = {
    **ELEMENTWISE,
    **LAYERS,
    **PICTURES,
    **RECURRENT,
    **SEQUENCES,
    **SHAPES,
}
"""By the op's name in ONNX's own domain."""

_REDUCED = "axes keepdims noop_with_empty_axes"
_WINDOW = "auto_pad dilations kernel_shape pads strides"
_RECURRENT = "activations clip direction hidden_size layout"

READ = {
    **dict.fromkeys(("ArgMax", "ArgMin"), "axis keepdims"),
    "AffineGrid": "align_corners",
    "Attention": "is_causal kv_num_heads q_num_heads scale softcap",
    "AveragePool": f"{_WINDOW} ceil_mode count_include_pad",
    "BatchNormalization": "epsilon training_mode",
    **dict.fromkeys(("Cast", "CastLike"), "to"),
    **dict.fromkeys(("Celu", "Elu", "LeakyRelu", "Swish", "ThresholdedRelu"), "alpha"),
    "Clip": "max min",
    "Col2Im": "dilations pads strides",
    **dict.fromkeys(("Concat", "Flatten", "Gather", "GatherElements", "OneHot"), "axis"),
    "Compress": "axis",
    "ConcatFromSequence": "axis new_axis",
    "ConstantOfShape": "value",
    "Conv": f"{_WINDOW} group",
    "ConvTranspose": f"{_WINDOW} group output_padding output_shape",
    **dict.fromkeys(("CumSum", "CumProd"), "exclusive reverse"),
    "DepthToSpace": "blocksize mode",
    "DFT": "axis inverse onesided",
    "Dropout": "ratio",
    "Einsum": "equation",
    "EyeLike": "dtype k",
    "GatherND": "batch_dims",
    "Gelu": "approximate",
    "Gemm": "alpha beta transA transB",
    "GridSample": "align_corners mode padding_mode",
    "GroupNormalization": "epsilon num_groups",
    "GRU": f"{_RECURRENT} linear_before_reset",
    "HardSigmoid": "alpha beta",
    "InstanceNormalization": "epsilon",
    "IsInf": "detect_negative detect_positive",
    "LRN": "alpha beta bias size",
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), "axis epsilon"),
    "LpNormalization": "axis p",
    "LSTM": f"{_RECURRENT} input_forget",
    "MaxPool": f"{_WINDOW} ceil_mode",
    "MeanVarianceNormalization": "axes",
    "Mod": "fmod",
    **dict.fromkeys(
        ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), "ignore_index reduction"
    ),
    "Pad": "mode pads value",
    **{
        f"Reduce{kind}": _REDUCED
        for kind in (
            *("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum"),
            "SumSquare",
        )
    },
    "Reshape": "allowzero",
    "Resize": "antialias coordinate_transformation_mode cubic_coeff_a mode nearest_mode",
    "RNN": _RECURRENT,
    "RotaryEmbedding": "interleaved num_heads rotary_embedding_dim",
    "Scatter": "axis",
    "ScatterElements": "axis reduction",
    "ScatterND": "reduction",
    "Scan": "num_scan_inputs scan_input_axes scan_input_directions scan_output_axes "
    "scan_output_directions",
    "Selu": "alpha gamma",
    "Shape": "end start",
    "Shrink": "bias lambd",
    "Slice": "axes ends starts",
    **dict.fromkeys(("LogSoftmax", "Softmax"), "axis"),
    "SpaceToDepth": "blocksize",
    "Split": "axis num_outputs split",
    "SplitToSequence": "axis keepdims",
    **dict.fromkeys(("Squeeze", "Unsqueeze"), "axes"),
    "TopK": "axis k largest sorted",
    "Transpose": "perm",
    "Trilu": "upper",
    "Upsample": "mode scales",
}
"""By the op, names of the attributes that its function reads; none of an op that is not here."""

IDLE = {"consumed_inputs", "is_test", "momentum", "saturate", "seed", "stash_type", "storage_order"}
"""Attributes that change no number: of memory, of figures and places that are no results here, of
how a sum is kept, of casts to eight bits."""

CONTROL = ("If", "Loop", "Scan")
"""Ops with graphs in them, which `control` runs."""


QUANTIZED = {
    *("ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"),
    *("QLinearConv", "QLinearMatMul", "QuantizeLinear"),
}
"""Ops of files that were made small and quick for inference."""


def _none(node: NodeOf, inputs: Sequence[Value]) -> tuple[()]:
    return ()


def function_of(node: NodeOf) -> Function:
    """The function of a node's op.

    Raises:
        ModelError: the op has no function, or its function does not read one of the attributes.
    """
    if node.op in OPS or node.op in CONTROL:
        for name in node.attributes.keys() - IDLE - {*READ.get(node.op, "").split()}:
            raise node.refuse(f"the attribute {name}={node.attributes[name]!r} is not read")
        return OPS.get(node.op, _none)
    if node.op in QUANTIZED:
        raise ModelError(
            f"{node.where}: the file computes in integers, through which no gradient goes",
            hint="export the model before it is quantized",
        )
    near = difflib.get_close_matches(node.op, OPS, 1)
    raise ModelError(
        f"{node.where}: this op is not read",
        hint=f"{len(OPS)} ops are{f', {near[0]} among them' if near else ''}; a model file may "
        "build the model in torch instead",
    )


def is_default(node: onnx.NodeProto, own: onnx.AttributeProto, version: int) -> bool:
    """Whether an attribute has its op's default value."""
    from onnx import defs, helper

    if not defs.has(node.op_type, version, ""):
        return False
    known = defs.get_schema(node.op_type, version, "").attributes.get(own.name)
    if known is None or known.default_value.type != own.type:
        return False
    value = helper.get_attribute_value(known.default_value)
    return bool(value == helper.get_attribute_value(own))
