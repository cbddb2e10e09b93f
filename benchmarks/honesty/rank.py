"""One process of a run: what `autopipe run` does with a plan, and its measurement as a file.

python -m benchmarks.honesty.rank MODEL PLAN STEPS OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import autopipe
from autopipe import codec
from autopipe.plan import Plan
from autopipe.runtime.train import train
from benchmarks.honesty.models import MODELS


def main(model: str, plan: str, steps: str, output: str) -> None:
    """Train, and on rank 0 leave a `Measured` in `output`."""
    file = MODELS[model]()
    pipe = autopipe.parallelize(file.model, Plan.load(plan), loss=file.loss)
    measured = train(pipe, file, int(steps), 0, lambda line: None)
    if pipe.place.rank == 0:
        codec.save(measured, Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])
