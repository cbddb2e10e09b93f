"""Make a model file's model smaller, so that it still does the same things.

    layers   h.0 h.1 h.2 ... h.31  ->  h.0 h.1       equal neighbours in a ModuleList or Sequential
    width    hidden_size 4096      ->  256           every width of a configuration of transformers,
                                                     divided by one number; heads and words stay
    length   tokens [b, 2048]      ->  [b, 64]       every dim of a batch that is as long
    calm     dropout 0.1           ->  0.0
    double   fp32                  ->  fp64          (`second_look`)

Layers are removed from a model that was built without memory. The others get their modules' own
initial values, or small random ones: the check does not depend on the values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.tree import Leaf, flatten, rebuild
from autopipe.checking.subject import SEED, Smaller
from autopipe.frontend.construct import Factory, build_fake
from autopipe.frontend.model_file import ModelFile
from autopipe.frontend.transformers_adapter import initialiser, narrowed
from autopipe.ir.torch_private import is_fake
from autopipe.util.seeding import seed as derive_seed


def shrunk(file: ModelFile, smaller: Smaller) -> ModelFile:
    """The model file with a smaller model, and batches that fit it; all else is as it was."""
    if smaller == Smaller():
        return file
    return replace(
        file,
        model=lambda: _model(file.model, smaller),
        inputs=lambda rows: _batch(file.inputs(rows), smaller),
    )


def skeleton(file: ModelFile, smaller: Smaller) -> nn.Module:
    """The smaller model without memory, to see how large it is.

    Raises:
        ModelError: the model cannot be built, or a width does not divide.
    """
    model = build_fake(lambda: narrowed(file.model, smaller.width))
    if smaller.layers:
        _cut(model, smaller.layers)
    return model


def _model(factory: Factory, smaller: Smaller) -> nn.Module:
    def narrow() -> nn.Module:
        return narrowed(factory, smaller.width)

    if smaller.layers:
        model = build_fake(narrow)
        _cut(model, smaller.layers)
        _fill(model)
    else:
        model = narrow()
    if smaller.calm:
        _without_dropout(model)
    return _widened(model) if smaller.double else model


def _widened(model: nn.Module) -> nn.Module:
    """The model in fp64; `double()` leaves complex numbers of 64 bits as they are."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():
            tensor.data = _double(tensor.data)
    return model.double()


def _cut(model: nn.Module, layers: int) -> None:
    """Leave at most `layers` of each row of equal layers in the model."""
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for position in reversed(surplus(module, layers)):
                del module[position]


def surplus(container: nn.ModuleList | nn.Sequential, layers: int) -> list[int]:
    """Positions of the members to leave out, so that each row of equal ones has `layers` at most.

    Members without parameters stay: an activation between two layers is not repeated structure.
    """
    found, position = list[int](), 0
    for look, group in groupby(container, key=_look):
        members = len([*group])
        if look != ():
            found += range(position + layers, position + members)
        position += members
    return found


def _look(module: nn.Module) -> Hashable:
    """The key by which layers count as equal: class, parameters' names and shapes."""
    parameters = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return (type(module), parameters) if parameters else ()


def _fill(model: nn.Module) -> None:
    """Give values to parameters without memory: the modules' own, or small random numbers."""
    filled: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        fakes = {n: p for n, p in module.named_parameters(recurse=False) if is_fake(p)}
        if not fakes:
            continue
        for name, fake in fakes.items():
            if id(fake) not in filled:
                filled[id(fake)] = _random(fake, f"{path}.{name}")
            setattr(module, name, filled[id(fake)])
        reset = initialiser(model, path)
        if reset is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(SEED, path))
                reset()


def _random(fake: nn.Parameter, name: str) -> nn.Parameter:
    """Random values: around 0 for a matrix, around 1 for a vector (it may scale a norm)."""
    generator = torch.Generator().manual_seed(derive_seed(SEED, name))
    values = 0.02 * torch.randn(fake.shape, generator=generator) + float(fake.ndim < 2)
    return nn.Parameter(values.to(fake.dtype), fake.requires_grad)


def _batch(batch: Any, smaller: Smaller) -> Any:
    """A batch that fits the smaller model."""
    batch = shorter(batch, smaller.length)
    return _mapped(batch, _double) if smaller.double else batch


def _double(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.complex64:
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def shorter(batch: Any, length: int) -> Any:
    """A batch whose rows have at most `length` tokens; 0, or no tokens: as it is."""
    before = tokens(flatten(batch))
    if not 0 < length < before:
        return batch

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] == before:
                tensor = tensor.narrow(dim, 0, length)
        return tensor.clone()

    return _mapped(batch, cut)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    leaves = flatten(batch)
    changed = {p: change(leaf) if isinstance(leaf, Tensor) else leaf for p, leaf in leaves.items()}
    return rebuild(batch, changed)


def tokens(leaves: dict[str, Leaf]) -> int:
    """Tokens of a row: the second dim of whole numbers [rows, length]; 1: there are none."""
    found = (
        leaf.shape[1]
        for leaf in leaves.values()
        if isinstance(leaf, Tensor) and leaf.ndim >= 2 and leaf.dtype in (torch.int64, torch.int32)
    )
    return next(found, 1)


def _without_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: of nn.Dropout, and attributes with such a name.

    A `p` of 1 and more is the order of a norm or the power of a mean.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and value < 1)):
                setattr(module, name, 0.0)
