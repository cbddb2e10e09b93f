"""Reads the weights to start a run from out of another run's checkpoint, and nothing else of it.

checkpoints/                       the newest one in it
checkpoints/step-00000020/         this one
anything else                      as `parameters.weights` reads it
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from autopipe.ir.graph import Graph
from autopipe.runtime.checkpoint.checkpoints import from_first
from autopipe.runtime.checkpoint.folder import candidates
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.whole import tensors, whole
from autopipe.runtime.parameters import weights
from autopipe.util.progress import Say


def chosen(path: str | Path, rank: int, world: dist.ProcessGroup | None) -> Path:
    """The weights that a path stands for, the same on every rank; every rank calls it.

    In a folder of checkpoints it is the newest. Only rank 0 looks, as a run may still save there.
    """
    return from_first(lambda: next(iter(candidates(Path(path))), Path(path)), rank, world)


def read(
    path: Path,
    graph: Graph,
    names: Sequence[str],
    optional: Collection[str] = (),
    say: Say | None = None,
) -> dict[str, Tensor]:
    """Read the tensors of `names`; arguments and result are those of `parameters.weights.read`.

    A parameter that had an fp32 master gets the master, rounded to the dtype of the graph.

    Raises:
        DamagedError: the checkpoint's files have changed since they were written.
        ModelError: as `parameters.weights.read`.
    """
    checkpoints = candidates(path)
    if not checkpoints:
        return weights.read(path, graph, names, optional, say)
    stored = Stored.open(checkpoints[0])
    model = {
        name: tensor
        for tensor in tensors(stored)
        if not tensor.state
        for name in (tensor.name, *tensor.aliases)
    }
    keys = {name: weights.stored_as(graph, name, model) for name in names}
    stored_tensors = {name: model[key] for name, key in keys.items() if key is not None}
    shapes = {name: tensor.shape for name, tensor in stored_tensors.items()}
    weights.check_shapes(stored.folder, graph, names, shapes, optional)
    strangers = weights.strangers_in(weights.every_name(graph), model)
    weights.say_names(stored.folder, (), strangers, say)
    return {
        name: whole(stored, tensor).to(graph.states[name].held.dtype)
        for name, tensor in stored_tensors.items()
    }
