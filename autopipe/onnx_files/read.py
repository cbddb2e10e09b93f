"""Read an ONNX file, checked and with the functions in it written out.

A checker wants the shapes of outputs, which a file need not say. They are found on a copy without
the weights in other files: protobuf holds no more than 2 GB.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.errors import ModelError

if TYPE_CHECKING:
    import onnx


def read(path: Path) -> onnx.ModelProto:
    """The model of a file, with its weights.

    Raises:
        ModelError: onnx is not installed, or this is no ONNX file.
    """
    try:
        import onnx
        from onnx import inliner
    except ImportError as error:
        raise ModelError(
            f"{path} is read by onnx, which is not installed", hint="pip install onnx"
        ) from error
    if not path.is_file():
        raise ModelError(f"there is no ONNX file {str(path)!r}", hint="check the path")
    try:
        model = onnx.load(str(path))
        if all(value.type.tensor_type.HasField("shape") for value in model.graph.output):
            onnx.checker.check_model(str(path))
        else:
            _infer_outputs(model, path)
        if model.functions:  # a copy of it all
            model = inliner.inline_local_functions(model)
    except Exception as error:  # protobuf and the checker raise of every kind
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{path} is no ONNX file that can be read: {reason}",
            hint="was it copied whole, with the files of weights beside it? "
            "torch.onnx.export(model, inputs, FILE) writes one",
        ) from error
    return model


def _infer_outputs(model: onnx.ModelProto, path: Path) -> None:
    """Check a model whose outputs have no shapes, and write these into it."""
    import onnx
    from onnx import helper, shape_inference
    from onnx.external_data_helper import load_external_data_for_model

    bare = onnx.load(str(path), load_external_data=False)
    elsewhere = [tensor for tensor in bare.graph.initializer if tensor.external_data]
    inputs = {value.name for value in bare.graph.input}
    for tensor in elsewhere:
        bare.graph.initializer.remove(tensor)
        if tensor.name not in inputs:
            told = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            bare.graph.input.append(told)
    load_external_data_for_model(bare, str(path.parent))  # of graphs in it, and of constants
    inferred = shape_inference.infer_shapes(bare)
    onnx.checker.check_model(inferred)
    for value, found in zip(model.graph.output, inferred.graph.output, strict=True):
        value.CopyFrom(found)
