"""What a checkpoint has of a rank: tensors, optimizer, schedule, and values of the run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.errors import CheckpointError
from autopipe.runtime.checkpoint import optimizer as optimizer_state
from autopipe.runtime.checkpoint import scheduler as scheduler_state
from autopipe.runtime.checkpoint.layout import REPLICA, OwnTensor
from autopipe.runtime.checkpoint.plain import fence
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.write import RankFile, Written


@dataclass(frozen=True)
class Content:
    """What a rank saves, and what it loads into.

    Attributes:
        own: its tensors of the model.
        names: those of all that a checkpoint has of the model, on whichever rank.
        named: what its optimizer changes, by name.
        optimizer, scheduler: None: neither saved nor loaded.
    """

    own: Mapping[str, OwnTensor]
    names: Collection[str]
    named: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None


def rank_file(
    content: Content, step: int, rank: int, ranks: int, values: Mapping[str, Any]
) -> RankFile:
    """What a rank writes; tensors that the next step's forward may change, and a GPU's, are copied.

    The others are read where they lie, until the optimizer changes them.

    Args:
        values: of the run, as JSON data.

    Raises:
        CheckpointError: a state cannot be kept; the sentence names it.
    """
    tensors = [
        Written(
            own.name,
            own.replica,
            REPLICA if own.replica else own.kind,
            _still(own),
            own.shape,
            own.pieces,
            own.aliases,
        )  # fmt: skip
        for own in content.own.values()
        if own.writes and own.pieces
    ]
    training: dict[str, Any] = {"values": dict(values)}
    if content.optimizer is not None:
        found = content.optimizer, content.named, content.own
        states = (w for w in optimizer_state.tensors(*found) if w.state)
        tensors += [replace(w, tensor=_on_cpu(w.tensor)) for w in states]
        training["optimizer"] = optimizer_state.values(*found)
    if content.scheduler is not None:
        training["schedule"] = type(content.scheduler).__name__
        training["scheduler"] = scheduler_state.values(content.scheduler)
    return RankFile(step, rank, ranks, tuple(tensors), training)


def restore(content: Content, stored: Stored) -> None:
    """Load a checkpoint into what a rank holds.

    Raises:
        DamagedError: it is not what was written.
        CheckpointError: it is of another model, optimizer or schedule.
    """
    there = {name for name, state in stored.chunks if not state}
    if strangers := sorted(there - set(content.names)):
        raise CheckpointError(
            f"{stored.folder} is of another model: it has {strangers[0]!r}, which this one has not",
            hint="give this run a folder of its own",
        )
    for own in content.own.values():
        # A plan of other replicas begins with the first one's, as one of a single replica does.
        stored.fill(own, own.replica if (own.name, own.replica) in stored.chunks else "")
    if content.optimizer is not None:
        content.optimizer.state.clear()
        with fence(f"{stored.folder}: the optimizer's state"):
            optimizer_state.restore(content.optimizer, content.named, content.own, stored)
    if content.scheduler is not None:
        with fence(f"{stored.folder}: the schedule's state"):
            scheduler_state.restore(content.scheduler, content.optimizer, content.named, stored)


def values(stored: Stored, shard: int, shards: int) -> Mapping[str, Any]:
    """The values that a rank with this shard of the batches has saved; rank 0's if none had."""
    with fence(f"{stored.folder}: the state of the run"):
        every: list[Mapping[str, Any]] = [one.training["values"] for one in stored.manifests]
        return next((found for found in every if found["shard"] == [shard, shards]), every[0])


def _still(own: OwnTensor) -> Tensor:
    """A tensor that does not change before the next step of the optimizer."""
    there = _on_cpu(own.tensor)
    return there.clone() if own.moves and there is own.tensor else there


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu()  # itself, where it is there already
