"""The subject of a check, as a folder: the plan, the model file, its reductions, two batches.

FOLDER/plan.json      the plan that ranks run
FOLDER/subject.json   `CheckJob`
FOLDER/batches.pt     a batch for each step; drawn once, as `inputs` need not be seeded
FOLDER/rank0.pt ...   what each rank has found (`checking.split`)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopipe.batch.tree import flatten, of_specs, rebuild
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.tracing.symbolic_sequence import shorter
from autopipe.util import codec
from autopipe.util.seeding import seed as derive_seed

STEPS = 2
"""The second one begins with what the first one's optimizer has left."""

SEED = 0
"""Of the weights and of all random numbers of a check."""


@dataclass(frozen=True)
class Smaller:
    """How a model is made smaller than its model file says.

    Attributes:
        layers: members kept of each row of equal layers; 0: all.
        width: the divisor of the widths in a configuration of transformers.
        length: tokens kept of each row; 0: all.
        calm: whether dropout is off.
        double: whether floats in parameters, buffers and batches are of fp64.
    """

    layers: int = 0
    width: int = 1
    length: int = 0
    calm: bool = False
    double: bool = False


@dataclass(frozen=True)
class CheckJob:
    """The model file of a check, and how its model is made smaller.

    Attributes:
        backend: the backend of torch.compile for compiled stages.
    """

    source: str
    smaller: Smaller
    backend: str


def write(folder: Path, subject: CheckJob, plan: Plan, file: ModelFile) -> None:
    """Write all that ranks read: two batches, and one for each shorter length of the plan.

    Args:
        file: the model file, made smaller.
    """
    codec.save(subject, folder / "subject.json")
    plan.save(folder / "plan.json")
    batches = []
    for step, length in enumerate([0] * STEPS + [*plan.lengths[:-1]]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(SEED, "inputs", step))
            batch = file.inputs(plan.batch.rows)
            batch = shorter(batch, plan.inputs, length) if length else batch
            batches.append(flatten(batch))  # its classes may be of the model file
    torch.save(batches, folder / "batches.pt")


def read(folder: Path, file: ModelFile | None = None) -> tuple[CheckJob, Plan, list[Any]]:
    """The subject, the plan and a batch for each step, in the containers of the file's `inputs`;
    without a file in plain ones."""
    subject = codec.load(CheckJob, folder / "subject.json", root="subject")
    plan = Plan.load(folder / "plan.json")
    leaves = torch.load(folder / "batches.pt", weights_only=False)
    make = file.example_for(plan) if file is not None else None
    if make is None:
        return subject, plan, [of_specs(plan.inputs, tensors) for tensors in leaves]
    with torch.random.fork_rng(devices=[]):
        example = make(plan.batch.rows)
    return subject, plan, [rebuild(example, tensors) for tensors in leaves]
