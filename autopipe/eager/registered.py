"""Parameters and buffers that a model registers in forward, or has in unregistered places.

    if self.scale is None:
        self.scale = nn.Parameter(torch.ones(x.shape[-1]))      refused
        self.proj = nn.Linear(x.shape[-1], 8)                   refused
        self.register_buffer("table", make(x.shape[1]))         computed in every micro-batch

An optimizer made before the first forward lacks such a parameter, one made after it has it: the
model alone does not say whether the parameter is trained.

    self.ws = [nn.Parameter(...), ...]              forward reads self.ws
    self.params = nn.ParameterList(self.ws)         and an optimizer finds them here

A trace replaces registered parameters by tensors of its own, but lists, closures and modules in
lists still hold the old ones. When torch is called, the old one is replaced by the new one.

    frozen = copy.deepcopy(self.layer).requires_grad_(False)      forward reads its values

A copy that forward makes is no parameter of the model: an optimizer never sees it.

    self.experts[0].to(x.device)                    the expert is there already

Such a call changes nothing, though it sets each parameter's data.

    self.teacher = [copy.deepcopy(self.net)]        forward moves its weights
    self.centre = torch.zeros(8)                    forward writes it in place

A trace runs a model several times, and its graph has such a tensor as it was before: `KeptTensors`
puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopipe.eager.contents import MOST_ELEMENTS
from autopipe.eager.holders import Holder, Part, holders_of
from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import is_fake, tree_map, version


@contextmanager
def new_parameters(model: nn.Module) -> Iterator[None]:
    """Within, refuse new parameters of the model, alone or in a new module.

    A module that forward makes, calls and forgets does not belong to the model.

    Raises:
        CaptureError: names the parameter and the user's line.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    known = {id(parameter) for parameter in model.parameters()}

    def parameter(module: nn.Module, name: str, new: Any) -> None:
        if id(module) in paths and isinstance(new, nn.Parameter) and id(new) not in known:
            again = isinstance(getattr(module, name, None), nn.Parameter)
            raise _refusal(f"{paths[id(module)]}.{name}".lstrip("."), again=again)

    def part(module: nn.Module, name: str, new: Any) -> None:
        if id(module) in paths and isinstance(new, nn.Module):
            for inside, weight in new.named_parameters():
                if id(weight) not in known:
                    again = isinstance(getattr(module, name, None), nn.Module)
                    path = f"{paths[id(module)]}.{name}.{inside}".lstrip(".")
                    raise _refusal(path, again=again)

    hooks = (
        register_module_parameter_registration_hook(parameter),
        register_module_module_registration_hook(part),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def copies_are_values() -> Iterator[None]:
    """Within, a parameter that `copy.deepcopy` copies becomes its values, without a gradient.

    In plain PyTorch the copy has a gradient of its own, which nobody reads.
    """

    def copied(deepcopy: Callable[..., Any], tensor: Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(tensor, nn.Parameter):
            return deepcopy(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone()
        return memo[id(tensor)]

    def patched_deepcopy(deepcopy: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, memo: copied(deepcopy, tensor, memo)

    with ExitStack() as until:
        for kind in (Tensor, nn.Parameter):  # a fake parameter is no object of the second
            until.enter_context(patched(kind, "__deepcopy__", patched_deepcopy(kind.__deepcopy__)))
        yield


def _refusal(name: str, *, again: bool) -> CaptureError:
    if again:
        return CaptureError(
            f"{user_lines.here()}: forward puts another parameter in the place of {name!r}, and an "
            "optimizer has the one that was there before",
            hint="change it in the optimizer's step, or compute with a changed copy: "
            "self.weight.clamp(...)",
        )
    return CaptureError(
        f"{user_lines.here()}: forward makes the parameter {name!r} in its first call; an "
        "optimizer that was made before does not train it, one that is made after does",
        hint="make it in __init__, or call the model once on a batch where it is built: with "
        "torch.no_grad(): net(**inputs(2))",
    )


class AsRegistered(TorchFunctionMode):
    """Within, calls of torch get, for an old parameter, what the model has by its name now.

    Args:
        before: the old parameters of the model by name.
        others: other tensors that stand for parameters, each with the parameter it stands for.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Mapping[str, Tensor],
        others: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__()
        now = dict(model.named_parameters())
        self._now = {id(tensor): now[name] for name, tensor in before.items()}
        self._now |= {id(t): self._now[id(p)] for t, p in others if id(p) in self._now}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._of_now, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _of_now(self, leaf: Any) -> Any:
        return self._now.get(id(leaf), leaf) if isinstance(leaf, nn.Parameter) else leaf


@contextmanager
def leaving_modules_alone() -> Iterator[None]:
    """Within, `module.to(...)` does nothing where the module is of that dtype, or there, already.

    Models call it in forward (switch, nllb: the router in fp32; experts: to where x is). It sets
    each parameter's data and reads its gradient even then, and no trace can have either.
    """
    to = nn.Module.to

    def to_another(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        asked = [a for a in (*args, *kwargs.values()) if not isinstance(a, bool | None)]
        return self if all(_is_already(self, a) for a in asked) else to(self, *args, **kwargs)

    with patched(nn.Module, "to", to_another):
        yield


def _is_already(module: nn.Module, asked: Any) -> bool:
    """Whether `module.to(asked)` changes nothing: a dtype, a device, or a tensor that has both."""
    if isinstance(asked, Tensor):
        return _is_already(module, asked.dtype) and _is_already(module, asked.device)
    tensors = [*module.parameters(), *module.buffers()]
    if isinstance(asked, torch.dtype):
        return {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()} <= {asked}
    if isinstance(asked, str | int | torch.device):
        return {t.device for t in tensors} <= {torch.device(asked)}
    return False  # a memory format


MOST_IN_MODULES = 2**25
"""So many elements of modules that are no part of the model are put back. Of tensors beyond these a
write is refused."""


def tensors_of(*parts: Part) -> list[Tensor]:
    """The tensors that are put back, each once. Of larger ones a write is refused."""
    return [tensor for _, tensor in _small(_all_of(holders_of(*parts)))]


def named_tensors_of(*parts: Part) -> list[tuple[str, Tensor]]:
    """All tensors that parts keep beside parameters and buffers, with the user's names of them; a
    buffer that a list has, too, is one."""
    return [(name, tensor) for name, tensor, _ in _all_of(holders_of(*parts))]


class KeptTensors:
    """The tensors of some holders, with their values as they are when this is made."""

    def __init__(self, holders: Iterable[Holder]) -> None:
        found = _all_of([*holders])
        small = _small(found)
        self._before = [(t, t.data, version(t), t.detach().clone()) for _, t in small]
        known = {id(tensor) for _, tensor in small}
        large = [(name, t) for name, t, _ in found if id(t) not in known]
        self._large = [(name, t, t.data_ptr(), version(t)) for name, t in large]

    def put_back(self) -> None:
        """Give the tensors their values again, and the memory that they had (`t.data = other`).

        Parameters and buffers of a module are compared: batch norm writes without a new version.
        """
        for tensor, memory, count, values in self._before:
            moved = tensor.data_ptr() != memory.data_ptr()
            if moved:
                tensor.data = memory
            if moved or version(tensor) != count or not torch.equal(tensor, values):
                give(tensor, values)

    def check(self) -> None:
        """Refuse a write of a tensor that was too large to be copied.

        Raises:
            CaptureError: names the tensor.
        """
        for name, tensor, memory, count in self._large:
            if (tensor.data_ptr(), version(tensor)) != (memory, count):
                raise CaptureError(
                    f"forward writes {name}, a tensor of {tensor.numel():,} elements that is "
                    "neither a parameter nor a buffer of the model; planning runs the model "
                    "several times, and copies no such tensor to put it back",
                    hint="make it the model's: self.register_buffer(name, tensor); or of a module "
                    "an attribute of its own, self.teacher = teacher",
                )


def give(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor its values again, and its shape: observers of torch.ao resize their buffers."""
    if tensor.shape != values.shape:
        tensor.resize_(values.shape)
    for dim, stride in enumerate(tensor.stride() if tensor.layout == torch.strided else ()):
        if not stride and tensor.shape[dim]:  # expanded: its entries are one in memory
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def _small(found: Iterable[tuple[str, Tensor, bool]]) -> list[tuple[str, Tensor]]:
    """The tensors that are put back, with their names: those of few elements."""
    left, small = MOST_IN_MODULES, list[tuple[str, Tensor]]()
    for name, tensor, of_module in found:
        left -= tensor.numel() if of_module else 0
        if left >= 0 if of_module else tensor.numel() <= MOST_ELEMENTS:
            small.append((name, tensor))
    return small


def _all_of(holders: list[Holder]) -> list[tuple[str, Tensor, bool]]:
    """The tensors that holders keep and a model may write, each once, with the user's name of it
    and whether it is a module's."""
    registered = {id(holder.entries) for holder in holders}
    found: dict[int, tuple[str, Tensor, bool]] = {}
    for holder in holders:
        for key, value in list(holder.entries.items()):
            if isinstance(value, Tensor) and not _is_trained(value):
                found.setdefault(id(value), (holder.label(key), value, False))
            elif isinstance(value, nn.Module) and not holder.shared:
                for name, tensor in _unregistered(value, holder.label(key), registered):
                    found.setdefault(id(tensor), (name, tensor, True))
    return [one for one in found.values() if _has_values(one[1])]


def _is_trained(tensor: Tensor) -> bool:
    """Whether it is a parameter with a gradient: a list may have those of the model, too."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _unregistered(
    module: nn.Module, label: str, registered: set[int]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module that is no part of the model."""
    for path, part in module.named_modules():
        if id(vars(part)) not in registered:
            own = chain(part.named_parameters(recurse=False), part.named_buffers(recurse=False))
            for name, tensor in own:
                yield ".".join(filter(None, (label, path, name))), tensor


def _has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values, which a model may write in place.

    Between its uses a parameter under ZeRO-3 has none: its storage is empty.
    """
    without = is_lazy(tensor) or is_fake(tensor) or tensor.is_inference() or tensor.is_meta
    if without or tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > 0
