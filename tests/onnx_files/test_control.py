"""If, Loop and Scan as onnxruntime computes them; a branch by values is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from torch import Tensor

import autopipe
from autopipe.errors import ModelError
from tests.support.staged import trace_model

Values = dict[str, np.ndarray[Any, Any]]

WEIGHT = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) / 3


def value(name: str, *dims: str | int, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def body(
    nodes: list[NodeProto], takes: Any, gives: Any, **held: np.ndarray[Any, Any]
) -> GraphProto:
    kept = [numpy_helper.from_array(array, name) for name, array in held.items()]
    return helper.make_graph(nodes, "body", takes, gives, kept)


def file_of(path: Path, nodes: list[NodeProto], held: Values, *dims: str | int) -> None:
    kept = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "net", [value("x", *dims)], [value("y", *dims)], kept)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


def same_as_onnxruntime(path: Path, *shape: int) -> None:
    """Outputs, and that a trace follows the file."""
    x = torch.randn(3, *shape)
    (wanted,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x.numpy()})
    read = autopipe.from_onnx(path)
    assert torch.allclose(read(x), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)

    def inputs(rows: int) -> Tensor:
        return torch.randn(rows, *shape)

    trace_model(read, inputs, lambda y, _: y.square().mean())
    read(x).square().mean().backward()
    assert all(p.grad is not None for p in read.parameters())


@pytest.mark.parametrize("width", [1, 8])
def test_a_branch_by_sizes_is_followed(tmp_path: Path, width: int) -> None:
    """As exporters write `x.squeeze(1)`. Both branches call their own number `number`."""
    yes = body(
        [helper.make_node("Mul", ["x", "number"], ["a"])],
        [],
        [value("a", "rows", width)],
        number=np.full(1, 3, np.float32),
    )
    no = body(
        [helper.make_node("Add", ["x", "number"], ["b"])],
        [],
        [value("b", "rows", width)],
        number=np.full(1, 5, np.float32),
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "place"], ["size"]),
        helper.make_node("Equal", ["size", "one"], ["is one"]),
        helper.make_node("Cast", ["is one"], ["so"], to=TensorProto.BOOL),
        helper.make_node("If", ["so"], ["made"], then_branch=yes, else_branch=no),
        helper.make_node("Add", ["made", "bias"], ["y"]),
    ]
    held = {"place": np.array(1), "one": np.array(1), "bias": np.ones(width, np.float32)}
    file_of(tmp_path / "net.onnx", nodes, held, "rows", width)
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    x = torch.randn(2, width)
    assert torch.equal(read(x), (x * 3 if width == 1 else x + 5) + 1)


def test_a_branch_by_values_is_refused(tmp_path: Path) -> None:
    halves = [body([helper.make_node(op, ["x"], [op])], [], [value(op)]) for op in ("Relu", "Neg")]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["so"]),
        helper.make_node("If", ["so"], ["y"], then_branch=halves[0], else_branch=halves[1]),
    ]
    file_of(tmp_path / "net.onnx", nodes, {"zero": np.array(0, np.float32)}, "rows", 8)
    said = r"\(If\): its condition is computed from the values of a tensor, and no plan follows it"
    with pytest.raises(ModelError, match=said):
        autopipe.from_onnx(tmp_path / "net.onnx")(torch.randn(2, 8))


def test_a_loop_runs_as_often_as_its_number_says(tmp_path: Path) -> None:
    """Three times h = tanh(h W), and the sum of all h; the weight is the outer graph's."""
    step = body(
        [
            helper.make_node("MatMul", ["h", "weight"], ["product"]),
            helper.make_node("Tanh", ["product"], ["next"]),
            helper.make_node("Identity", ["on"], ["still"]),
            helper.make_node("Identity", ["next"], ["each"]),
        ],
        [
            value("n", kind=TensorProto.INT64),
            value("on", kind=TensorProto.BOOL),
            value("h", "rows", 8),
        ],
        [
            value("still", kind=TensorProto.BOOL),
            value("next", "rows", 8),
            value("each", "rows", 8),
        ],
    )
    nodes = [
        helper.make_node("Loop", ["three", "true", "x"], ["last", "all"], body=step),
        helper.make_node("ReduceSum", ["all", "zero"], ["sum"], keepdims=0),
        helper.make_node("Add", ["last", "sum"], ["y"]),
    ]
    held = {
        "three": np.array(3),
        "true": np.array(True),
        "zero": np.array([0]),
        "weight": WEIGHT,
    }
    file_of(tmp_path / "net.onnx", nodes, held, "rows", 8)
    same_as_onnxruntime(tmp_path / "net.onnx", 8)


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan_runs_for_each_entry(tmp_path: Path, backwards: int) -> None:
    """s = tanh((s + x_t) W) over the tokens, each s a result."""
    step = body(
        [
            helper.make_node("Add", ["s", "entry"], ["sum"]),
            helper.make_node("MatMul", ["sum", "weight"], ["product"]),
            helper.make_node("Tanh", ["product"], ["next"]),
            helper.make_node("Identity", ["next"], ["each"]),
        ],
        [value("s", "rows", 8), value("entry", "rows", 8)],
        [value("next", "rows", 8), value("each", "rows", 8)],
    )
    told = {
        "num_scan_inputs": 1,
        "scan_input_axes": [1],
        "scan_output_axes": [1],
        "scan_input_directions": [backwards],
        "scan_output_directions": [backwards],
    }
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["first"], axes=[1], keepdims=0),
        helper.make_node("Scan", ["first", "x"], ["last", "y"], body=step, **told),
    ]
    file_of(tmp_path / "net.onnx", nodes, {"weight": WEIGHT}, "rows", 5, 8)
    same_as_onnxruntime(tmp_path / "net.onnx", 5, 8)


def test_a_scan_by_rows_of_op_set_8_is_refused(tmp_path: Path) -> None:
    step = body(
        [
            helper.make_node("Add", ["s", "entry"], ["next"]),
            helper.make_node("Identity", ["next"], ["each"]),
        ],
        [value("s", 8), value("entry", 8)],
        [value("next", 8), value("each", 8)],
    )
    node = helper.make_node("Scan", ["", "s0", "x"], ["last", "y"], body=step, num_scan_inputs=1)
    zeros = numpy_helper.from_array(np.zeros((2, 8), np.float32), "s0")
    takes, gives = [value("x", 2, 5, 8), value("s0", 2, 8)], [value("y", 2, 5, 8)]
    graph = helper.make_graph([node], "net", takes, gives, [zeros])
    opset = [helper.make_opsetid("", 8)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=3), tmp_path / "net.onnx")
    with pytest.raises(ModelError, match=r"\(Scan\): before op set 9 it ran row by row"):
        autopipe.from_onnx(tmp_path / "net.onnx")(torch.randn(2, 5, 8))


def test_one_weight_of_two_branches(tmp_path: Path) -> None:
    """Each branch holds it by a name of its own: it is one parameter, whichever of them runs."""
    first, second = (
        body(
            [helper.make_node("MatMul", ["x", own], [made])],
            [],
            [value(made, "rows", 8)],
            **{own: WEIGHT},
        )
        for own, made in (("W1", "a"), ("W2", "b"))
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "place"], ["size"]),
        helper.make_node("Equal", ["size", "seven"], ["so"]),
        helper.make_node("If", ["so"], ["y"], then_branch=first, else_branch=second),
    ]
    file_of(tmp_path / "net.onnx", nodes, {"place": np.array(1), "seven": np.array(7)}, "rows", 8)
    same_as_onnxruntime(tmp_path / "net.onnx", 8)
    assert len([*autopipe.from_onnx(tmp_path / "net.onnx").parameters()]) == 1


def test_a_result_without_a_name_is_no_input_that_is_left_out(tmp_path: Path) -> None:
    """Bug: the second third of a split was the least value of a clip which has no least value.
    (onnxruntime 1.32 crashes at such a split.)"""
    nodes = [
        helper.make_node("Split", ["x"], ["a", "", "c"], axis=1),
        helper.make_node("Clip", ["a", "", "most"], ["clipped"]),
        helper.make_node("Mul", ["clipped", "weight"], ["weighed"]),
        helper.make_node("Add", ["weighed", "c"], ["y"]),
    ]
    held = {"most": np.array(0.5, np.float32), "weight": np.array([2.0, 3.0, 4.0], np.float32)}
    file_of(tmp_path / "net.onnx", nodes, held, "rows", 3)
    x = torch.randn(4, 9)
    a, _, c = x.chunk(3, 1)
    wanted = a.clamp(max=0.5) * torch.tensor([2.0, 3.0, 4.0]) + c
    assert torch.equal(autopipe.from_onnx(tmp_path / "net.onnx")(x), wanted)
