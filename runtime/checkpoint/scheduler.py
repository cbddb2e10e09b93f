"""A learning-rate schedule's state, and back into one whose optimizer has other groups.

    base_lrs, _last_lr, ...    an entry for each group           goes where the parameters go
    last_epoch, ...            the same on every rank            stays as it is
    _schedulers                states of schedules, in a list    each state is treated in this way

A rank's optimizer has groups of the rank's own parameters, so ranks may have different numbers of
groups, and other entries for them. A rank with the same groups as a rank that saved takes that
rank's whole state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopipe.errors import CheckpointError
from autopipe.runtime.checkpoint.optimizer import Groups, agreed, groups_of, origins
from autopipe.runtime.checkpoint.plain import has_words, like, plain
from autopipe.runtime.checkpoint.stored import Stored

_BY_GROUP = {
    *("base_lrs", "_last_lr", "min_lrs", "max_lrs"),
    *("base_momentums", "max_momentums", "lr_lambdas"),
}
"""Lists of torch's schedules that have an entry for each group."""

_FOR_ALL = {"_milestones"}
"""Lists of torch's schedules that have no entry for each group, but may have that length."""


def values(scheduler: LRScheduler) -> Any:
    """The state of a schedule, as JSON data.

    Raises:
        CheckpointError: a checkpoint cannot hold a part of it.
    """
    return plain(scheduler.state_dict(), type(scheduler).__name__)


def check_kind(scheduler: LRScheduler, stored: Stored) -> None:
    """Refuse a checkpoint without the state of a schedule, or with that of another class.

    Raises:
        CheckpointError: it has none, or names both classes.
        ValueError: the checkpoint has something else in the class's place.
    """
    if all(one.training.get("scheduler") is None for one in stored.manifests):
        raise CheckpointError(
            f"{stored.folder} has no state of a schedule",
            hint="resume with the model file that the run was started with",
        )
    kind, there = type(scheduler).__name__, stored.manifests[0].training.get("schedule")
    if there is not None and not (isinstance(there, str) and there.isidentifier()):
        raise ValueError(f"no schedule is called {there!r}")
    if there not in (None, kind):
        raise CheckpointError(
            f"{stored.folder} has the state of {there}, and the schedule is {kind}",
            hint="resume with the schedule that the run was started with, or take the checkpoint's "
            "weights alone by --weights",
        )


def restore(
    scheduler: LRScheduler,
    optimizer: Optimizer | None,
    named: Mapping[str, nn.Parameter],
    stored: Stored,
) -> None:
    """Load a schedule's state from a checkpoint, with an entry for each group of this rank.

    Args:
        scheduler: the schedule.
        optimizer: the schedule's optimizer; None: `scheduler.optimizer`.
        named: the rank's parameters by name.

    Raises:
        CheckpointError: the checkpoint has no state for these groups.
    """
    here = groups_of(scheduler.optimizer if optimizer is None else optimizer, named)
    saved = [
        (_groups(one.training), one.training["scheduler"])
        for one in stored.manifests
        if one.training.get("scheduler") is not None
    ]
    saved = [one for one in saved if one[0] == here][:1] or saved
    owners = [groups for groups, _ in saved]
    regrouping = _Regrouping(here, owners, origins(here, owners), stored.folder)
    kind = type(scheduler).__name__
    state = regrouping.value(kind, values(scheduler), [state for _, state in saved])
    scheduler.load_state_dict(like(scheduler.state_dict(), state))


def _groups(training: Mapping[str, Any]) -> list[list[str]]:
    """The groups of the optimizer in a rank's manifest; []: the rank has saved no optimizer."""
    had = training.get("optimizer")
    return [group["names"] for group in had["groups"]] if had else []


@dataclass(frozen=True)
class _Regrouping:
    """Combines a schedule's states from several ranks into one for the groups of this rank.

    Attributes:
        here: this rank's groups.
        there: the groups of each rank that saved one of the states.
        places: for each group here, the groups there that had its parameters (`origins`).
        folder: the checkpoint's, for errors.
    """

    here: Groups
    there: Sequence[Groups]
    places: Sequence[Sequence[tuple[int, int]]]
    folder: Path

    def value(self, path: str, present: Any, states: Sequence[Any]) -> Any:
        """Combine one part of the states.

        Args:
            path: the part's path, such as `SequentialLR._schedulers[0].base_lrs`.
            present: the part in this rank's new schedule, before the load.
            states: the part in the state of each rank of `there`.

        Raises:
            CheckpointError: the value for this rank's groups cannot be known.
        """
        key, first = path.rpartition(".")[2], states[0]
        by_group = key in _BY_GROUP
        if all(has_words(state) and state.keys() == first.keys() for state in states):
            own = present if isinstance(present, dict) else {}
            return {
                name: self.value(f"{path}.{name}", own.get(name), [state[name] for state in states])
                for name in first
            }
        if all(isinstance(state, list) for state in states):
            same_length = all(len(state) == len(first) for state in states)
            if (
                same_length
                and not by_group
                and all(has_words(part) for state in states for part in state)
            ):
                own = dict(enumerate(present)) if isinstance(present, list) else {}
                return [
                    self.value(f"{path}[{number}]", own.get(number), parts)
                    for number, parts in enumerate(zip(*states, strict=True))
                ]
            if key not in _FOR_ALL and self._fits(present, states):
                return self._entries(path, present, states)
        # As text: nan does not equal itself.
        if len({repr(state) for state in states}) > 1:
            raise self._unknown(f"{path} was not the same on all ranks")
        if by_group and len(first) != len(self.here):
            raise self._unknown(f"{path} is for {len(first)} groups, found {len(self.here)}")
        return first

    def _fits(self, present: Any, states: Sequence[list[Any]]) -> bool:
        """Whether a list has an entry for each group, here and on every rank that saved."""
        lists, groups = (present, *states), (self.here, *self.there)
        return isinstance(present, list) and [*map(len, lists)] == [*map(len, groups)]

    def _entries(self, path: str, present: list[Any], states: Sequence[list[Any]]) -> list[Any]:
        """A list with the entries that the parameters of each group had."""
        entries = [
            agreed([states[rank][number] for rank, number in of], names, path)
            if of
            else present_entry
            for present_entry, names, of in zip(present, self.here, self.places, strict=True)
        ]
        by_group = path.rpartition(".")[2] in _BY_GROUP or len(present) != len(states[0])
        if not by_group and entries != states[0] and all(state == states[0] for state in states):
            raise self._unknown(f"{path} may have an entry for each group, or be one list for all")
        return entries

    def _unknown(self, why: str) -> CheckpointError:
        weights = "or take its weights alone by --weights"
        return CheckpointError(
            f"{self.folder}: {why}; the right value for this rank's groups of parameters cannot be "
            "known",
            hint=f"resume under the plan in that folder, {weights}"
            if any(self.there)
            else f"save the optimizer, which has the names, with its schedule, {weights}",
        )
