"""Weights as people have saved them, each file or folder read by the model's own names.

Safetensors by stage and tied names are in `test_materialize`, folders of
torch.distributed.checkpoint in `test_distributed_folder`.
"""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.graph import Graph, StateSpec, TensorSpec
from autopipe.runtime.parameters.weights import KINDS, read

STORED = {"up.weight": torch.arange(6.0).view(2, 3), "up.bias": torch.tensor([7.0, 8.0])}
GRAPH = Graph(
    {},
    {
        name: StateSpec(TensorSpec(tuple(tensor.shape), torch.float32), "parameter", True)
        for name, tensor in STORED.items()
    },
    (),
    (),
    {},
)


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in STORED.items()}


def found(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    return read(path, GRAPH, list(STORED), (), said.append), said


@pytest.mark.parametrize(
    ("saved", "prefix"),
    [
        (STORED, None),
        ({"state_dict": STORED, "epoch": 3}, None),
        ({"model": STORED, "optimizer": {"state": {}}}, None),
        ({"model_state_dict": prefixed("module."), "step": 7}, "module."),
        (prefixed("_orig_mod."), "_orig_mod."),
        ({"state_dict": prefixed("model.")}, "model."),
        ({name: tensor.half() for name, tensor in STORED.items()}, None),
    ],
)
@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_save_has_written(
    saved: Any, prefix: str | None, zipped: bool, tmp_path: Path
) -> None:
    """In the dtype of the model, as `load_state_dict` does."""
    path = tmp_path / "model.pt"
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    tensors, said = found(path)
    path.unlink()
    assert tensors.keys() == STORED.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, STORED[name])
    words = f"{path}: its names begin with {prefix!r}, which is left out"
    assert said == ([] if prefix is None else [words])


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("named", [True, False])
def test_a_folder_with_an_index(suffix: str, named: bool, tmp_path: Path) -> None:
    """What its index does not name is of no interest: here, older weights."""
    save: Callable[[Any, Path], object] = torch.save if suffix == "bin" else save_file
    stem = "pytorch_model" if suffix == "bin" else "model"
    files = {"up.weight": f"{stem}-1.{suffix}", "up.bias": f"{stem}-2.{suffix}"}
    for name, file in files.items():
        save({name: STORED[name]}, tmp_path / file)
    save({name: tensor * 0 for name, tensor in STORED.items()}, tmp_path / f"{stem}-old.{suffix}")
    index = tmp_path / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    tensors, _ = found(index if named else tmp_path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in STORED.items())
    (tmp_path / files["up.bias"]).unlink()
    with pytest.raises(ModelError) as refused:
        found(tmp_path)
    assert str(refused.value) == (
        f"{index}: it names {files['up.bias']!r}, and there is no such file next to it\n"
        "hint: was the folder copied whole?"
    )


class Whole(nn.Module):
    """A model that is pickled whole."""


def test_a_file_of_a_folder_with_tensors_of_other_ranks_alone(tmp_path: Path) -> None:
    """Bug: it was said that the model has no 'module.up.bias'."""
    for name, tensor in prefixed("module.").items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    said: list[str] = []
    read(tmp_path, GRAPH, ["up.weight"], (), said.append)
    assert said == [f"{tmp_path}: its names begin with 'module.', which is left out"]


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "no weights")


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (lambda path: None, "weights {path!r}: there is no such file or folder\nhint: {kinds}"),
        (
            lambda path: path.write_text("half a page of text, and no weights"),
            "weights {path!r} is no file of weights: it does not begin as one\nhint: {kinds}",
        ),
        (
            zipped,
            "weights {path!r} is no file of torch.save, or not a whole one\nhint: {kinds}",
        ),
        (
            lambda path: torch.save(Whole(), path),
            "weights {path!r} holds more than tensors, a whole model perhaps\n"
            "hint: torch.save(model.state_dict(), 'model.pt') saves its weights alone",
        ),
        (
            lambda path: torch.save({"epoch": 3}, path),
            "weights {path!r} has no tensors by name, but the keys ['epoch']\n"
            "hint: a state_dict, alone or under one of state_dict, model, model_state_dict, "
            "module, weights",
        ),
        (
            lambda path: torch.save({"up.weight": STORED["up.weight"]}, path),
            "{path}: holds no 'up.bias', which the model has as [2]\n"
            "hint: of its 1 names the nearest is 'up.weight'",
        ),
    ],
)
def test_a_file_that_is_none(
    write: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    write(path)
    with pytest.raises(ModelError) as refused:
        found(path)
    assert str(refused.value) == (
        sentence.replace("{path!r}", repr(str(path)))
        .replace("{path}", str(path))
        .replace("{kinds}", f"weights are {KINDS}")
    )


# --- What a file says of itself, and no name or shape shows


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bug: a run began with the codes as if they were the weights, without their scales."""
    scales = {"up.weight_scale_inv": torch.ones(1)}
    save_file({**STORED, **scales, "up.weight": STORED["up.weight"].to(dtype)}, tmp_path / "q.st")
    with pytest.raises(ModelError, match=r"'up.weight' is stored in .*int8|float8.*quantized"):
        found(tmp_path / "q.st")


def test_a_complex_tensor_is_no_real_one(tmp_path: Path) -> None:
    torch.save({**STORED, "up.bias": STORED["up.bias"] * 1j}, tmp_path / "m.pt")
    with pytest.raises(ModelError, match="'up.bias' is stored in complex64, in the model float32"):
        found(tmp_path / "m.pt")


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    """Bug: it did not begin as a file of weights, it was said."""
    save_file(STORED, tmp_path / "m.safetensors")
    os.truncate(tmp_path / "m.safetensors", (tmp_path / "m.safetensors").stat().st_size - 1)
    with pytest.raises(ModelError, match="not as long as it says\nhint: was it copied"):
        found(tmp_path)


def test_files_that_have_one_tensor_twice(tmp_path: Path) -> None:
    """Bug: the file whose name came last was taken, a copy of before. transformers reads
    model.safetensors alone, so that is read beside a config.json."""
    save_file(STORED, tmp_path / "model.safetensors")
    save_file(STORED, tmp_path / "model_again.safetensors")
    assert torch.equal(found(tmp_path)[0]["up.bias"], STORED["up.bias"]), "the same values"
    save_file({n: t + 1 for n, t in STORED.items()}, tmp_path / "model_old.safetensors")
    with pytest.raises(ModelError, match=r"both have 'up\.\w+', with other values\nhint: name one"):
        found(tmp_path)
    (tmp_path / "config.json").touch()
    assert torch.equal(found(tmp_path)[0]["up.bias"], STORED["up.bias"])


def test_a_tied_tensor_that_is_stored_as_two(tmp_path: Path) -> None:
    """Bug: the first of its names was taken. transformers unties them then, with a warning."""
    tied = Graph(
        {},
        {"up": StateSpec(TensorSpec((2,), torch.float32), "parameter", True, ("head",))},
        (),
        (),
        {},
    )
    save_file({"up": torch.ones(2), "head": torch.ones(2)}, tmp_path / "m.safetensors")
    assert read(tmp_path, tied, ["up"])["up"].tolist() == [1, 1]
    save_file({"up": torch.ones(2), "head": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ModelError, match="'up' and 'head' have other values, and are one tensor"):
        read(tmp_path, tied, ["up"])


def test_tensors_that_the_model_has_not_are_said(tmp_path: Path) -> None:
    """Bug: a configuration of fewer layers than the file has was taken without a word."""
    save_file({**STORED, "down.weight": torch.ones(1)}, tmp_path / "m.safetensors")
    assert found(tmp_path)[1] == [f"{tmp_path}: the model has no 'down.weight': not read"]
