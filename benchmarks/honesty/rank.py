"""One process of a run: what `autopipe run` does with a plan, and its measurement as a file.

python -m benchmarks.honesty.rank MODEL PLAN STEPS FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import autopipe
from autopipe import codec
from autopipe.plan import Plan
from autopipe.runtime.train import train
from benchmarks.honesty.models import MODELS
from benchmarks.honesty.quiet import Waiting


def main(model: str, plan: str, steps: str, folder: str) -> None:
    """Train; every rank leaves its share of waiting in `folder`, and rank 0 a `Measured`."""
    file = MODELS[model]()
    pipe = autopipe.parallelize(file.model, Plan.load(plan), loss=file.loss)
    waiting = Waiting()
    measured = train(pipe, file, int(steps), 0, lambda line: None)
    Path(folder, f"{pipe.place.rank}.waited").write_text(str(waiting.share()))
    if pipe.place.rank == 0:
        codec.save(measured, Path(folder, "measured.json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
