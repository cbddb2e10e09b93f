"""A rank's tensors under the model's own names: a state dict, or its part of a file of the model.

    rank 0   states of its stages, and what forward does not use   --+
    rank 1   states of its stages                                  --+-->  the model's state dict

A tied tensor has all its names. A tensor of which each tensor-parallel rank has a part, or each
replica rows of its fp32 master, is put together first, by all ranks that have it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopipe.errors import ModelError
from autopipe.ir.graph import Arg, Graph, State, StateSpec, TensorSpec, resolve, shape_at
from autopipe.ir.tensors import NORMALIZED, normalize_
from autopipe.planfile.parts import Place
from autopipe.planfile.placements import I, OwnRows, Sharding
from autopipe.runtime.parameters.export import FileTensor, export
from autopipe.sharding import collectives

Master = Callable[[str], Tensor | None]
"""Makes the master of a parameter whole, as `gradient_sum.Gradients.master`."""


def in_state_dict(state: StateSpec) -> bool:
    """Whether the model's state dict has it."""
    return state.kind == "parameter" or (state.kind == "buffer" and state.persistent)


def _normed(op: str, given: Arg, ndim: int) -> tuple[int, ...]:
    """The dims that a projection takes norms over: it is given them, or `renorm` the one left."""
    if op == NORMALIZED:
        return cast(tuple[int, ...], given)
    return tuple(dim for dim in range(ndim) if dim != cast(int, given) % ndim)


@dataclass(frozen=True)
class ModelStates:
    """What a rank has of the model's parameters and buffers.

    Attributes:
        specs: all that the model owns, by name, whole.
        states: this rank's, as its stages use them; under ZeRO-3 `hold` puts DTensors in them,
            under ZeRO-1 parameters of 16 bits in the place of their masters.
        unused: those that forward does not use, on the rank that keeps them.
        sharding: how they lie over tensor-parallel ranks.
        written: those that forward or the loss writes.
        masks: buffers that parameters are multiplied by, and that were found to be 0 and 1.
    """

    specs: Mapping[str, StateSpec]
    states: MutableMapping[str, Tensor]
    unused: Mapping[str, Tensor]
    sharding: Sharding
    written: Collection[str] = ()
    masks: set[str] = field(default_factory=set)

    def in_checkpoint(self, name: str) -> bool:
        """Whether a resumed run needs this tensor. Tensors in no state dict are made anew by the
        model, with their values before the first step."""
        return in_state_dict(self.specs[name]) or name in self.written

    @torch.no_grad()
    def project(
        self, parameters: Mapping[str, Tensor], rows: Mapping[str, OwnRows], rank: int
    ) -> None:
        """Apply forward's projections to the parameters themselves (`StateSpec.projection`).

        Masters are left out: forward projects the copies that it reads, which each step makes anew.

        Args:
            parameters: this rank's, or its rows of them, by name.
            rows: its rows of those that it has rows of.
            rank: tensor-parallel.

        Raises:
            ModelError: forward multiplies by other numbers than 0 and 1, which it would do again
                in each micro-batch; or norms are to be limited of which ranks have parts.
        """
        for name, parameter in parameters.items():
            spec = self.specs.get(name)
            if spec is None or spec.projection is None or spec.master is not None:
                continue
            op, arguments = spec.projection
            if op in ("aten.renorm_.default", NORMALIZED):
                self._check_norms(name, _normed(op, arguments[1], parameter.ndim), rows.get(name))
            if op == NORMALIZED:
                normalize_(parameter, *cast(tuple[float, tuple[int, ...], float], arguments))
                continue
            for buffer in [arg for arg in arguments if isinstance(arg, State)]:
                if op == "aten.mul_.Tensor":
                    self._check_mask(name, buffer.name)
                mask = self._part_of_buffer(name, buffer.name, rank)
                if name in rows:
                    mask = collectives.in_rows(mask, rows[name])
                arguments = tuple(mask if arg == buffer else arg for arg in arguments)
            resolve(op)(parameter, *arguments)

    def _part_of_buffer(self, name: str, buffer: str, rank: int) -> Tensor:
        """A buffer of a parameter's shape, or the part beside this rank's part of the parameter."""
        placement, of_buffer = (self.sharding.states.get(n, I) for n in (name, buffer))
        if of_buffer.sharded and of_buffer == placement:
            return self.states[buffer]
        whole = self._whole(buffer, lambda _: None).expand(shape_at(self.specs[name].spec, 1))
        if not placement.sharded:
            return whole
        return collectives.own_part(whole, placement, self.sharding.ranks, rank)

    def _check_mask(self, name: str, buffer: str) -> None:
        if buffer in self.masks:  # nothing writes it, and to look is to wait for a GPU
            return
        mask, attribute = self.states[buffer], buffer.rpartition(".")[2]
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ModelError(
                f"forward multiplies the parameter {name!r} in place by the buffer {buffer!r}, "
                "which holds other numbers than 0 and 1: each micro-batch would do so once more",
                hint=f"compute with a product, and leave the parameter: weight * self.{attribute}",
            )
        self.masks.add(buffer)

    def _check_norms(self, name: str, over: Collection[int], rows: OwnRows | None) -> None:
        placement = self.sharding.states.get(name, I)
        if (rows is not None and rows.dim in over) or (placement.sharded and placement.dim in over):
            dims = ", ".join(map(str, over))
            raise ModelError(
                f"forward sets norms of the parameter {name!r}, over its dims {dims}, and no rank "
                "has all of what it takes a norm of",
                hint="plan with --zero 0 and --tp 1",
            )

    def state_dict(self, master: Master) -> dict[str, Tensor]:
        """Parameters and persistent buffers, detached, each under all of its names.

        Every rank calls it. Under ZeRO-3 the parameters are DTensors, of which each rank has rows.
        """
        return {
            key: tensor
            for name, names in self._saved().items()
            for tensor in [self._whole(name, master)]
            for key in names
        }

    def count_in_state_dict(self) -> int:
        """The number of names in the whole model's state dict."""
        return sum(1 + len(one.aliases) for one in self.specs.values() if in_state_dict(one))

    def save(
        self, path: Path, place: Place, world: dist.ProcessGroup | None, master: Master
    ) -> None:
        """Write the model to a safetensors file; every rank calls it, rank 0 writes.

        Raises:
            AutopipeError: as `export`.
        """
        tensors = []
        for name, names in self._saved().items():
            shape = tuple(shape_at(self.specs[name].spec, 1))
            dtype = self.specs[name].master or self._own(name).dtype
            tensors.append(FileTensor(names, shape, dtype))

        def whole(name: str) -> Tensor:
            tensor = self._whole(name, master)
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        export(path, tensors, whole, place, world)

    def _saved(self) -> dict[str, tuple[str, ...]]:
        """All names of each tensor that a state dict has of this rank, in the model's order."""
        found = {}
        for name, state in self.specs.items():
            if name not in self.states and name not in self.unused:
                continue
            if in_state_dict(state):
                found[name] = (name, *state.aliases)
        return found

    def _own(self, name: str) -> Tensor:
        """This rank's part of a tensor."""
        return (self.unused if name in self.unused else self.states)[name].detach()

    def _whole(self, name: str, master: Master) -> Tensor:
        """A tensor, put together where each replica or tensor-parallel rank has a part of it."""
        of_master, placement = master(name), self.sharding.states.get(name, I)
        tensor = self._own(name) if of_master is None else of_master
        if not placement.sharded:
            return tensor
        if isinstance(tensor, DTensor):  # rows of a part
            tensor = tensor.full_tensor()
        return collectives.whole(tensor, collectives.TENSOR_PARALLEL, placement)


def unused_states(graph: Graph, model: nn.Module) -> dict[str, StateSpec]:
    """The parameters and persistent buffers of a model that its graph does not read."""
    known = {n for name, state in graph.states.items() for n in (name, *state.aliases)}
    persistent = model.state_dict().keys()
    tensors: dict[int, Tensor] = {}
    names: dict[int, list[str]] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, model.named_buffers(remove_duplicate=False)):
        if name in persistent and name not in known:
            tensors[id(tensor)] = tensor
            names.setdefault(id(tensor), []).append(name)
    found = {}
    for key, (name, *others) in names.items():
        kind = "parameter" if isinstance(tensors[key], nn.Parameter) else "buffer"
        spec = TensorSpec(tuple(tensors[key].shape), tensors[key].dtype)
        found[name] = StateSpec(spec, kind, False, tuple(others))
    return found
