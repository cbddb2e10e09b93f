"""Stages as ONNX files: run in a chain by onnxruntime they give what the model gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

import autopipe as package
from autopipe.batch.arguments import forward_arguments
from autopipe.batch.tree import flatten
from autopipe.errors import AutopipeError
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.runtime.onnx_stages import write_stages
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.zoo import ZOO

EXPORTED = ["frozen", "unet", "gpt", "llama", "gpt2", "t5", "resnet", "mask", "dict"]
"""Of the zoo, what torch's exporter takes."""


def planned(name: str, **constraints: Any) -> tuple[ModelFile, Plan]:
    case = ZOO[name]
    plan = package.plan(
        case.model, case.inputs, loss=case.loss, cluster=machine(2), batch_size=8, **constraints
    )
    file = ModelFile(name, case.model, case.inputs, case.loss, None, None, None, None)
    return file, plan


def chained(folder: Path, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """All stages, one after another, each with its inputs by name."""
    known = dict(inputs)
    for stage in json.loads((folder / "chain.json").read_text())["stages"]:
        session = onnxruntime.InferenceSession(folder / stage["file"])
        known |= zip(
            stage["gives"],
            session.run(stage["gives"], {name: known[name] for name in stage["takes"]}),
            strict=True,
        )
    return known


def tensors(outputs: Any) -> dict[str, torch.Tensor]:
    """A model's outputs by the paths that the files give them."""
    if isinstance(outputs, torch.Tensor):
        return {path: outputs for path in flatten(outputs)}
    return {name: x for name, x in dict(outputs).items() if isinstance(x, torch.Tensor)}


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("name", chosen(EXPORTED, now=["frozen"]))
def test_a_chain_gives_what_the_model_gives(
    tmp_path: Path, name: str, degrees: dict[str, int]
) -> None:
    file, plan = planned(name, micro_batches=1, **degrees)
    write_stages(file, plan, tmp_path / "out", rows=3)
    batch = file.inputs(3)
    model = file.model().eval()
    args, kwargs = forward_arguments(model, batch, file.loss)
    own = tensors(model(*args, **kwargs))
    leaves = {path: leaf.numpy() for path, leaf in flatten(batch).items()}
    made = chained(tmp_path / "out", leaves)
    names = {path: f"output.{path}" if path in leaves else path for path in own}
    compared = [path for path in own if names[path] in made]
    assert compared
    for path in compared:
        assert np.allclose(made[names[path]], own[path].detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    file, plan = planned("frozen", pp=2)
    with pytest.raises(AutopipeError, match="is there already"):
        write_stages(file, plan, tmp_path, rows=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_weights_are_the_files(tmp_path: Path) -> None:
    """Without `weights` the model is built as it builds itself, by the seed."""
    file, plan = planned("frozen", pp=2)
    torch.manual_seed(9)
    write_stages(file, plan, tmp_path / "a", rows=2)
    write_stages(file, plan, tmp_path / "b", rows=2)
    names = [path.name for path in sorted((tmp_path / "a").iterdir())]
    assert names[0] == "chain.json" and len(names) >= 3
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
