"""Find the tensors of a graph that lie in the same memory.

    self.register_buffer("mean", ...)
    self.all = [self.mean]                      one tensor: the graph has one state, the buffer
    self.first = self.mean[0]                   a view: refused, if forward writes one of them
    teacher.state_dict()["weight"].mul_(0.9)    of a module that torch does not know: one constant
    loss: ... @ model.table.weight.T            the weight of a twin: the model's own
    loss: ... @ transposed                      a view made before, of that weight: refused
    loss: ... @ detached                        it by .detach(), made before: no gradient
    loss: ... @ the_whole                       it by [:], made before: the model's own, trained

Export makes a constant of each place at which a tensor comes in that is neither a parameter nor a
buffer, and ranks have each state of a graph in memory of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopipe.eager.registered import named_tensors_of
from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.dataflow import written_states
from autopipe.ir.graph import REGION_OP, Graph
from autopipe.ir.tensors import overlap, tensors_in
from autopipe.ir.torch_private import is_fake, no_function_modes, storage_key, tree_map


class SameMemory:
    """The buffers of a model, and the constants that are met, by where they lie in memory.

    Args:
        twins: modules with weights whose parameters stand for those of the model, by name.
    """

    def __init__(self, model: nn.Module, twins: Sequence[nn.Module] = ()) -> None:
        self._lent: dict[int, list[tuple[str, str, Tensor]]] = defaultdict(list)
        for twin in twins:
            kinds = ("parameter", twin.named_parameters()), ("buffer", twin.named_buffers())
            for kind, name, tensor in ((k, n, t) for k, named in kinds for n, t in named):
                self._lent[storage_key(tensor)].append((kind, name, tensor))
        self._names: dict[Any, tuple[str, str]] = {}
        self._tensors: dict[str, Tensor] = {}
        self._held: dict[str, str] = {}
        self._model = model
        for name, buffer in model.named_buffers():
            self._add("buffer", name, buffer)

    def lent(self, constant: Tensor, placeholder: fx.Node) -> tuple[str, str] | None:
        """The kind and the name of the twins' parameter or buffer that a constant is; None: it is
        none of them.

        Raises:
            CaptureError: it is a view of one, or eager would give it a gradient; names the user's
                line.
        """
        places = [user_lines.of_trace(user.stack_trace) for user in placeholder.users]
        at = f"{places[0]}: " if places and places[0] else ""
        of_memory = self._lent.get(storage_key(constant), ())
        for kind, name, tensor in of_memory:
            trained = kind == "parameter" or not constant.requires_grad
            if _where(tensor) == _where(constant) and trained:
                return kind, name
        for kind, name, tensor in of_memory:
            if constant.numel() and overlap(tensor, constant):
                raise CaptureError(
                    f"{at}a view of the {kind} {name!r} is read here that was made before; no rank "
                    "has it",
                    hint="make the view where it is read: model.layer.weight.T in the loss itself",
                )
        if constant.requires_grad:
            raise CaptureError(
                f"{at}a tensor of shape {tuple(constant.shape)} that requires a gradient comes in "
                "here from outside of the model, where no optimizer trains it",
                hint="make it an nn.Parameter of the model, or read it by .detach()",
            )
        return None

    def state_of(self, name: str, constant: Tensor) -> tuple[str, str]:
        """The kind and the name of the graph's state for a constant.

        That is a buffer of the model, or an earlier constant, if it has the same elements in the
        same order of the same memory; else a new constant of this name.
        """
        kind, found = self._names.get(_where(constant)) or self._add("constant", name, constant)
        if kind == "buffer":
            self._held[found] = name
        return kind, found

    def _add(self, kind: str, name: str, tensor: Tensor) -> tuple[str, str]:
        """Note where a state lies in memory; its kind and name."""
        if tensor.layout == torch.strided and not is_fake(tensor) and tensor.numel():
            self._tensors[name] = tensor
            self._names.setdefault(_where(tensor), (kind, name))
        return kind, name

    def check(self, graph: Graph, assigned: Collection[str]) -> None:
        """Refuse a write to a tensor that has an element of another state.

        Args:
            assigned: the buffers that modules assign: other places keep the tensor before.

        Raises:
            CaptureError: names both.
        """
        for buffer in sorted(self._held.keys() & assigned):
            raise CaptureError(
                f"forward assigns the buffer {buffer!r}, and the model keeps the tensor that it "
                f"was before in another place, too ({self._held[buffer]})",
                hint="write it in place: buffer.copy_(value); or read it where it is registered",
            )
        written = written_states(graph)
        self._check_regions(graph, written)
        for name, other in self._sharing(graph):
            if name in written and overlap(self._tensors[name], self._tensors[other]):
                raise CaptureError(
                    f"{written[name].place}: forward writes {name!r}, and {other!r}, which the "
                    "model keeps besides, is in the same memory; ranks have them as two tensors",
                    hint="keep one of them, and read the other from it in forward, as a view; or "
                    "give it memory of its own: .clone()",
                )

    def _check_regions(self, graph: Graph, written: Collection[str]) -> None:
        """Refuse a call that runs as it is beside a written buffer that has another place, too: an
        op has each buffer where it is registered, and other places still have the first tensor."""
        regions = [node for node in graph.nodes if node.op == REGION_OP]
        moved = {
            storage_key(buffer): name
            for name, buffer in self._model.named_buffers()
            if name in written and buffer.layout == torch.strided
        }
        for label, tensor in named_tensors_of(self._model) if regions and moved else ():
            if (name := moved.get(storage_key(tensor))) is not None:
                raise CaptureError(
                    f"{regions[0].place}: a call here runs as it is, and may read the buffer "
                    f"{name!r}, which forward writes, in another place, too ({label}); there it "
                    "would be as it was at first",
                    hint="read the buffer where it is registered, and keep it in no other place",
                )

    def _sharing(self, graph: Graph) -> Iterator[tuple[str, str]]:
        """Pairs of states of a graph in one storage, one of them a constant, in both orders."""
        places: dict[int, list[str]] = {}
        for name in self._tensors.keys() & graph.states.keys():
            places.setdefault(storage_key(self._tensors[name]), []).append(name)
        for names in places.values():
            for pair in permutations(sorted(names), 2):
                if not graph.constants.keys().isdisjoint(pair):
                    yield pair


def detached_of_now(twins: Sequence[nn.Module]) -> AbstractContextManager[object]:
    """Within, which is around an export, what `weight.detach()` gave before is `weight.detach()` of
    now: export makes a constant of either, in which the parameter itself would be seen.

    Args:
        twins: as for `SameMemory`.
    """
    real = (p for twin in twins for p in twin.parameters() if not is_fake(p) and p.numel())
    trained = {_where(p): p for p in real if p.requires_grad}
    # An export of many layers asks a hundred thousand questions, each of which a mode sees.
    return _DetachedOfNow(trained) if trained else nullcontext()


class _DetachedOfNow(TorchFunctionMode):
    def __init__(self, trained: Mapping[Any, Tensor]) -> None:
        super().__init__()
        self._trained = trained
        self._storages = {storage_key(p) for p in trained.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(self._parameter(t) is not None for t in tensors_in((args, kwargs))):
            args, kwargs = tree_map(self._of_now, (args, kwargs))
        return func(*args, **kwargs)

    def _parameter(self, leaf: Any) -> Tensor | None:
        if type(leaf) is not Tensor or leaf.requires_grad or is_fake(leaf):
            return None
        with no_function_modes():  # to look at memory is no call of the model's
            inside = leaf.layout == torch.strided and storage_key(leaf) in self._storages
            return self._trained.get(_where(leaf)) if inside else None

    def _of_now(self, leaf: Any) -> Any:
        parameter = self._parameter(leaf)
        return leaf if parameter is None else parameter.detach()


def _where(tensor: Tensor) -> Any:
    """What is equal for tensors of the same elements in the same order."""
    if tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    memory = storage_key(tensor), tensor.storage_offset(), tensor.dtype
    return *memory, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
