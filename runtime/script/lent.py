"""Refuses a step if a script has moved weights of another model that the graph reads as constants.

    def loss(outputs, batch):                the teacher's weights are constants of the graph,
        target = teacher(batch["x"])         in the memory that they had when it was traced

    t.lerp_(s, 0.01)                         writes that memory: the next step reads it
    t.data = 0.99 * t.data + 0.01 * s.data   is other memory, which plain PyTorch would read

Ranks with parts of what is trained would move the teacher by their own part alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopipe.errors import ModelError
from autopipe.ir.dataflow import gradient_values
from autopipe.ir.graph import Graph, State
from autopipe.ir.torch_private import is_fake, storage_key
from autopipe.runtime.script.copied import Sight, look_at, present, values_of


@dataclass(frozen=True)
class _Place:
    """A tensor of a module by its name there; `constant`: the graph's, in the same memory.

    `copied`: this rank reads a copy of the constant.
    """

    module: nn.Module
    name: str
    constant: Tensor
    copied: bool


class Lent:
    """The tensors of modules that are constants of a graph, looked at between two steps.

    Args:
        modules: those that code of the model and its loss may read, without the model itself.
        constants: the graph's, by name.
        held: what this rank reads, by name.
        parts: whether a rank has parts of what is trained: stages, shards or rows.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        constants: Mapping[str, Tensor],
        held: Mapping[str, Tensor],
        *,
        parts: bool,
    ) -> None:
        self._parts = parts
        named = {_memory(one): name for name, one in constants.items() if not is_fake(one)}
        self._places = [
            _Place(module, name, constants[constant], copied)
            for module in modules
            for name, tensor in values_of(module).items()
            if (constant := named.get(_memory(tensor))) is not None
            for copied in [_memory(held.get(constant, tensor)) != _memory(tensor)]
        ]
        self._looks: list[Sight] | None = None

    def note(self) -> None:
        """Take the present values as unchanged; before the first step they may be loaded."""
        self._looks = self._seen(self._now())

    def check(self) -> None:
        """Compare with what was noted.

        Raises:
            ModelError: a tensor lies elsewhere than the graph's constant; or it was written since,
                and this rank reads a copy, or ranks have parts.
        """
        found = self._now()
        for place, now in zip(self._places, found, strict=True):
            if now is None or _memory(now) != _memory(place.constant):
                raise ModelError(
                    f"{place.name!r} of another {type(place.module).__name__}, which the model or "
                    "its loss reads, was replaced by another tensor between two steps, and ranks "
                    "read the one that it was",
                    hint="write it where it is, under torch.no_grad(): old.lerp_(new, 0.01), or "
                    "old.copy_(new)",
                )
        if self._looks is None:
            return
        for place, before, sight in zip(self._places, self._looks, self._seen(found), strict=True):
            if (self._parts or place.copied) and not sight.same(before):
                raise ModelError(
                    f"{place.name!r} of another {type(place.module).__name__}, which the model or "
                    "its loss reads, was written between two steps, while a rank of this plan has "
                    "only a part of what is trained, or reads a copy of it",
                    hint="plan without pipelines, tensor parallelism and ZeRO: --pp 1 --tp 1 "
                    "--zero 0; or give what it computes in the batch",
                )

    def _now(self) -> list[Tensor | None]:
        return present((place.module, place.name) for place in self._places)

    def _seen(self, found: Sequence[Tensor | None]) -> list[Sight]:
        if not (self._parts or any(place.copied for place in self._places)):
            return [Sight(None)] * len(found)
        return [Sight(None) if one is None else look_at(one) for one in found]


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The key of a tensor's storage, and where the tensor begins there."""
    dense = tensor.layout == torch.strided
    return storage_key(tensor), int(tensor.storage_offset()) if dense else 0


class Untrained:
    """Finds an optimizer that is to train what the graph has as a constant.

        HEAD = nn.Linear(8, 8)                              a loss with weights of its own
        def loss(outputs, batch): return mse(HEAD(outputs), batch["y"])
        SGD([*pipe.parameters(), *HEAD.parameters()])       plain PyTorch gives them gradients

    One that has a gradient already got it from the script itself, as a discriminator does.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._constants = {
            _memory(one): n for n, one in graph.constants.items() if not is_fake(one)
        }

    def check(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that begins a step.

        Raises:
            ModelError: one of its parameters would have a gradient in plain PyTorch.
        """
        given = (one for group in optimizer.param_groups for one in group["params"])
        for one in given:
            constant = self._constants.get(_memory(one))
            if constant is None or not one.requires_grad or one.grad is not None:
                continue
            if self._reaches_loss(constant):
                raise ModelError(
                    f"{type(optimizer).__name__} is to train a tensor of shape {list(one.shape)} "
                    f"that the loss reads{self._place(constant)} and that is none of the model's "
                    "parameters: pipe.step makes no gradient of it",
                    hint="make it a parameter of the model (self.head = head), and let forward "
                    "return what the loss reads of it",
                )

    def _reaches_loss(self, constant: str) -> bool:
        states = {n: replace(s, trainable=n == constant) for n, s in self._graph.states.items()}
        return self._graph.outputs[0] in gradient_values(replace(self._graph, states=states))

    def _place(self, constant: str) -> str:
        readers = (node for node in self._graph.nodes if State(constant) in node.values())
        return next((f" ({node.place})" for node in readers if node.place), "")
