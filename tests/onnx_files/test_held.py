"""What a file holds: what of it is trained, what its names are, and what its constants give."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import autopipe
from autopipe.errors import ModelError
from tests.support.long import sampled
from tests.support.staged import trace_model


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
    for optimize in sampled((True, False), of=2):
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


@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float32])
def test_the_places_in_a_constant_that_are_not_zero_are_a_constant(
    tmp_path: Path, kind: type
) -> None:
    """As exporters write `x[:, mask]` of a buffer; a trace has a size for the result."""
    mask = np.array([1, 0, 1, 0, 0, 1, 1, 0]).astype(kind)
    nodes = [
        helper.make_node("NonZero", ["mask"], ["places"]),
        helper.make_node("Squeeze", ["places", "zero"], ["row"]),
        helper.make_node("Gather", ["x", "row"], ["picked"], axis=1),
        helper.make_node("MatMul", ["picked", "weight"], ["y"]),
    ]
    weight = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    held = {"zero": np.array([0]), "weight": weight}
    if kind is np.float32:  # a constant: as an initializer it would be trained
        value = numpy_helper.from_array(mask)
        nodes.insert(0, helper.make_node("Constant", [], ["mask"], value=value))
    else:
        held["mask"] = mask
    file_of(tmp_path / "net.onnx", nodes, held)
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    x = torch.randn(3, 8)
    assert torch.allclose(read(x), x[:, mask != 0] @ torch.tensor(weight), atol=1e-6)
    traced = trace_model(read, lambda rows: torch.randn(rows, 8), lambda y, _: y.mean())
    assert [node.short for node in traced.graph.nodes].count("index_select") == 1


def test_places_that_depend_on_values_are_refused_in_a_plan(tmp_path: Path) -> None:
    """Outside of a plan the file computes them."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["y"], to=TensorProto.FLOAT),
    ]
    file_of(tmp_path / "net.onnx", nodes, {})
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    assert read(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ModelError, match="how many entries are not zero depends on values"):
        trace_model(read, lambda rows: torch.ones(rows, 8), lambda y, _: y.mean())


def test_results_that_nothing_reads_are_not_asked_for(tmp_path: Path) -> None:
    """Older files name the mask of a dropout and the places of a pool's largest entries. The parts
    of a split count whether they are read or not: 8 / 4 columns each."""
    nodes = [
        helper.make_node("Dropout", ["x"], ["kept", "mask"]),
        helper.make_node("Split", ["kept"], ["a", "b", "c", "d"], axis=1, num_outputs=4),
        helper.make_node("Concat", ["a", "a", "c", "c"], ["joined"], axis=1),
        helper.make_node("Add", ["joined", "bias"], ["y"]),
    ]
    file_of(tmp_path / "net.onnx", nodes, {"bias": np.ones(8, np.float32)})
    old = onnx.load(tmp_path / "net.onnx")
    old.opset_import[0].version = 13  # in which the number of outputs says into how many parts
    del old.graph.node[1].attribute[1]
    old.graph.node[1].output[1] = ""  # its second part has no name
    onnx.save(old, tmp_path / "old.onnx")
    x = torch.randn(3, 8)
    for name in ("net.onnx", "old.onnx"):
        found = autopipe.from_onnx(tmp_path / name)(x)
        assert torch.equal(found, x[:, [0, 1, 0, 1, 4, 5, 4, 5]] + 1)


def test_the_number_of_largest_entries_was_an_attribute_once(tmp_path: Path) -> None:
    """Before op set 10; and ScatterElements was called Scatter."""
    nodes = [
        helper.make_node("TopK", ["x"], ["largest", "places"], k=3, axis=1),
        helper.make_node("Scatter", ["bias", "places", "largest"], ["y"], axis=1),
    ]
    file_of(tmp_path / "net.onnx", nodes, {"bias": np.zeros((2, 8), np.float32)})
    old = onnx.load(tmp_path / "net.onnx")
    old.opset_import[0].version, old.ir_version = 9, 4
    old.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [2, 8]))
    onnx.save(old, tmp_path / "net.onnx")
    x = torch.randn(2, 8)
    largest, places = x.topk(3)
    wanted = torch.zeros(2, 8).scatter(1, places, largest)
    assert torch.equal(autopipe.from_onnx(tmp_path / "net.onnx")(x), wanted)
