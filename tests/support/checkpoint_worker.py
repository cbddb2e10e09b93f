"""Checkpoints of a small GPT under every plan, each loaded under every other one.

    python checkpoint_worker.py FOLDER PRECISION          under 4 ranks: all plans but `one`

    FOLDER/pp4/             saved after two steps under pp4
    FOLDER/one-under-pp4/   loaded from `one` under pp4, and saved again at once
    FOLDER/losses.json      of the step after each of them, by the folder's name

`whole` reads a checkpoint without the package's own reader: with safetensors alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from autopipe import Pipe
from autopipe.runtime.launch.world import start, world_from
from tests.support.inprocess import close_together
from tests.support.long import LONG
from tests.support.pipes import drawn, once, piped, planned

MODEL = "gpt"
ROWS = 8
NEAR = {"on": close_together}  # with norms whose gradients tensor-parallel ranks have parts of

EVERY: dict[str, dict[str, Any]] = {
    "one": {"pp": 1, "dp": 1, "micro_batches": 4},
    "pp4": {"pp": 4, "dp": 1, "micro_batches": 4},
    "tp2 x pp2": {"pp": 2, "dp": 1, "tp": 2, "micro_batches": 4},
    "dp4": {"pp": 1, "dp": 4, "micro_batches": 1},
    "tp2 x dp2": {"pp": 1, "dp": 2, "tp": 2, "micro_batches": 2},
    "pp2 x dp2, zero 1": {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 2},
    "pp2 x dp2, zero 3": {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 2},
    "tp2 x dp2, zero 2": {"pp": 1, "dp": 2, "tp": 2, "zero": 2, "micro_batches": 2, **NEAR},
    "tp2 x dp2, zero 3": {"pp": 1, "dp": 2, "tp": 2, "zero": 3, "micro_batches": 2, **NEAR},
}


SAMPLE = ("one", "pp2 x dp2, zero 1", "tp2 x dp2, zero 3")

PLANS = {name: EVERY[name] for name in (EVERY if LONG else SAMPLE)}


def made(name: str, precision: str, **options: Any) -> Pipe:
    """The model as planned."""
    return piped(MODEL, planned(MODEL, **PLANS[name], precision=precision), **options)


def adamw(pipe: Pipe) -> torch.optim.Optimizer:
    """Two groups with different options, as most training scripts have."""
    flat = [p for _, p in pipe.named_parameters() if p.ndim < 2]
    others = [p for p in pipe.parameters() if p.ndim >= 2 or not p.numel()]
    groups = [{"params": others}, {"params": flat, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=3e-3)


def step(pipe: Pipe, number: int, optimizer: torch.optim.Optimizer | None = None) -> float:
    loss = pipe.step(drawn(MODEL, ROWS, number))
    if optimizer is not None:
        optimizer.step()
    return float(loss)


def saved(pipe: Pipe, folder: Path) -> float:
    """Two steps from the beginning, saved; the loss of the third."""
    optimizer = adamw(pipe)
    for number in range(2):
        step(pipe, number, optimizer)
    pipe.save(folder, optimizer)
    return step(pipe, 2)


def loaded(pipe: Pipe, source: Path, folder: Path) -> float:
    """A checkpoint loaded and saved again; the loss of the step after it."""
    optimizer = adamw(pipe)
    assert pipe.load(source, optimizer) == 2
    pipe.save(folder, optimizer)
    return step(pipe, 2)


def reloaded(folder: Path, pipes: dict[str, Pipe]) -> dict[str, float]:
    found = {}
    for target, pipe in pipes.items():
        for source in PLANS:
            name = f"{source} under {target}"
            found[name] = loaded(pipe, folder / source, folder / name)
    return found


def whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, put together from the files of its ranks."""
    (checkpoint,) = folder.iterdir()
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("rank-*.json")):
        with safe_open(path.with_suffix(".safetensors"), framework="pt") as file:
            for chunk in json.loads(path.read_text())["chunks"]["chunks"]:
                key = f"{chunk['name']}/{chunk['state']}"
                own = file.get_tensor(key.removesuffix("/"))
                assert list(own.shape) == chunk["own"]
                if chunk["kind"] == "number":
                    found[key] = own
                    continue
                shape = chunk["shape"] or [1]
                target = found.setdefault(key, torch.zeros(shape, dtype=own.dtype))
                count = filled.setdefault(key, torch.zeros(shape, dtype=torch.int64))
                for piece in chunk["pieces"]:
                    there = box(piece["whole"], piece["shape"])
                    target[there] = own[box(piece["own"], piece["shape"])]
                    count[there] += 1
    for key, count in filled.items():
        assert bool((count == 1).all()), f"{key}: an element is there twice, or not at all"
    return found


def box(begins: list[int], shape: list[int]) -> tuple[slice, ...]:
    return tuple(slice(b, b + n) for b, n in zip(begins, shape, strict=True))


def main(folder: Path, precision: str) -> None:
    world = world_from(os.environ)
    assert world is not None
    torch.set_num_threads(1)
    with start(world), once():
        pipes = {name: made(name, precision) for name in PLANS if name != "one"}
        losses = {name: saved(pipe, folder / name) for name, pipe in pipes.items()}
        losses |= reloaded(folder, pipes)
        if world.rank == 0:
            (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
