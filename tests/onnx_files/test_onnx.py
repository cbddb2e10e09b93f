"""Models read from ONNX files: outputs and gradients are those of their torch originals.

Torch's exporter writes some weights transposed, under names of its own: the parameters of a file
are paired with the original's by their numbers.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper, save
from torch import Tensor, nn

import autopipe as package
from autopipe.batch.arguments import forward_arguments
from autopipe.cli import check
from autopipe.errors import ModelError
from autopipe.onnx_files.source import as_module
from tests.support import warm
from tests.support.shell import Shell
from tests.support.staged import trace_model
from tests.support.zoo import ZOO

EXPORTED = "gpt unet lstm resnet frozen dict mask picked keywords counted".split()
"""Of the zoo, what torch exports to ONNX with a number of rows that varies. Not "odd", which has
backwards of its own: a file has none."""


def exported(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], path: Path) -> None:
    rows = torch.export.Dim("rows")

    def dims(value: object) -> Any:
        return {0: rows} if isinstance(value, Tensor) else None

    shapes: Any = {key: dims(value) for key, value in kwargs.items()} or tuple(map(dims, args))
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            tuple(args),
            path,
            kwargs=kwargs,
            dynamic_shapes=shapes,
            verbose=False,
            optimize=False,
        )
    logging.disable(logging.NOTSET)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTED)
def test_the_zoo(tmp_path: Path, name: str) -> None:
    case = ZOO[name]
    own, batch = case.model().eval(), case.inputs(3)
    with torch.no_grad():
        for parameter in own.parameters():  # the exporter makes one of two that are equal
            parameter += 0.01 * torch.randn(parameter.shape)
    args, kwargs = forward_arguments(own, batch, case.loss)
    exported(own, args, kwargs, tmp_path / "net.onnx")
    read = package.from_onnx(tmp_path / "net.onnx")
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    theirs = _tensors(own(*args, **kwargs))
    ours = _tensors(read(*given))
    for mine, other in zip(ours, theirs, strict=False):
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
    sum(x.square().mean() for x in ours[: len(theirs)] if x.requires_grad).backward()  # type: ignore[union-attr]
    sum(x.square().mean() for x in theirs if x.requires_grad).backward()  # type: ignore[union-attr]
    mine = {_print_of(p.detach()): p for p in read.parameters()}
    compared = 0
    for parameter in filter(lambda p: p.grad is not None, own.parameters()):
        for turned in (parameter, parameter.t() if parameter.ndim == 2 else parameter):
            if (found := mine.get(_print_of(turned.detach()))) is not None:
                grad = parameter.grad if turned is parameter else parameter.grad.t()  # type: ignore[union-attr]
                assert found.grad is not None and grad is not None
                assert torch.allclose(found.grad, grad, rtol=1e-4, atol=1e-6)
                compared += 1
                break
    trained = [p for p in own.parameters() if p.grad is not None]
    # What the exporter makes otherwise, as the gates of an LSTM in another order, is none of ours.
    assert compared >= len(trained) / 2


def _tensors(outputs: Any) -> list[Tensor]:
    values = outputs.values() if isinstance(outputs, dict) else [outputs]
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def _print_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), *tensor.reshape(-1)[:64].tolist()


def by_hand(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """x + relu(x W) W' with W twice, after a reshape whose sizes the graph computes itself."""
    rng = np.random.default_rng(0)
    weights = {
        "block.weight": rng.normal(size=(6, 6)).astype(np.float32),
        "block.bias": rng.normal(size=6).astype(np.float32),
    }
    constants = {"zero": np.array([0]), "six": np.array([-1, 6]), "one": np.array([1])}
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "one"], ["rows"]),
        helper.make_node("Concat", ["rows", "six"], ["apart"], axis=0),
        helper.make_node("Reshape", ["x", "apart"], ["parts"]),  # (rows, 2, 6)
        helper.make_node("MatMul", ["parts", "block.weight"], ["up"]),
        helper.make_node("Relu", ["up"], ["active"]),
        helper.make_node("MatMul", ["active", "block.weight"], ["down"]),
        helper.make_node("Add", ["down", "block.bias"], ["moved"]),
        helper.make_node("Add", ["parts", "moved"], ["skipped"]),
        helper.make_node("Reshape", ["skipped", "shape"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "by hand",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 12])],
        [numpy_helper.from_array(a, n) for n, a in (weights | constants).items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return weights


def test_a_file_by_hand(tmp_path: Path) -> None:
    weights = by_hand(tmp_path / "net.onnx")
    read = package.from_onnx(tmp_path / "net.onnx")
    assert sorted(name for name, _ in read.named_parameters()) == sorted(weights)
    w, b = (
        torch.tensor(weights[f"block.{name}"], requires_grad=True) for name in ("weight", "bias")
    )
    for rows in (1, 5):
        x = torch.randn(rows, 12)
        parts = x.view(rows, 2, 6)
        own = (parts + ((parts @ w).relu() @ w + b)).view(rows, 12)
        assert torch.equal(read(x), own)
        assert torch.equal(read(x=x), own)
    own.square().sum().backward()
    read(x).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in read.named_parameters()}
    assert torch.equal(grads["block.weight"], w.grad)  # type: ignore[arg-type]
    assert torch.equal(grads["block.bias"], b.grad)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_file_is_planned_split_and_checked_as_any_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps on two stages beside the unsplit module, every gradient equal bit by bit."""

    def start(ranks: int, argv: Sequence[str]) -> int:
        return warm.spawn(ranks, ["-m", "autopipe", *argv], tmp_path)

    monkeypatch.setattr(check, "started", start)
    shell = Shell(tmp_path, monkeypatch, capsys)
    by_hand(tmp_path / "net.onnx")
    said = shell("check", "net.onnx", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["same"] and found["plan"]["pp"] == 2
    assert all(row["wrong"] == [] for row in found["rows"])


def one_node(path: Path, op: str, domain: str = "", dims: Sequence[Any] = ("rows", 4)) -> Path:
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], name="last", domain=domain)],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)],
    )
    sets = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    save(helper.make_model(graph, opset_imports=sets), path)
    return path


@pytest.mark.parametrize(
    ("op", "domain", "dims", "error"),
    [
        ("Det", "", ("rows", 4), r"net.onnx: the node 'last' \(Det\): this op is not read"),
        (
            "FastGelu",
            "com.microsoft",
            ("rows", 4),
            r"ops of the domain 'com.microsoft' are not read",
        ),
        ("Relu", "", (3, 4), r"the input 'x' is of 3 rows, and a step has others"),
    ],
)
def test_refusals(tmp_path: Path, op: str, domain: str, dims: Sequence[Any], error: str) -> None:
    with pytest.raises(ModelError, match=error) as refused:
        as_module(str(one_node(tmp_path / "net.onnx", op, domain, dims)))
    assert domain or refused.value.hint


def test_what_is_no_onnx_file(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_text("hello")
    with pytest.raises(ModelError, match="net.onnx is no ONNX file that can be read") as error:
        as_module(str(tmp_path / "net.onnx"))
    assert str(error.value.hint).startswith("was it copied whole")
    with pytest.raises(ModelError, match="there is no ONNX file"):
        as_module(str(tmp_path / "other.onnx"))


def by_an_older_exporter(path: Path) -> None:
    """What torch's exporter by TorchScript writes of a pad, a cumsum, a one-hot and an upsampling.

    The ends of the pad are pairs that it turns round and reverses itself: as numbers, they may be
    sizes.
    """
    constants = {
        "ends": np.array([0, 0, 0, 0, 1, 2, 0, 1]),
        "pairs": np.array([-1, 2]),
        "flat": np.array([-1]),
        "last": np.array([-1]),
        "far": np.array([-(2**63) + 1]),
        "zeroth": np.array([0]),
        "axis": np.array(3, dtype=np.int32),
        "five": np.array([5]),
        "four": np.array([4]),
        "once and twice": np.array([1, 2]),
        "off and on": np.array([0.0, 1.0], dtype=np.float32),
        "twice": np.array([1, 1, 2, 2], dtype=np.float32),
        "none": np.array([], dtype=np.float32),
    }
    of_ints = numpy_helper.from_array(np.array([0]))
    cubic = {
        "mode": "cubic",
        "cubic_coeff_a": -0.75,
        "coordinate_transformation_mode": "half_pixel",
    }
    nodes = [
        helper.make_node("ConstantOfShape", ["zeroth"], ["nothing"], value=of_ints),
        helper.make_node("Concat", ["ends", "nothing"], ["all ends"], axis=0),
        helper.make_node("Reshape", ["all ends", "pairs"], ["in pairs"]),
        helper.make_node("Slice", ["in pairs", "last", "far", "zeroth", "last"], ["reversed"]),
        helper.make_node("Transpose", ["reversed"], ["turned"], perm=[1, 0]),
        helper.make_node("Reshape", ["turned", "flat"], ["in a row"]),
        helper.make_node("Cast", ["in a row"], ["pads"], to=TensorProto.INT64),
        helper.make_node("Pad", ["x", "pads"], ["padded"], mode="constant"),
        helper.make_node("CumSum", ["padded", "axis"], ["summed"]),
        helper.make_node("Resize", ["summed", "none", "twice"], ["y"], **cubic),
        helper.make_node("OneHot", ["label", "five", "off and on"], ["hot"]),
        helper.make_node("OneHot", ["last", "four", "once and twice"], ["in a column"]),
        helper.make_node("Reshape", ["in a column", "flat"], ["often"]),
        helper.make_node("Tile", ["x", "often"], ["twice as wide"]),
    ]
    graph = helper.make_graph(
        nodes,
        "by an older exporter",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 2, 3, 4]),
            helper.make_tensor_value_info("label", TensorProto.INT64, ["rows"]),
        ],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 2, "h", "w"]),
            helper.make_tensor_value_info("hot", TensorProto.FLOAT, ["rows", 5]),
            helper.make_tensor_value_info("twice as wide", TensorProto.FLOAT, ["rows", 2, 3, 8]),
        ],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def test_what_an_older_exporter_writes(tmp_path: Path) -> None:
    """As onnxruntime computes it; in a trace the ends of the pad are numbers."""
    by_an_older_exporter(tmp_path / "net.onnx")
    given = {"x": torch.randn(3, 2, 3, 4), "label": torch.tensor([4, -1, 0])}
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    expected = session.run(None, {name: t.numpy() for name, t in given.items()})
    model = package.from_onnx(tmp_path / "net.onnx")
    for found, other in zip(model(**given).values(), expected, strict=True):
        assert found.shape == other.shape
        assert torch.allclose(found, torch.from_numpy(other), rtol=1e-5, atol=1e-5)

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(rows, 2, 3, 4), "label": torch.zeros(rows, dtype=torch.int64)}

    def loss(outputs: dict[str, Tensor], batch: object) -> Tensor:
        return outputs["y"].mean() + outputs["hot"].mean()

    ops = [node.short for node in trace_model(model, inputs, loss).graph.nodes]
    assert {"pad", "cumsum"} <= {*ops}


class Tied(nn.Module):
    """An embedding that is the last layer too, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(12, 6), nn.Linear(6, 6)
        self.first = self.second = nn.Linear(6, 6)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).mean(1)
        return self.second(self.layer(self.first(x).tanh()).tanh()) @ self.embedding.weight.T


def test_a_weight_that_is_written_twice_is_one(tmp_path: Path) -> None:
    """The exporter writes what linear layers multiply by transposed, once for each that does."""
    own, words = Tied(), torch.tensor([[0, 3, 11], [5, 5, 1]])
    rows = {0: torch.export.Dim("rows")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            own, (words,), tmp_path / "net.onnx", dynamic_shapes=(rows,), verbose=False
        )
    read = package.from_onnx(tmp_path / "net.onnx")
    for model in (own, read):
        model(words).square().mean().backward()
    mine = sorted((p.grad for p in read.parameters() if p.grad is not None), key=_size)
    theirs = sorted((p.grad for p in own.parameters() if p.grad is not None), key=_size)
    assert [_size(grad) for grad in mine] == pytest.approx([_size(grad) for grad in theirs])


def _size(gradient: Tensor) -> float:
    return float(gradient.norm())


def old_file(path: Path, node: NodeProto, inputs: Sequence[str], held: Any) -> None:
    """A file of op set 6, of one node; its inputs and its output have `rows` x 3 x 3 numbers."""
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 3, 3])
        for name in (*inputs, "y")
    ]
    kept = [] if held is None else [numpy_helper.from_array(held, "slope")]
    # As such files are: what is held is among the inputs.
    kept_values = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in kept]
    graph = helper.make_graph([node], "old", [*values[:-1], *kept_values], values[-1:], kept)
    opsets = [helper.make_opsetid("", 6)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=3), path)


def test_inputs_may_have_any_names(tmp_path: Path) -> None:
    """Bug: torch once named a file's inputs `0`, `1`, which no argument of Python is called."""
    names = ["0", "input.1", "input_1:0", "input:1_0"]
    old_file(tmp_path / "sum.onnx", helper.make_node("Sum", names, ["y"]), names, None)
    model = package.from_onnx(tmp_path / "sum.onnx")
    arguments = ["input_0", "input_1", "input_1_0", "input_1_0_"]
    assert [*inspect.signature(model.forward).parameters] == arguments
    x = torch.arange(9.0).reshape(1, 3, 3)
    given = {name: x * 10**n for n, name in enumerate(arguments)}
    assert torch.equal(model(**given), x * 1111)
    assert torch.equal(model(*given.values()), x * 1111)


def test_slopes_of_old_files_are_of_channels(tmp_path: Path) -> None:
    """Bug: since op set 7 slopes are broadcast as a factor is, and these were read as such."""
    node = helper.make_node("PRelu", ["x", "slope"], ["y"])
    slopes = np.array([0.5, 0.25, 0.125], np.float32)
    old_file(tmp_path / "prelu.onnx", node, ["x"], slopes)
    x = -torch.arange(1.0, 19.0).reshape(2, 3, 3)
    expected = nn.functional.prelu(x, torch.tensor(slopes))
    assert torch.equal(package.from_onnx(tmp_path / "prelu.onnx")(x), expected)
