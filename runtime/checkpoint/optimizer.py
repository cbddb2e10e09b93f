"""An optimizer's state by the names of the parameters, and back into the optimizer of any plan.

    state[p]["exp_avg"]    of the parameter's own shape    lies as the parameter does: its pieces
    state[p]["step"]       a tensor without dims           a number, the same on every rank
    state[p]["row_var"]    of another shape                lies whole, as the parameter has to
    state["clock"]         of no parameter                 JSON data, the same on every rank
    param_groups           lr, betas, ...                  JSON data, by the names in each group

A state is sharded as its parameter is, so another plan reads it as it reads the parameter. The
parameter may have another dtype than in the run that saved, with fp32 masters or without; a state
in the old dtype is then cast to the new one, since optimizers refuse two dtypes. A state of another
shape (Adafactor's means of rows and columns) cannot be cut: all ranks that have the parameter must
have it whole, in the run that saves and in the one that loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import CheckpointError, DamagedError
from autopipe.ir.tensors import tensors_in
from autopipe.planfile.placements import I
from autopipe.runtime.checkpoint.layout import OwnTensor, pieces_of_rank
from autopipe.runtime.checkpoint.manifest import NAMES, Chunk
from autopipe.runtime.checkpoint.plain import fence, like, plain
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.write import Written

LIKE, NUMBER, WHOLE = "like", "number", "whole"
"""The kinds of a state: a tensor of the parameter's shape, one number, or a tensor of another shape
that belongs to the whole parameter."""

_COUNTERS = ("step", "mu_product", "eta", "mu")
"""States of torch's optimizers that are numbers, also for a parameter that has no dims itself."""

_TAKEN = (
    "a checkpoint takes single numbers and states of the parameter's own shape, and other tensors "
    "under plans with tp=1 and without ZeRO"
)

Named = Mapping[str, nn.Parameter]
Groups = Sequence[Sequence[str]]
"""The names of the parameters in each group of a rank's optimizer."""


def tensors(optimizer: Optimizer, named: Named, own: Mapping[str, OwnTensor]) -> list[Written]:
    """The tensors of an optimizer's state that this rank writes.

    Args:
        named: the optimizer's parameters by name.
        own: the rank's tensors of the model.

    Raises:
        CheckpointError: a state has another shape, and the rank has a part of the parameter.
    """
    return [
        written
        for name, parameter in named.items()
        if name in own
        for key, state in optimizer.state.get(parameter, {}).items()
        if isinstance(state, Tensor)
        if (written := _written(optimizer, key, state, parameter, own[name])) is not None
    ]


def values(optimizer: Optimizer, named: Named, own: Mapping[str, OwnTensor]) -> dict[str, Any]:
    """An optimizer's class, groups and states that are no tensors, as JSON data."""
    kind = type(optimizer).__name__
    groups = [
        {
            "names": names,
            "options": {
                key: plain(value, f"{kind}.param_groups[{number}].{key}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        }
        for number, (names, group) in enumerate(
            zip(groups_of(optimizer, named), optimizer.param_groups, strict=True)
        )
    ]
    others = {
        name: numbers
        for name, parameter in named.items()
        if name in own
        if (numbers := _no_tensors(optimizer.state.get(parameter, {}), f"{kind}.state[{name!r}]"))
        if own[name].writes and own[name].leads
    }
    beside = {key: state for key, state in optimizer.state.items() if not isinstance(key, Tensor)}
    found = {"kind": kind, "groups": groups, "states": others}
    return {**found, "beside": plain(beside, f"{kind}.state")} if beside else found


def groups_of(optimizer: Optimizer, named: Named) -> list[list[str]]:
    """The names in each group of this rank's optimizer."""
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        [names[id(p)] for p in group["params"] if id(p) in names]
        for group in optimizer.param_groups
    ]


def origins(here: Groups, there: Sequence[Groups]) -> list[list[tuple[int, int]]]:
    """For each group here, the groups that had its parameters, as (rank, number of the group).

    If a rank had the same groups as here, only that rank's are named. A group whose parameters are
    in no group of `there` gets the group with its number on the first rank with as many groups.

    Args:
        here: this rank's groups.
        there: the groups of each rank that saved.

    >>> origins([["a", "c"], ["b"]], [[["a"], ["b"]], [["c"], ["d"]]])
    [[(0, 0), (1, 0)], [(0, 1)]]
    """
    equal = [rank for rank, groups in enumerate(there) if groups == here]
    if equal:
        return [[(equal[0], number)] for number in range(len(here))]
    places = {
        name: (rank, number)
        for rank, groups in enumerate(there)
        for number, names in enumerate(groups)
        for name in names
    }
    as_many = [rank for rank, groups in enumerate(there) if len(groups) == len(here)][:1]
    return [
        list(dict.fromkeys(places[name] for name in names if name in places))
        or [(rank, number) for rank in as_many]
        for number, names in enumerate(here)
    ]


def agreed(found: Sequence[Any], names: Sequence[str], what: str) -> Any:
    """The one value that all of a group's parameters had in a checkpoint.

    Args:
        found: the values, at least one.
        names: the group's parameters, for the error.
        what: the value in words, for the error.

    Raises:
        CheckpointError: the values differ.
    """
    for other in found:
        if other != found[0]:
            raise CheckpointError(
                f"the optimizer has {names[0]!r} in a group with parameters that had other {what} "
                f"in the checkpoint: {_unlike(found[0], other)}",
                hint="group the parameters as the run that was saved did; if its ranks had unlike "
                "ones in one group, resume under the plan in that folder, or take its weights "
                "alone by --weights",
            )
    return found[0]


def _unlike(one: Any, other: Any) -> str:
    """Two values in words; of mappings the entries that differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [k for k in {**one, **other} if one.get(k) != other.get(k)]
        one, other = ({key: each.get(key) for key in keys} for each in (one, other))
    return f"{one} and {other}"


def kind_of(stored: Stored) -> str | None:
    """The class of the optimizer whose state a checkpoint has; None: it has none.

    Raises:
        DamagedError: the checkpoint has something else in the state's place.
    """
    with fence(f"{stored.folder}: the optimizer's state"):
        for one in _saved(stored):
            kind = one["kind"]
            if not (isinstance(kind, str) and kind.isidentifier()):
                raise ValueError(f"no optimizer is called {kind!r}")
            return kind
    return None


def _saved(stored: Stored) -> list[Mapping[str, Any]]:
    """The optimizer's part of each manifest that has one."""
    return [one.training["optimizer"] for one in stored.manifests if one.training.get("optimizer")]


def restore(
    optimizer: Optimizer, named: Named, own: Mapping[str, OwnTensor], stored: Stored
) -> None:
    """Load the states of this rank's parameters from a checkpoint into an optimizer of its class.

    Raises:
        DamagedError, CheckpointError: as `Stored.fill`; or a state does not fit this plan.
    """
    saved = _saved(stored)
    others = {name: states for of_rank in saved for name, states in of_rank["states"].items()}
    groups = groups_of(optimizer, named)
    _regroup(optimizer, groups, [of_rank["groups"] for of_rank in saved])
    optimizer.state.update(_beside(groups, saved, type(optimizer).__name__))
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        for name in [name for name in names if name in own]:
            parameter = named[name]
            device = parameter.device if counts_on_device else torch.device("cpu")
            state: dict[str, Any] = like({}, others.get(name, {}))
            for key in stored.states.get(name, ()):
                state[key] = _read(own[name], key, parameter, stored, device)
            if state:
                optimizer.state[parameter] = state


def _read(
    own: OwnTensor, key: str, parameter: nn.Parameter, stored: Stored, counters: torch.device
) -> Tensor:
    """One of a parameter's states that are tensors.

    Args:
        counters: the device on which the optimizer has its numbers, as the step.
    """
    first = stored.chunks[own.name, key][0][1]
    if first.kind == NUMBER:
        return stored.number(own.name, key).reshape(first.shape).to(counters)
    if first.kind == WHOLE:
        return _read_whole(own, key, parameter, stored)
    return _read_alike(own, key, parameter, stored)


def _read_alike(own: OwnTensor, key: str, parameter: nn.Parameter, stored: Stored) -> Tensor:
    """A state of the parameter's shape."""
    dtype = _dtype(own, stored.chunks[own.name, key][0][1], parameter, stored)
    state = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    stored.fill(own, key, state.view(1) if state.ndim == 0 else state)
    return state


def _read_whole(own: OwnTensor, key: str, parameter: nn.Parameter, stored: Stored) -> Tensor:
    """A state of another shape than the parameter's."""
    chunk = stored.chunks[own.name, key][0][1]
    if chunk.own != (chunk.shape or (1,)):
        raise DamagedError(f"{stored.folder}: {chunk.key!r} has the shape {list(chunk.shape)}")
    if not _is_whole(own):
        raise CheckpointError(
            f"{stored.folder} has {key!r} of the shape {list(chunk.shape)} for {own.name!r}, of "
            f"whose {list(own.shape)} this rank has {list(parameter.shape)}: it cannot be cut",
            hint="resume under a plan with tp=1 and without ZeRO, or take the weights alone by "
            "--weights",
        )
    dtype = _dtype(own, chunk, parameter, stored)
    state = torch.zeros(chunk.own, dtype=dtype, device=parameter.device)
    pieces = pieces_of_rank(chunk.own, I, 1, 0)
    stored.fill(OwnTensor(own.name, (), WHOLE, state, chunk.shape, pieces, writes=False), key)
    return state.reshape(chunk.shape)


def _dtype(own: OwnTensor, chunk: Chunk, parameter: nn.Parameter, stored: Stored) -> torch.dtype:
    """A state's dtype here: the parameter's, if it was saved in the parameter's dtype then."""
    stored_dtype = NAMES[chunk.dtype]
    parameter_dtypes = {NAMES[chunk.dtype] for _, chunk in stored.chunks.get((own.name, ""), ())}
    return parameter.dtype if stored_dtype in parameter_dtypes else stored_dtype


def _written(
    optimizer: Optimizer, key: str, state: Tensor, parameter: nn.Parameter, own: OwnTensor
) -> Written | None:
    """A state as this rank writes it; None: another rank writes it, or it has no elements."""
    counts = key in _COUNTERS and state.numel() == 1
    data = state.reshape(1) if state.ndim == 0 else state
    if counts or (state.ndim == 0 and parameter.ndim > 0):
        if not (own.writes and own.leads):
            return None
        return Written(own.name, key, NUMBER, state.reshape(1), tuple(state.shape), ())
    if state.shape == parameter.shape:
        return Written(own.name, key, LIKE, data, own.shape, own.pieces) if own.writes else None
    if not _is_whole(own):
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {key!r} of the shape {list(state.shape)} for "
            f"{own.name!r}, of whose {list(own.shape)} this rank has {list(parameter.shape)}: no "
            "other plan could cut it",
            hint=_TAKEN,
        )
    pieces = pieces_of_rank(tuple(data.shape), I, 1, 0)
    shape = tuple(state.shape)
    return Written(own.name, key, WHOLE, data, shape, pieces) if own.writes else None


def _is_whole(own: OwnTensor) -> bool:
    """Whether the rank has the whole parameter."""
    return own.pieces == pieces_of_rank(own.shape or (1,), I, 1, 0)


def _no_tensors(state: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A parameter's states that are no tensors, which may be containers of numbers.

    Raises:
        CheckpointError: a container has a tensor with dims, of which each rank may have a
            part; or as `plain`.
    """
    found = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    for key, value in found.items():
        if any(tensor.ndim > 0 for tensor in tensors_in(value)):
            raise CheckpointError(
                f"{path}[{key!r}] is a {type(value).__name__} of tensors: no other plan could cut "
                "them",
                hint=_TAKEN,
            )
    return {key: plain(value, f"{path}[{key!r}]") for key, value in found.items()}


def _beside(here: Groups, saved: Sequence[Mapping[str, Any]], kind: str) -> dict[Any, Any]:
    """The states of no parameter, from a rank that had the groups of this one, or from all.

    Raises:
        CheckpointError: no rank had these groups, and the states were not the same on all.
    """
    equal = [one for one in saved if [group["names"] for group in one["groups"]] == here]
    found = [one.get("beside", {}) for one in equal[:1] or saved]
    # As text: nan does not equal itself.
    if len({repr(states) for states in found}) > 1:
        keys = sorted({repr(key) for states in found for key in like({}, states)})
        raise CheckpointError(
            f"{kind}.state has {', '.join(keys)}, of no parameter, and ranks had other values "
            "there: the right one for this rank cannot be known",
            hint="resume under the plan in that folder, or take its weights alone by --weights",
        )
    return dict(like({}, found[0]))


def _regroup(
    optimizer: Optimizer, here: Groups, saved: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Give each group the options of the groups that had its parameters in the checkpoint."""
    places = origins(here, [[group["names"] for group in groups] for groups in saved])
    for group, names, of in zip(optimizer.param_groups, here, places, strict=True):
        found = [saved[rank][number]["options"] for rank, number in of]
        options = agreed(found, names, "options") if found else {}
        for key, value in options.items():
            group[key] = like(group.get(key), value)
