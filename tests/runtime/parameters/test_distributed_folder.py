"""Folders of torch.distributed.checkpoint: read by the model's own names, and never executed."""

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from autopipe.errors import ModelError
from autopipe.ir.graph import Graph, StateSpec, TensorSpec
from autopipe.runtime.parameters.weights import read

STORED = {"up.weight": torch.arange(6.0).view(2, 3), "up.gain": torch.tensor(7.0)}
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


@pytest.fixture(autouse=True)
def _alone() -> Any:
    """torch warns of a save by one process."""
    with pytest.warns(UserWarning):
        yield


def saved(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def found(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    said: list[str] = []
    return read(folder, GRAPH, list(STORED), (), said.append), said


@pytest.mark.parametrize(
    ("state", "prefix"),
    [
        ({**STORED, "step": 3}, ""),
        ({"model": STORED, "optim": {"up.weight": torch.zeros(2, 3)}}, "model."),
        ({"app": {"model": STORED}}, "app.model."),
        ({"state_dict": {f"model.{name}": t for name, t in STORED.items()}}, "state_dict.model."),
        ({name: tensor.double() for name, tensor in STORED.items()}, ""),
    ],
)
def test_where_people_put_a_model(state: dict[str, Any], prefix: str, tmp_path: Path) -> None:
    """In the dtype of the model; what is left out of the names is told."""
    tensors, said = found(saved(tmp_path, state))
    for name, tensor in STORED.items():
        assert tensors[name].dtype == torch.float32 and torch.equal(tensors[name], tensor)
    told = [f"{tmp_path}: its names begin with {prefix!r}, which is left out"]
    assert said == (told if prefix else [])


class Malicious:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_nothing_in_it_is_executed(tmp_path: Path) -> None:
    """By torch's own reader it is: this is what keeps from using that."""
    folder, mark = saved(tmp_path / "folder", STORED), tmp_path / "executed"
    (folder / ".metadata").write_bytes(pickle.dumps(Malicious(mark)))
    with pytest.raises(ModelError, match=r"UnpicklingError: it asks for (posix|nt)\.system"):
        found(folder)
    assert not mark.exists()


def test_a_file_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path / "folder", STORED)
    shutil.copy(folder / "__0_0.distcp", tmp_path / "other.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelError, match=r"ValueError: it names the file '\.\./other\.distcp'"):
        found(folder)


def test_a_tensor_of_which_a_part_is_missing(tmp_path: Path) -> None:
    """torch would leave the rest as memory had it."""
    folder = saved(tmp_path, STORED)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (chunk,) = metadata.state_dict_metadata["up.weight"].chunks
    chunk.sizes = torch.Size((1, 3))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelError, match=r"'up\.weight' lacks 3 of 6 elements"):
        found(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_bytes_that_were_changed(name: str, tmp_path: Path) -> None:
    """A sentence, or tensors: no other error, whatever the bytes make of the metadata."""
    folder, draw = saved(tmp_path, STORED), random.Random(7)
    whole, refusals = (folder / name).read_bytes(), 0
    for _ in range(300):
        changed = bytearray(whole)
        for _ in range(draw.choice((1, 2, 8))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        (folder / name).write_bytes(changed)
        try:
            found(folder)
        except ModelError:
            refusals += 1
    assert refusals > 100


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("size", [0, 30, 700])
def test_a_file_that_is_cut_short(name: str, size: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, STORED)
    with (folder / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(ModelError, match="or not a whole one") as refused:
        found(folder)
    assert "\n" not in refused.value.message


def test_names_that_the_model_has_not(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"blocks.up.kernel": STORED["up.weight"], "up.gain": torch.ones(())})
    with pytest.raises(ModelError) as refused:
        found(folder)
    assert str(refused.value) == (
        f"{folder}: holds no 'up.weight', which the model has as [2, 3]\n"
        "hint: of its 2 names the nearest is 'up.gain'"
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Bug: codes were taken for the weights, without their scales."""
    folder = saved(tmp_path, {**STORED, "up.weight": STORED["up.weight"].to(dtype)})
    with pytest.raises(ModelError, match=r"'up\.weight' is stored in .*int8|float8.*quantized"):
        found(folder)
