"""What of a file is trained: what its model trained, as far as the file tells."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import autopipe


class Attention(nn.Module):
    """One attention with positions in a buffer, and numbers in the code of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.temperature = nn.Parameter(torch.tensor([0.5]))
        self.register_buffer("positions", torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x + self.positions).view(-1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        seen = nn.functional.scaled_dot_product_attention(q * self.temperature, k, v)
        slopes = torch.arange(8) * 0.1
        return self.out(seen.transpose(1, 2).flatten(2)) + slopes


def exported(path: Path, *, optimize: bool) -> nn.Module:
    own = Attention()
    rows = {0: torch.export.Dim("rows")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            own,
            (torch.randn(3, 6, 8),),
            path,
            dynamic_shapes=(rows,),
            verbose=False,
            optimize=optimize,
        )
    return own


def test_the_parameters_of_a_model_that_torch_exports_are_trained_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Bug: the exporter's optimizer makes initializers of all constants, and the scale of an
    attention, a table of slopes and a buffer were trained. Three steps of SGD beside the model."""
    for optimize in (True, False):
        own = exported(tmp_path / "net.onnx", optimize=optimize)
        read = autopipe.from_onnx(tmp_path / "net.onnx")
        shapes = sorted(tuple(sorted(p.shape)) for p in read.parameters())
        assert shapes == sorted(tuple(sorted(p.shape)) for p in own.parameters())
        torch.manual_seed(0)
        for _ in range(3):
            x = torch.randn(4, 6, 8)
            outputs = []
            for model in (own, read):
                model.zero_grad()
                outputs.append(model(x))
                outputs[-1].square().mean().backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.5 * parameter.grad  # type: ignore[operator]
            assert torch.allclose(*outputs, rtol=1e-4, atol=1e-5)


def file_of(path: Path, nodes: list[onnx.NodeProto], held: dict[str, np.ndarray]) -> None:
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["rows", 8]) for n in "xy"]
    kept = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], kept)
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def test_a_file_without_notes_has_its_floats_trained(tmp_path: Path) -> None:
    """Names alone say nothing: `val_0` of another exporter may be a weight."""
    nodes = [helper.make_node("MatMul", ["x", "val_0"], ["y"])]
    file_of(tmp_path / "net.onnx", nodes, {"val_0": np.ones((8, 8), np.float32)})
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    assert [name for name, _ in read.named_parameters()] == ["val_0"]


def test_a_name_may_be_the_beginning_of_another_one(tmp_path: Path) -> None:
    """Bug: `a` beside `a.b` ended in a KeyError, since a module had both an `a.b` and an `a`."""
    held = {name: np.full(8, n, np.float32) for n, name in enumerate(("a.b", "a", "a.b.c"))}
    nodes = [
        helper.make_node("Add", ["x", "a.b"], ["first"]),
        helper.make_node("Add", ["first", "a"], ["second"]),
        helper.make_node("Add", ["second", "a.b.c"], ["y"]),
    ]
    file_of(tmp_path / "net.onnx", nodes, held)
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    assert torch.equal(read(torch.zeros(2, 8)), torch.full((2, 8), 0.0 + 1 + 2))
    assert len([*read.parameters()]) == 3


def test_sizes_are_divided_towards_zero(tmp_path: Path) -> None:
    """(3 - 8) / 2 is -2 in ONNX and -3 in Python; bug: it was Python's."""
    held = {"one": np.array(1), "three": np.array(3), "two": np.array(2)}
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["eight"]),
        helper.make_node("Sub", ["three", "eight"], ["below"]),
        helper.make_node("Div", ["below", "two"], ["half"]),
        helper.make_node("Cast", ["half"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "number"], ["y"]),
    ]
    file_of(tmp_path / "net.onnx", nodes, held)
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    assert torch.equal(read(torch.zeros(2, 8)), torch.full((2, 8), -2.0))
