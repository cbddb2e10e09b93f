"""One process of a run: what `autopipe run` does with a plan, and its measurements as files.

python -m benchmarks.honesty.rank MODEL PLAN STEPS FOLDER       seconds
python -m benchmarks.honesty.rank MODEL PLAN 0 FOLDER           bytes: profiled, so not in one go
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

import autopipe
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.runtime.train import train
from autopipe.util import codec
from benchmarks.honesty import allocator
from benchmarks.honesty.models import MODELS
from benchmarks.honesty.quiet import Waiting


def main(model: str, path: str, steps: str, folder: str) -> None:
    """Measure; every rank leaves files of its own in `folder`."""
    file, plan = MODELS[model](), Plan.load(path)
    if steps == "0":
        held(file, plan, folder)
    else:
        timed(file, plan, int(steps), folder)


def timed(file: ModelFile, plan: Plan, steps: int, folder: str) -> None:
    """Train; every rank leaves its share of waiting, and rank 0 a `Measured`."""
    pipe = autopipe.parallelize(file.model, plan, loss=file.loss)
    waiting = Waiting()
    measured = train(pipe, file, steps, lambda line: None)
    Path(folder, f"{pipe.place.rank}.waited").write_text(str(waiting.share()))
    if pipe.place.rank == 0:
        codec.save(measured, Path(folder, "measured.json"))


def held(file: ModelFile, plan: Plan, folder: str) -> None:
    """Two steps; every rank leaves the peak of its allocator in the second, in bytes."""
    pipe = autopipe.parallelize(file.model, plan, loss=file.loss)
    states = [*pipe.parameters(), *(buffer for _, buffer in pipe.named_buffers())]
    before = allocator.held(states)
    optimizer = torch.optim.AdamW(pipe.parameters())
    torch.manual_seed(0)
    batch = file.inputs(plan.batch.rows)

    def first() -> Callable[[], object]:
        pipe.step(batch)
        optimizer.step()
        return lambda: pipe.step(batch)

    with tempfile.TemporaryDirectory() as own:
        found = before + allocator.peak(first, Path(own))
    Path(folder, f"{pipe.place.rank}.bytes").write_text(str(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
