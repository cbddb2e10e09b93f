"""An optimizer's state by the names of the parameters, and back into the optimizer of any plan.

    state[p]["exp_avg"]    of the parameter's own shape    lies as the parameter does: its pieces
    state[p]["step"]       a tensor without dims           a number, the same on every rank
    state["clock"]         of no parameter                 JSON data, the same on every rank
    param_groups           lr, betas, ...                  JSON data, by the names in each group

A state is sharded as its parameter is, so another plan reads it as it reads the parameter. The
parameter may have another dtype than in the run that saved, with fp32 masters or without; a state
in the old dtype is then cast to the new one, since optimizers refuse two dtypes. A state of another
shape (Adafactor's means of rows and columns) cannot be cut for other plans, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import CheckpointError
from autopipe.ir.tensors import tensors_in
from autopipe.runtime.checkpoint.layout import OwnTensor, leads
from autopipe.runtime.checkpoint.manifest import NAMES
from autopipe.runtime.checkpoint.plain import fence, like, plain
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.write import Written

LIKE, NUMBER = "like", "number"
"""The kinds of a state: a tensor of the parameter's shape, or one number."""

_COUNTERS = ("step", "mu_product", "eta", "mu")
"""States of torch's optimizers that are numbers, also for a parameter that has no dims itself."""

_TAKEN = "a checkpoint takes states of the parameter's own shape, and single numbers"

Named = Mapping[str, nn.Parameter]
Groups = Sequence[Sequence[str]]
"""The names of the parameters in each group of a rank's optimizer."""


def tensors(optimizer: Optimizer, named: Named, own: Mapping[str, OwnTensor]) -> list[Written]:
    """The tensors of an optimizer's state that this rank writes.

    Args:
        named: the optimizer's parameters by name.
        own: the rank's tensors of the model.

    Raises:
        CheckpointError: a state has neither the parameter's shape nor is it one number.
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
        if own[name].writes and leads(own[name].pieces)
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
    if any(other != found[0] for other in found):
        raise CheckpointError(
            f"the optimizer has {names[0]!r} in a group with parameters that had other {what} in "
            "the checkpoint",
            hint="group the parameters as the run that was saved did",
        )
    return found[0]


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
    """Load the states of this rank's parameters from a checkpoint into an optimizer.

    Raises:
        DamagedError, CheckpointError: as `Stored.fill`; or the checkpoint is of another optimizer.
    """
    kind, stored_kind = type(optimizer).__name__, kind_of(stored)
    if stored_kind is None:
        raise CheckpointError(f"{stored.folder} has no state of an optimizer")
    if stored_kind != kind:
        raise CheckpointError(
            f"{stored.folder} has the state of {stored_kind}, and the optimizer is {kind}",
            hint="resume with the same optimizer; weights alone can be taken by --weights",
        )
    saved = _saved(stored)
    others = {name: states for of_rank in saved for name, states in of_rank["states"].items()}
    _regroup(optimizer, named, [of_rank["groups"] for of_rank in saved])
    optimizer.state.update(_beside(groups_of(optimizer, named), saved, kind))
    for group in optimizer.param_groups:
        counted_there = bool(group.get("capturable") or group.get("fused"))
        for name, parameter in _of(group["params"], named):
            if name not in own:
                continue
            state: dict[str, Any] = like({}, others.get(name, {}))
            for key in stored.states.get(name, ()):
                first = stored.chunks[name, key][0][1]
                if first.kind == NUMBER:
                    number = stored.number(name, key)
                    state[key] = number.to(parameter.device) if counted_there else number
                else:
                    state[key] = _read(own[name], key, parameter, stored)
            if state:
                optimizer.state[parameter] = state


def _read(own: OwnTensor, key: str, parameter: nn.Parameter, stored: Stored) -> Tensor:
    """A state of the parameter's shape; cast if it was saved in the parameter's dtype then."""
    stored_dtype = NAMES[stored.chunks[own.name, key][0][1].dtype]
    parameter_dtypes = {NAMES[chunk.dtype] for _, chunk in stored.chunks.get((own.name, ""), ())}
    dtype = parameter.dtype if stored_dtype in parameter_dtypes else stored_dtype
    state = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    stored.fill(own, key, state.view(1) if state.ndim == 0 else state)
    return state


def _written(
    optimizer: Optimizer, key: str, state: Tensor, parameter: nn.Parameter, own: OwnTensor
) -> Written | None:
    """A state as this rank writes it; None: another rank writes it, or it has no elements."""
    is_number = state.ndim == 0 and (parameter.ndim > 0 or key in _COUNTERS)
    if is_number:
        if not (own.writes and leads(own.pieces)):
            return None
        return Written(own.name, key, NUMBER, state.reshape(1), (), ())
    if state.shape != parameter.shape:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps {key!r} of the shape {list(state.shape)} for "
            f"{own.name!r}, which is {list(parameter.shape)} here: no other plan could cut it",
            hint=_TAKEN,
        )
    if not own.writes:
        return None
    data = state.reshape(1) if state.ndim == 0 else state
    return Written(own.name, key, LIKE, data, own.shape, own.pieces)


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


def _of(parameters: Sequence[nn.Parameter], named: Named) -> Iterator[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in named.items()}
    for parameter in parameters:
        if id(parameter) in names:
            yield names[id(parameter)], parameter


def _regroup(
    optimizer: Optimizer, named: Named, saved: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Give each group the options of the groups that had its parameters in the checkpoint."""
    here = groups_of(optimizer, named)
    places = origins(here, [[group["names"] for group in groups] for groups in saved])
    for group, names, of in zip(optimizer.param_groups, here, places, strict=True):
        found = [saved[rank][number]["options"] for rank, number in of]
        options = agreed(found, names, "options") if found else {}
        for key, value in options.items():
            group[key] = like(group.get(key), value)
