"""Make one rank's two steps of the split model, and write the rank's own tensors to a file."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopipe.checking import subject
from autopipe.checking.shrink import shrunk
from autopipe.frontend import model_file
from autopipe.runtime.parallelize import parallelize
from autopipe.runtime.step.compile import compiled_by
from autopipe.runtime.step.pipe import Pipe
from autopipe.runtime.train import optimizer_for

CLIP = 0.5
"""Gradients are clipped to this share of their norm, so that clipping does something."""


@dataclass
class RankStep:
    """A rank's values of one step.

    Attributes:
        loss: the loss of the whole batch.
        gradients: gradients of the parameters that its optimizer updates, by name, unclipped.
        norm: the norm of all gradients of the model, unclipped.
        parameters: the parameters that its optimizer updates, after the step.
        buffers: its buffers, after the step.
        scale: the loss scale in backward, under fp16; otherwise 1.
    """

    loss: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: Tensor | None = None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 1.0


def run_rank(folder: Path) -> None:
    """Make the two steps as this rank of the plan in `folder`; every rank calls it.

    Raises:
        AutopipeError: as `parallelize`, or as `Pipe.step`.
    """
    job, plan, batches = subject.read(folder)
    torch.set_num_threads(1)  # sums keep their order
    file = shrunk(model_file.load(job.source), job.smaller)
    random.seed(subject.SEED)
    torch.manual_seed(subject.SEED)
    with compiled_by(job.backend):
        pipe = parallelize(
            file.model, plan, inputs=file.example_for(plan), loss=file.loss, seed=subject.SEED
        )
        optimizer = optimizer_for(pipe, file)
        found = [_step(pipe, optimizer, batch) for batch in batches]
    torch.save(found, folder / f"rank{pipe.place.rank}.pt")


def _step(pipe: Pipe, optimizer: torch.optim.Optimizer, batch: Any) -> RankStep:
    scale = pipe.loss_scale.scale if pipe.loss_scale is not None else 1.0
    found = RankStep(pipe.step(batch), scale=scale)
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            found.gradients[name] = _kept(parameter.grad)
    norm = pipe.clip_grad_norm_(torch.inf)  # scales nothing
    found.norm = pipe.clip_grad_norm_(CLIP * float(norm))
    optimizer.step()
    found.parameters = {name: _kept(p) for name, p in pipe.named_parameters()}
    found.buffers = {name: _kept(buffer) for name, buffer in pipe.named_buffers()}
    return found


def _kept(tensor: Tensor) -> Tensor:
    """A copy of a tensor on the CPU; for a DTensor, of this rank's rows."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True)


def read(folder: Path, ranks: int) -> list[list[RankStep]]:
    """The steps that all ranks have written: by rank, then by step."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]
