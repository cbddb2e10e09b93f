"""A file of the model, as the safetensors package reads it."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from autopipe.planfile.parts import Place
from autopipe.runtime.parameters.export import DTYPES, FileTensor, export


def test_every_dtype_is_read_back(tmp_path: Path) -> None:
    """Bug: unsigned integers were said to be none of the format's."""
    made = {str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in DTYPES}
    kept = [FileTensor((name,), (2, 2), tensor.dtype) for name, tensor in made.items()]
    path = tmp_path / "model.safetensors"
    export(path, kept, made.__getitem__, Place(0, 0, 0, 0, 0, 0, "cpu"), None)
    found = load_file(path)
    assert found.keys() == made.keys()
    for name, tensor in made.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].tolist() == [[0, 1], [1, 0]]
