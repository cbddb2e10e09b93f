"""A model whose parts come in the order of a set of strings, which each process hashes anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        scales = {}
        for number, kind in enumerate({"full", "sliding", "linear", "chunked", "global"}):
            scales[kind] = torch.full((8,), float(len(kind))) * x.abs()
        for layer in self.layers:
            x = torch.tanh(layer(x)) * scales["full"] + scales["sliding"]
        return x.square().mean()


def model():
    return Net()


def inputs(rows):
    return {"x": torch.randn(rows, 8)}
"""


HASHES = """
import autopipe.cli
from autopipe.__main__ import main

autopipe.cli.main = lambda: print(hash("full"), flush=True)
main()
"""


def environ() -> dict[str, str]:
    """As users have it: each process hashes by a seed of its own."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}


def test_each_process_hashes_alike() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", HASHES], env=environ(), check=True, capture_output=True
        ).stdout
        for _ in range(2)
    ]
    assert said[0] == said[1] != b""


@pytest.mark.long
def test_each_process_goes_through_a_set_in_the_same_order(tmp_path: Path) -> None:
    """Bug: a rank of Gemma 3 or ModernBERT said, every second time, that its plan was made for
    another model: transformers makes their rotary positions in the order of such a set."""
    (tmp_path / "model.py").write_text(MODEL)
    found = set()
    for number in range(3):
        plan = tmp_path / f"{number}.json"
        asked = [
            "plan",
            "model.py",
            "--cluster",
            "2xA100-40GB",
            "--precision",
            "fp32",
            "-o",
            str(plan),
        ]
        subprocess.run(
            [sys.executable, "-m", "autopipe", *asked],
            cwd=tmp_path,
            env=environ(),
            check=True,
            capture_output=True,
        )
        found.add(json.loads(plan.read_text())["fingerprint"])
    assert len(found) == 1
