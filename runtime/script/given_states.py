"""State dicts between a script and a rank: it takes its own part of one, and gives its part.

    pipe.load_state_dict(model.state_dict())    whole tensors: a rank copies its rows of them
    pipe.load_state_dict(pipe.state_dict())     under ZeRO-3 DTensors, of which it has these rows
    torch.save(pipe.state_dict(), "model.pt")   a stage of two, or rows: it warns

A name, a shape or a value that does not fit on one rank is refused on all of them. Plain PyTorch
would have written the whole model; the file has a mark, by which `pipe.load_state_dict` tells whose
part it is.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from autopipe.batch.digest import digest
from autopipe.errors import ModelError
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.planfile.placements import OwnRows
from autopipe.runtime.checkpoint.layout import BESIDE, OwnTensor
from autopipe.runtime.parameters.model_states import ModelStates, in_state_dict

_IN_FRONT = ("module.", "_orig_mod.", "model.")
"""What wrappers put in front of a model's names."""


MARK = "autopipe: a part of a model"
"""In the state dict's `_metadata`, where torch keeps versions of modules, before this sentence."""


class PassedOver(NamedTuple):
    """What `load_state_dict(..., strict=False)` has passed over, named as torch's own does."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class GivenStates:
    """Copies given tensors into a rank's own.

    Args:
        states: the rank's tensors under the model's names.
        rows: the rows of each parameter that is sharded over replicas.
        world: the process group of all ranks; None if there is one rank.
    """

    def __init__(
        self,
        states: ModelStates,
        rows: Mapping[str, OwnRows],
        plan: Plan,
        place: Place,
        world: dist.ProcessGroup | None,
    ) -> None:
        self._states, self._rows = states, rows
        self._plan, self._place, self._world = plan, place, world

    @torch.no_grad()
    def taken(self, own: Mapping[str, OwnTensor], given: object, *, strict: bool) -> PassedOver:
        """Copy the values, if no rank has an error; all ranks call it.

        Args:
            own: the rank's tensors, by the name in the graph.
            given: tensors by name, whole ones or DTensors.
            strict: refuse names that the model has not, and own tensors that are missing.

        Raises:
            ModelError: they do not fit, here or on another rank.
        """
        error: ModelError | None = None
        fitting, passed_over = dict[str, Tensor](), PassedOver([], [])
        try:
            fitting, passed_over = self._fitting(own, given)
            if strict:
                _check_names(given, passed_over)
        except ModelError as raised:
            error = raised
        self._agree(error, self._marks(fitting))
        for name, tensor in fitting.items():
            if isinstance(tensor, DTensor):
                own[name].tensor.copy_(tensor.to_local())
            else:
                own[name].take(tensor)
        return passed_over

    def _marks(self, fitting: Mapping[str, Tensor]) -> dict[str, int]:
        """Fingerprints of whole tensors, to compare with other ranks': not of what each replica
        writes for itself."""
        return {
            name: digest({name: tensor})
            for name, tensor in fitting.items()
            if name not in self._states.written and not isinstance(tensor, DTensor)
        }

    def _fitting(
        self, own: Mapping[str, OwnTensor], given: Any
    ) -> tuple[dict[str, Tensor], PassedOver]:
        """The given tensor for each of this rank's, by the name in the graph; and what is left out.

        Raises:
            ModelError: they are no mapping, or one is no tensor of the model's shape.
        """
        if not isinstance(given, Mapping):
            kind = type(given).__name__
            raise ModelError(f"load_state_dict takes tensors by name, and was given a {kind}")
        specs = self._states.specs.items()
        known = {n for name, spec in specs if in_state_dict(spec) for n in (name, *spec.aliases)}
        fitting, missing = dict[str, Tensor](), list[str]()
        for name, mine in own.items():
            if mine.kind == BESIDE:
                continue
            names = [each for each in (name, *mine.aliases) if each in given]
            if not names:
                missing.append(name)
                continue
            for each in names:
                self._check_one(each, given[each], mine)
            fitting[name] = given[names[0]]
            for each in names[1:]:
                if not _equal(given[names[0]], given[each]):
                    raise ModelError(
                        f"the state dict has other values for {each!r} than for {names[0]!r}, and "
                        "the model has one tensor for both"
                    )
        return fitting, PassedOver(missing, [key for key in given if key not in known])

    def _check_one(self, name: str, given: Any, mine: OwnTensor) -> None:
        """Refuse what is no tensor with values, of the model's shape and of this rank's rows."""
        if not isinstance(given, Tensor):
            raise ModelError(f"the state dict has a {type(given).__name__} in {name!r}, no tensor")
        if given.is_meta:
            raise ModelError(f"the state dict's {name!r} is on the meta device: it has no values")
        if tuple(given.shape) != mine.shape:
            raise ModelError(
                f"the state dict's {name!r} has the shape {list(given.shape)}, the model's "
                f"{list(mine.shape)}",
                hint="every rank gives whole tensors, as model.state_dict() has them",
            )
        if isinstance(given, DTensor) and not self._has_rows_of(given, mine):
            raise ModelError(
                f"the state dict's {name!r} is a DTensor of other rows than this rank has",
                hint="every rank gives whole tensors: {name: t.full_tensor(), ...}",
            )

    def _has_rows_of(self, given: DTensor, mine: OwnTensor) -> bool:
        rows, mesh, place = self._rows.get(mine.name), self._plan.mesh, self._place
        replicas = [mesh.rank(place.pp, replica, place.tp) for replica in range(mesh.dp)]
        return (
            rows is not None
            and given.placements == (Shard(rows.dim),)
            and given.device_mesh.mesh.flatten().tolist() == replicas
            and given.to_local().shape == mine.tensor.shape
        )

    def _agree(self, error: ModelError | None, marks: Mapping[str, int]) -> None:
        """Refuse, on every rank, what one of them refuses, or values that differ between ranks."""
        if self._world is None:
            if error is not None:
                raise error
            return
        said = (error.message, error.hint) if error is not None else None
        heard: list[Any] = [None] * len(self._plan.mesh.places)
        dist.all_gather_object(heard, (said, dict(marks)), group=self._world)
        for rank, (refusal, _) in enumerate(heard):
            if refusal is not None:
                raise ModelError(f"rank {rank}: {refusal[0]}", hint=refusal[1])
        first: dict[str, tuple[int, int]] = {}
        for rank, (_, of_rank) in enumerate(heard):
            for name, mark in of_rank.items():
                other, there = first.setdefault(name, (rank, mark))
                if mark != there:
                    raise ModelError(
                        f"ranks {other} and {rank} were given other values of {name!r}",
                        hint="every rank gives the same state dict",
                    )


def _check_names(given: Any, passed_over: PassedOver) -> None:
    """Refuse names that the model has not, and tensors of this rank that were not given."""
    missing, unexpected = passed_over
    part = told_of(given)
    if missing and part is not None:
        raise ModelError(
            f"the state dict is a part that pipe.state_dict() gave elsewhere: {part}; it has no "
            f"{_named(missing)}",
            hint="give every rank the parts of all ranks in one dict; or write the whole model: "
            "pipe.save('model.safetensors'), which every rank calls",
        )
    hint = "give model.state_dict() whole, or strict=False to take what there is"
    for prefix in _IN_FRONT:
        if any(f"{prefix}{name}" in given for name in missing):
            hint = f'without {prefix!r}: {{k.removeprefix("{prefix}"): v for k, v in ...}}'
    if missing:
        raise ModelError(f"the state dict has no {_named(missing)}", hint=hint)
    if unexpected:
        raise ModelError(
            f"the state dict has {_named(unexpected)}, which the model has not", hint=hint
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return torch.equal(one.to_local(), other.to_local())
    if isinstance(one, DTensor) or isinstance(other, DTensor):
        return False
    return torch.equal(one, other.to(one.device))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


class PartOfStates(OrderedDict[str, Tensor]):
    """What one rank has of a model's state dict. Pickled, it warns, and becomes an OrderedDict.

    Args:
        told: which rank's, and how much it is, in words.
    """

    def __init__(self, tensors: Mapping[str, Tensor], told: str) -> None:
        super().__init__(tensors)
        self.told = told
        self._metadata = {"": {MARK: told}}

    def __reduce_ex__(self, protocol: object) -> Any:
        """How it is pickled, as `torch.save` does."""
        warnings.warn(
            f"what pipe.state_dict() gives is this rank's part of the model, and is written as "
            f"such: {self.told}. pipe.save('model.safetensors'), which every rank calls, writes "
            "the whole model",
            stacklevel=2,
        )
        return OrderedDict, (), {"_metadata": self._metadata}, None, iter([*self.items()])

    def copy(self) -> Self:
        """The same tensors in another dict."""
        return type(self)(self, self.told)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)({name: one.clone() for name, one in self.items()}, self.told)


def told_to_have(own: Mapping[str, Tensor], of: int, rank: int, ranks: int) -> str | None:
    """How much of a model's state dict a rank has, in words; None: all of it.

    Args:
        own: what it has; of a DTensor it has some rows.
        of: the number of the model's tensors.
    """
    rows = sum(isinstance(tensor, DTensor) for tensor in own.values())
    if len(own) == of and not rows:
        return None
    found = f"rank {rank} of {ranks} has {len(own)} of the model's {of} tensors"
    return f"{found}, and of {rows} of them some rows alone" if rows else found


def told_of(given: object) -> str | None:
    """Whose part a state dict is, in words; None: it has no mark."""
    metadata = getattr(given, "_metadata", None)
    own = metadata.get("") if isinstance(metadata, Mapping) else None
    told = own.get(MARK) if isinstance(own, Mapping) else None
    return told if isinstance(told, str) else None
