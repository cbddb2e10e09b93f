"""What of a file is trained, and said: parameters that an exporter merges stay apart.

Exporters write equal tensors once. In a model that was never trained all norms are ones, biases are
zeros, and the layers of an nn.TransformerEncoder are copies: as one parameter they would get the
sum of all their gradients.
"""

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

import autopipe
from autopipe.frontend.user_module import facts_of
from autopipe.onnx_files.module import OnnxModule


class Untrained(nn.Module):
    """A shared embedding, a layer that runs thrice, two equal blocks, norms, and a buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)
        self.same = nn.ModuleList([self.layer] * 3)
        block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])
        self.norm, self.spread = nn.BatchNorm1d(5), nn.Linear(8, 8)
        nn.init.zeros_(self.spread.bias)
        self.register_buffer("offset", torch.randn(8))

    def forward(self, words: Tensor) -> Tensor:
        x: Tensor = self.embedding(words) + 2 * self.offset
        for layer in (*self.same, *self.blocks):
            x = layer(x).relu()
        x = self.norm(x).mean(1)
        return self.spread(x) @ self.embedding.weight.T


def exported(path: Path, **how: Any) -> Untrained:
    """The model, written by torch's exporter with weights as they were made."""
    torch.manual_seed(0)
    own, words = Untrained().eval(), torch.zeros(3, 5, dtype=torch.int64)
    if how.get("dynamo", True):
        how["dynamic_shapes"] = ({0: torch.export.Dim("rows")},)
    else:
        how |= {"input_names": ["words"], "dynamic_axes": {"words": {0: "rows"}}}
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(own, (words,), str(path), verbose=False, **how)
    logging.disable(logging.NOTSET)
    return own


def gradients(model: nn.Module) -> list[float]:
    """The norms of all gradients of a loss, in order."""
    words = torch.tensor([[0, 3, 11, 2, 2], [5, 5, 1, 7, 0], [1, 2, 3, 4, 5]])
    model(words).square().mean().backward()
    return sorted(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Untrained, Path]:
    """The model, and its file by torch's exporter, which takes seconds."""
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    return exported(path), path


def test_each_parameter_has_a_gradient_of_its_own(written: tuple[Untrained, Path]) -> None:
    """The file says what each op read: as many parameters as the model had, with its gradients."""
    check_gradients(*written)


@pytest.mark.long
def test_a_file_that_is_not_optimized(tmp_path: Path) -> None:
    check_gradients(exported(tmp_path / "net.onnx", optimize=False), tmp_path / "net.onnx")


def check_gradients(own: Untrained, path: Path) -> None:
    read = autopipe.from_onnx(path)
    assert gradients(read) == pytest.approx(gradients(own), rel=1e-4, abs=1e-6)
    # Twice the offset, which the exporter has computed, is no parameter.
    assert len({"offset", "mul_2"} & {name for name, _ in read.named_buffers()}) == 1


def test_what_is_trained_is_said(written: tuple[Untrained, Path]) -> None:
    said = facts_of(nn.Sequential(autopipe.from_onnx(written[1])))
    assert all(line.startswith("net.onnx: ") for line in said)
    assert any("parameters of their own again" in line for line in said)
    changes, *rest = said
    assert "training changes 31 tensors" in changes and "; not " in changes


def test_an_older_exporter_tells_names_alone(tmp_path: Path) -> None:
    """Its norms are apart, by their names. Equal matrices stay one: they may be tied."""
    own = exported(tmp_path / "net.onnx", dynamo=False)
    read = autopipe.from_onnx(tmp_path / "net.onnx")
    assert isinstance(read, OnnxModule)
    assert torch.allclose(
        read(torch.ones(2, 5, dtype=torch.int64)),
        own(torch.ones(2, 5, dtype=torch.int64)),
        atol=1e-5,
    )
    names = {name for name, _ in read.named_parameters()}
    assert {"blocks.0.norm1.weight", "blocks.1.norm2.weight", "norm.weight"} <= names
    said = " ".join(read.facts())
    assert "does not say which of them were buffers" in said
    assert "equal weights of an untrained model look so, too" in said
    read.requires_grad_(False)
    assert read.facts()[0].startswith("net.onnx: training changes 0 tensors")


class Normed(nn.Module):
    """A weight of a size and a direction, and one behind a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.second = nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x).tanh(), self.second.weight * self.mask)


def test_what_the_exporter_has_computed_is_said(tmp_path: Path) -> None:
    """The file has products alone: training them is training another model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = ({0: torch.export.Dim("rows")},)
        path, given = tmp_path / "net.onnx", (torch.zeros(2, 6),)
        torch.onnx.export(Normed(), given, path, dynamic_shapes=rows, verbose=False)
    (said,) = (line for line in facts_of(autopipe.from_onnx(path)) if "(of" in line)
    assert "computed by the exporter, and trained as they are: " in said
    assert "second.weight and mask)" in said or "mask and second.weight)" in said
    assert "parametrizations.weight.original" in said


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_file_need_not_say_the_shape_of_its_output(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX's checker wants one; it is inferred.

    Bug: with the weights in it, of which protobuf takes no more than 2 GB.
    """
    infer = onnx.shape_inference.infer_shapes

    def of_little(model: onnx.ModelProto) -> onnx.ModelProto:
        assert model.ByteSize() < 200 or not elsewhere
        return infer(model)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", of_little)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "plain",
        [helper.make_tensor_value_info("x", 1, ["rows", 4])],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.ones((4, 300), np.float32), "w")],
    )
    opset, path = [helper.make_opsetid("", 20)], tmp_path / "net.onnx"
    model = helper.make_model(graph, opset_imports=opset)
    onnx.save(model, path, save_as_external_data=elsewhere, location="net.weights")
    assert (tmp_path / "net.weights").exists() == elsewhere
    read = autopipe.from_onnx(path)
    assert torch.equal(read(torch.ones(2, 4)), torch.full((2, 300), 4.0))
