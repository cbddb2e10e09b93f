"""RNN, LSTM and GRU in every form that ONNX has, as onnxruntime computes them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

import autopipe
from autopipe.errors import ModelError

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}

FORMS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"direction": "reverse"},
    "both ways": {"direction": "bidirectional"},
    "clip": {"clip": 0.5},
    "torch's reset": {"linear_before_reset": 1},
    "other activations": {"activations": ["HardSigmoid", "Softsign", "Relu"]},
    "lengths": {},
    "lengths, both ways": {"direction": "bidirectional"},
    "lengths, reverse": {"direction": "reverse"},
    "peepholes": {},
}


def file_of(path: Path, op: str, form: str) -> None:
    """A file of one layer, tokens first, with its last states; lengths are an input."""
    rng = np.random.default_rng(0)
    told = dict(FORMS[form])
    gates, ways = GATES[op], 2 if told.get("direction") == "bidirectional" else 1
    if "activations" in told:
        told["activations"] = told["activations"][: {"RNN": 1, "GRU": 2, "LSTM": 3}[op]]
    shapes = {
        "W": (ways, gates * 4, 3),
        "R": (ways, gates * 4, 4),
        "B": (ways, 2 * gates * 4),
        "P": (ways, 3 * 4),
    }
    if form != "peepholes":
        del shapes["P"]
    held = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    takes = ["x", "W", "R", "B", "lengths" if "lengths" in form else "", "", "", "P"]
    gives = ["y", "h", "c"][: 3 if op == "LSTM" else 2]
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["tokens", "rows", 3])]
    if "lengths" in form:
        values.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["rows"]))
    graph = helper.make_graph(
        [helper.make_node(op, takes if "P" in shapes else takes[:5], gives, hidden_size=4, **told)],
        "layer",
        values,
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [*"abcd"][: 4 if n == 0 else 3])
            for n, name in enumerate(gives)
        ],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", GATES)
def test_a_layer_gives_what_onnxruntime_gives_and_its_own_gradients(
    tmp_path: Path, op: str, form: str
) -> None:
    """Gradients beside those by differences. Rows of 5, 1, 3 and 0 tokens where they vary."""
    if form in ("torch's reset", "peepholes") and op != {"p": "LSTM"}.get(form[0], "GRU"):
        return
    file_of(tmp_path / "net.onnx", op, form)
    given = {"x": torch.randn(5, 4, 3)}
    if "lengths" in form:
        given["lengths"] = torch.tensor([5, 1, 3, 0], dtype=torch.int32)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    wanted = session.run(None, {name: t.numpy() for name, t in given.items()})
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    for mine, theirs in zip(read(**given).values(), wanted, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine, torch.from_numpy(theirs), rtol=1e-5, atol=1e-5)
    read.double()

    def total(x: Tensor, *weights: Tensor) -> Tensor:
        names = [name for name, _ in read.named_parameters()]
        found = torch.func.functional_call(
            read, dict(zip(names, weights, strict=True)), (), {**given, "x": x}
        )
        return torch.stack([part.square().sum() for part in found.values()]).sum()

    inputs = [t.detach().double().requires_grad_() for t in (given["x"], *read.parameters())]
    assert torch.autograd.gradcheck(total, inputs, fast_mode=True)


def test_a_form_that_is_not_read_is_refused(tmp_path: Path) -> None:
    file_of(tmp_path / "net.onnx", "LSTM", "other activations")
    model = onnx.load(tmp_path / "net.onnx")
    (named,) = (own for own in model.graph.node[0].attribute if own.name == "activations")
    named.strings[0] = b"Affine"
    onnx.save(model, tmp_path / "net.onnx")
    with pytest.raises(ModelError, match="the activation 'affine' is not read"):
        autopipe.from_onnx(tmp_path / "net.onnx")(torch.randn(5, 4, 3))
