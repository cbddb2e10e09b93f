"""The model of a run's checkpoint as weights to start from; the rest of the run is left out.

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
    """The weights at a path, the same on every rank: of a run's checkpoints the newest.

    A run that is still writing there may save another one meanwhile; so rank 0 looks.
    """
    return from_first(lambda: next(iter(candidates(Path(path))), Path(path)), rank, world)


def read(
    path: Path,
    graph: Graph,
    names: Sequence[str],
    optional: Collection[str] = (),
    say: Say | None = None,
) -> dict[str, Tensor]:
    """The tensors of `names`, as `parameters.weights.read` gives them, which takes the arguments.

    Of a parameter with an fp32 master it is that one, rounded to the dtype of the graph.

    Raises:
        DamagedError: the checkpoint is not what was written.
        ModelError: as `parameters.weights.read`.
    """
    found = candidates(path)
    if not found:
        return weights.read(path, graph, names, optional, say)
    stored = Stored.open(found[0])
    model = {
        name: tensor
        for tensor in tensors(stored)
        if not tensor.state
        for name in (tensor.name, *tensor.aliases)
    }
    keys = {name: weights.stored_as(graph, name, model) for name in names}
    there = {name: model[key] for name, key in keys.items() if key is not None}
    shapes = {name: tensor.shape for name, tensor in there.items()}
    weights.check_shapes(stored.folder, graph, names, shapes, optional)
    return {
        name: whole(stored, tensor).to(graph.states[name].held.dtype)
        for name, tensor in there.items()
    }
