"""Every op beside ONNX's own cases of it (`onnx.backend.test`): their numbers, or a refusal.

Bug: attributes that no function reads were left out without a word, such as the alpha of a Selu or
the window of an attention, and so were places that count from the end.
"""

import importlib
import pkgutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.backend.test.case import node
from torch import Tensor, nn

import autopipe
from autopipe.errors import ModelError
from autopipe.onnx_files.ops import OPS
from autopipe.onnx_files.sequences import SEQUENCES
from autopipe.onnx_files.values import tensor_of
from tests.support.long import LONG
from tests.support.staged import trace_model

Array = np.ndarray[Any, Any]

SLOW = {"averagepool", "lppool", "maxpool"}
"""Modules of cases that ONNX computes in Python, most of the time of all: for the long run."""

OTHERWISE = {
    "gather_negative_indices": "tokens of an embedding do not count from the end; torch says so",
    "training_dropout": "torch draws other numbers",
    "reduce_max_empty_set": "torch has no largest entry of none, and says so",
    "reduce_min_empty_set": "torch has no smallest entry of none, and says so",
}
"""Beginnings of the names of cases in which torch's own op does otherwise."""

TRIED = sorted(set(OPS) - set(SEQUENCES) - ({"AveragePool", "MaxPool"} if not LONG else set()))
"""Ops with cases of tensors: all but those on sequences."""


@cache
def cases() -> dict[str, list[Any]]:
    """Cases of one node of ONNX's own domain, by op."""
    found: dict[str, list[Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy: infinities that a case is about
        for module in pkgutil.iter_modules(node.__path__):
            if LONG or module.name not in SLOW:
                importlib.import_module(f"{node.__name__}.{module.name}")
    for case in node._NodeTestCases:
        nodes = [] if case.model is None else case.model.graph.node
        if len(nodes) == 1 and nodes[0].domain in ("", "ai.onnx"):
            found.setdefault(nodes[0].op_type, []).append(case)
    return found


def arrays_of(case: Any) -> tuple[list[Array], list[Array]] | None:
    """What a case gives and wants; None: there are texts or sequences among it."""
    given, wanted = case.data_sets[0]
    if any(isinstance(x, list | tuple | dict | str) or x is None for x in (*given, *wanted)):
        return None
    made = [*map(_array, given)], [*map(_array, wanted)]
    return None if any(x.dtype.kind in "OUST" for part in made for x in part) else made


def _array(value: Any) -> Array:
    is_proto = isinstance(value, onnx.TensorProto)
    return numpy_helper.to_array(value) if is_proto else np.asarray(value)


def baked(model: onnx.ModelProto, arrays: list[Array]) -> onnx.ModelProto:
    """The same node with all inputs but the first in the file, as sizes mostly are."""
    own = onnx.ModelProto()
    own.CopyFrom(model)
    for entry, array in [*zip(own.graph.input, arrays, strict=True)][1:]:
        own.graph.input.remove(entry)
        own.graph.initializer.append(numpy_helper.from_array(array, entry.name))
    return own


def results(model: onnx.ModelProto, inputs: list[Array], folder: Path) -> list[Tensor] | None:
    """What the node gives; None: it is refused."""
    onnx.save(model, folder / "node.onnx")
    try:
        read = autopipe.from_onnx(folder / "node.onnx")
        made = read(*map(tensor_of, inputs))
    except ModelError:
        return None
    return [*made.values()] if isinstance(made, dict) else [made]


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("op", TRIED)
def test_an_op_gives_what_onnx_says_or_is_refused(op: str, tmp_path: Path) -> None:
    right = 0
    for case in cases().get(op, []):
        known = any(case.name.startswith(f"test_{name}") for name in OTHERWISE)
        arrays = None if known else arrays_of(case)
        if arrays is None:
            continue
        inputs, wanted = arrays
        for model, given in ((case.model, inputs), (baked(case.model, inputs), inputs[:1])):
            made = results(model, given, tmp_path)
            right += made is not None
            for mine, array in zip(made or (), wanted, strict=False):
                want = tensor_of(array)
                assert (mine.shape, mine.dtype) == (want.shape, want.dtype), case.name
                near = 1e-4 if want.dtype in (torch.float32, torch.float64) else 5e-3
                assert torch.allclose(
                    mine.detach().double(), want.double(), rtol=near, atol=near, equal_nan=True
                ), case.name
    assert right, "all cases are refused"


def one(path: Path, op: str, inputs: dict[str, list[int]], **attributes: Any) -> Path:
    """A file of one node; what its inputs are of, by name."""
    dims = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()}
    made = helper.make_node(op, [*inputs], ["y"], name="last", **attributes)
    graph = helper.make_graph(
        [made], "one", [*dims.values()], [helper.make_tensor_value_info("y", 1, [*"abcd"])]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]), path)
    return path


def test_an_attribute_that_no_function_reads_is_refused(tmp_path: Path) -> None:
    heads = dict.fromkeys("qkv", [2, 4, 6, 8])
    path = one(tmp_path / "net.onnx", "Attention", heads, softmax_precision=11)
    said = r"the node 'last' \(Attention\): the attribute softmax_precision=11 is not read"
    with pytest.raises(ModelError, match=said):
        autopipe.from_onnx(path)


def test_an_attribute_with_the_value_that_its_op_has_anyway_is_none(tmp_path: Path) -> None:
    heads = dict.fromkeys("qkv", [2, 4, 6, 8])
    path = one(tmp_path / "net.onnx", "Attention", heads, qk_matmul_output_mode=0, is_causal=1)
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in heads)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(autopipe.from_onnx(path)(q, k, v), wanted)


@pytest.mark.parametrize("training", [True, False])
def test_a_dropout_drops_where_the_file_says_so(tmp_path: Path, training: bool) -> None:
    """Bug: a file exported in training mode was trained without its dropout."""
    dims = {name: helper.make_tensor_value_info(name, 1, ["rows", 8]) for name in "xy"}
    held = {"ratio": np.array(0.25, np.float32), "training": np.array(training)}
    graph = helper.make_graph(
        [helper.make_node("Dropout", ["x", *held], ["y"])],
        "dropout",
        [dims["x"]],
        [dims["y"]],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset), tmp_path / "net.onnx")
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    torch.manual_seed(0)
    found = read(torch.ones(64, 8))
    kept = found[found != 0]
    assert (kept == (1 / 0.75 if training else 1)).all()
    assert (0.6 < kept.numel() / found.numel() < 0.9) == training
    traced = trace_model(read, lambda rows: torch.ones(rows, 8), lambda y, _: y.mean())
    assert ("dropout" in [node.short for node in traced.graph.nodes]) == training


class Parts(nn.Module):
    """Taken apart in parts of one size and of three, and put together in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).split(4, -1)
        d, e, f = self.up(x).split([2, 4, 6], -1)
        return torch.cat([c.tanh(), a * e, f, d, b], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_as_the_exporter_writes_a_split(tmp_path: Path, dtype: torch.dtype) -> None:
    """Bug: torch's exporter splits into sequences; weights in bf16 ended in numpy's TypeError."""
    own, x = Parts().to(dtype), torch.randn(3, 6, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(own, (x,), tmp_path / "net.onnx", verbose=False, optimize=False)
    ops = {step.op_type for step in onnx.load(tmp_path / "net.onnx").graph.node}
    assert ops >= {"SplitToSequence", "SequenceAt"}
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    assert {p.dtype for p in read.parameters()} == {dtype}
    near = 1e-6 if dtype == torch.float32 else 2e-2
    assert torch.allclose(read(x), own(x), rtol=near, atol=near)
    for model in (own, read):
        model(x).square().mean().backward()
    (mine,), (theirs,) = (
        [p.grad for p in model.parameters() if p.grad is not None and p.ndim == 2]
        for model in (read, own)
    )
    assert torch.allclose(mine, theirs if mine.shape == theirs.shape else theirs.t(), near, near)


def test_sequences_are_lists(tmp_path: Path) -> None:
    """Two rows of three, without the middle one, with the last one twice: 0, 2, 2."""
    graph = helper.make_graph(
        [
            helper.make_node("SplitToSequence", ["x"], ["all"], axis=1, keepdims=0),
            helper.make_node("SequenceErase", ["all", "one"], ["two"]),
            helper.make_node("SequenceAt", ["two", "last"], ["end"]),
            helper.make_node("SequenceInsert", ["two", "end"], ["three"]),
            helper.make_node("SequenceConstruct", ["end"], ["alone"]),
            helper.make_node("ConcatFromSequence", ["three"], ["y"], axis=1, new_axis=1),
            helper.make_node("ConcatFromSequence", ["alone"], ["z"], axis=0),
        ],
        "lists",
        [helper.make_tensor_value_info("x", 1, [2, 3])],
        [helper.make_tensor_value_info(*out) for out in (("y", 1, [*"ab"]), ("z", 1, [*"c"]))],
        [numpy_helper.from_array(np.array(n), name) for name, n in (("one", 1), ("last", -1))],
    )
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset), tmp_path / "net.onnx")
    found = autopipe.from_onnx(tmp_path / "net.onnx")(torch.arange(6.0).view(2, 3))
    assert found["y"].tolist() == [[0, 2, 2], [3, 5, 5]]
    assert found["z"].tolist() == [2, 5]


def test_a_quantized_file_is_for_inference(tmp_path: Path) -> None:
    """It rounds, and no gradient goes through that."""
    path = one(tmp_path / "net.onnx", "QuantizeLinear", {"x": [2, 4], "scale": []})
    with pytest.raises(ModelError, match="the file computes in integers") as refused:
        autopipe.from_onnx(path)
    assert refused.value.hint == "export the model before it is quantized"
