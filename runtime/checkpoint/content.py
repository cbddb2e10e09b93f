"""A rank's part of a checkpoint: its tensors, optimizer, schedule, and values of the run."""

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
    """The objects of a rank that a checkpoint saves and loads.

    Attributes:
        own: the rank's tensors of the model, by name.
        names: the names of all tensors of the model that a checkpoint has, on any rank.
        named: the parameters that the rank's optimizer changes, by name.
        optimizer, scheduler: the rank's; None: its state is neither saved nor loaded.
    """

    own: Mapping[str, OwnTensor]
    names: Collection[str]
    named: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None


def rank_file(
    content: Content, step: int, rank: int, ranks: int, values: Mapping[str, Any]
) -> RankFile:
    """Collect what a rank writes of a checkpoint.

    Tensors on a GPU, and tensors that the next step's forward may change, are copied. The others
    are read where they lie, before the optimizer changes them.

    Args:
        step: the number of steps that the run has made.
        rank, ranks: this rank, and the number of ranks.
        values: values of the run, as JSON data.

    Raises:
        CheckpointError: a checkpoint cannot hold some state; the sentence names it.
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
        if own.written
    ]
    states, training = _trained(content)
    tensors += [replace(w, tensor=_on_cpu(w.tensor)) for w in states if w.state]
    return RankFile(step, rank, ranks, tuple(tensors), {"values": dict(values), **training})


def check(content: Content) -> None:
    """Refuse what a checkpoint cannot hold of an optimizer or a schedule; nothing is copied.

    Raises:
        CheckpointError: the sentence names it.
    """
    _trained(content)


def _trained(content: Content) -> tuple[list[Written], dict[str, Any]]:
    """The tensors of the optimizer's state; what else it has and the schedule, as JSON data."""
    states: list[Written] = []
    training: dict[str, Any] = {}
    if content.optimizer is not None:
        _check_wrapped(content.optimizer)
        _check_named(content.optimizer, content.named)
        found = content.optimizer, content.named, content.own
        states = optimizer_state.tensors(*found)
        training["optimizer"] = optimizer_state.values(*found)
    if content.scheduler is not None:
        training["schedule"] = type(content.scheduler).__name__
        training["scheduler"] = scheduler_state.values(content.scheduler)
    return states, training


def _check_wrapped(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds another one with its own state, or whose own code saves more.

    Raises:
        CheckpointError: names where the state is.
    """
    kind = type(optimizer).__name__
    for name, value in vars(optimizer).items():
        for held in value if isinstance(value, list | tuple) else (value,):
            own = isinstance(held, Optimizer) and held.state is not optimizer.state
            if own and held.state:
                raise CheckpointError(
                    f"{kind} holds another optimizer, {type(held).__name__}, in {name!r}, which "
                    "has a state of its own: no checkpoint would have that",
                    hint="let them share one, in __init__: inner.state = self.state",
                )
    if type(optimizer).state_dict is not Optimizer.state_dict:
        more = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"}))
        if more:
            raise CheckpointError(
                f"{kind}.state_dict() has {more[0]!r}, and a checkpoint has what is in `state` and "
                "`param_groups` alone",
                hint="keep it in self.state[parameter], or as an attribute that is a number",
            )


def _check_named(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Refuse an optimizer that keeps something for a parameter under no name.

    Raises:
        CheckpointError: names the parameter.
    """
    for name, parameter in named.items():
        found: Any = optimizer.state.get(parameter, {})
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"{type(optimizer).__name__}.state[{name!r}] is a {type(found).__name__}, and a "
                "checkpoint has the states of a parameter by name",
                hint="self.state[parameter]['name'] = ...; or train without --checkpoints",
            )


def check_stored(content: Content, stored: Stored) -> None:
    """Refuse, by its manifests, a checkpoint that cannot be loaded; nothing is changed.

    Raises:
        DamagedError: the manifests have something else where the state of the run is to be.
        CheckpointError: it is of another model, optimizer or schedule.
    """
    there = {name for name, state in stored.chunks if not state}
    if strangers := sorted(there - set(content.names)):
        raise CheckpointError(
            f"{stored.folder} is of another model: it has {strangers[0]!r}, which this one has not",
            hint="give this run a folder of its own",
        )
    for own in content.own.values():
        stored.check_fits(own)
    if content.optimizer is not None:
        _check_kind(content.optimizer, stored)
    if content.scheduler is not None:
        with fence(f"{stored.folder}: the schedule's state"):
            scheduler_state.check_kind(content.scheduler, stored)


def _check_kind(optimizer: Optimizer, stored: Stored) -> None:
    """Refuse a checkpoint without the state of an optimizer of this class.

    Raises:
        CheckpointError: names both classes.
    """
    kind, stored_kind = type(optimizer).__name__, optimizer_state.kind_of(stored)
    if stored_kind is None:
        raise CheckpointError(f"{stored.folder} has no state of an optimizer")
    if stored_kind != kind:
        raise CheckpointError(
            f"{stored.folder} has the state of {stored_kind}, and the optimizer is {kind}",
            hint="resume with the same optimizer; weights alone can be taken by --weights",
        )


def restore(content: Content, stored: Stored) -> None:
    """Load a checkpoint into a rank's tensors, optimizer and schedule.

    Args:
        stored: has passed `check_stored`.

    Raises:
        DamagedError: the checkpoint's files have changed since they were written.
        CheckpointError: a state of the optimizer or the schedule does not fit this plan.
    """
    for own in content.own.values():
        # A replica that the checkpoint does not have takes the first replica's values.
        stored.fill(own, own.replica if (own.name, own.replica) in stored.chunks else "")
    if content.optimizer is not None:
        content.optimizer.state.clear()
        with fence(f"{stored.folder}: the optimizer's state"):
            optimizer_state.restore(content.optimizer, content.named, content.own, stored)
    if content.scheduler is not None:
        with fence(f"{stored.folder}: the schedule's state"):
            scheduler_state.restore(content.scheduler, content.optimizer, content.named, stored)


def values(stored: Stored, shard: int, shards: int) -> Mapping[str, Any]:
    """The values saved by a rank that had this shard of the batches; if none had, rank 0's.

    Args:
        shard, shards: the number of the shard, and how many there are: the replica and dp.
    """
    with fence(f"{stored.folder}: the state of the run"):
        every: list[Mapping[str, Any]] = [one.training["values"] for one in stored.manifests]
        return next((found for found in every if found["shard"] == [shard, shards]), every[0])


def _still(own: OwnTensor) -> Tensor:
    """A rank's tensor on the CPU, copied if it may change before the optimizer's next step."""
    there = _on_cpu(own.tensor)
    return there.clone() if own.moves and there is own.tensor else there


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.cpu()  # the tensor itself, if it is on the CPU
