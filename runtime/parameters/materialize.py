"""Gives a rank the values of its own parameters and buffers; no rank holds the others'.

1  a model with its weights           its own tensors are taken as they are
2  weights= (`weights`)           own names are read
3  a constructor, and it fits in      one process of a machine builds the whole model at a time,
   host memory                        seeded, and keeps its own part: the same weights as in
                                      one process; what it makes on the meta device is made on
                                      the CPU
4  a constructor, and it does not     own modules initialise themselves (`reset_parameters`),
                                      each seeded by its path
5  else                               refused, with the bytes it would need
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend import unwritten
from autopipe.frontend.construct import OF_VALUES, Factory, on_cpu
from autopipe.frontend.transformers_adapter import initialiser
from autopipe.ir.graph import Graph, StateSpec
from autopipe.ir.torch_patches import one_process
from autopipe.ir.torch_private import is_fake
from autopipe.runtime.parameters.weights import read
from autopipe.tracing.source import parameter_bytes
from autopipe.util import host_memory, numbers
from autopipe.util.seeding import seed as derive_seed


@dataclass(frozen=True)
class Origin:
    """Where a model's values come from.

    Args:
        source: the model with its weights, or the function that builds it.
        skeleton: the model with fake parameters and real buffers.
        weights: what `read` takes.
        seed: of the initialisation.
        memory: bytes of host memory there are; None asks the system.
        say: takes a line of talk about `weights`.
        read: reads tensors by name, as `weights.read` does.
    """

    source: nn.Module | Factory
    skeleton: nn.Module
    weights: str | Path | None = None
    seed: int = 0
    memory: int | None = None
    say: Callable[[str], None] | None = None
    read: Callable[..., dict[str, Tensor]] = read


def materialize(
    graph: Graph,
    names: Sequence[str],
    origin: Origin,
    *,
    device: torch.device | str = "cpu",
    part: Callable[[str, Tensor], Tensor] | None = None,
    optional: Collection[str] = (),
) -> dict[str, Tensor]:
    """The tensors of `names` on `device`: parameters as `nn.Parameter`, buffers and constants.

    Args:
        part: what this rank keeps of a tensor, by its name; the tensor itself where that is all.
        optional: those of `names` that are left out where they are not to be had.

    Raises:
        ModelError: a tensor is not to be had; the sentence says which and why.
    """
    states = {name: graph.states[name] for name in names}
    found, model = _values(graph, states, origin, optional)
    result: dict[str, Tensor] = {}
    for name, state in states.items():
        tensor = found.get(name)
        if tensor is None:
            parameter = state.kind == "parameter"
            tensor = model.get_parameter(name) if parameter else model.get_buffer(name)
        if is_fake(tensor) or tensor.is_meta:
            if name in optional:
                continue
            raise ModelError(
                f"{state.kind} {name!r} has no values: the model was built without memory",
                hint="give weights=, or the function that builds the model instead of the model",
            )
        result[name] = _on(device, state, tensor if part is None else part(name, tensor))
    return result


def _values(
    graph: Graph, states: Mapping[str, StateSpec], origin: Origin, optional: Collection[str]
) -> tuple[dict[str, Tensor], nn.Module]:
    """Tensors by name, and the module that has the others; one line for each row of the table."""
    tensors = {name: graph.constants[name] for name in states if name in graph.constants}
    if origin.weights is not None:
        saved = [n for n, s in states.items() if s.kind == "parameter" or s.persistent]
        saved = [name for name in saved if name not in tensors]
        tensors |= origin.read(Path(origin.weights), graph, saved, optional, origin.say)
        return tensors, origin.skeleton
    if isinstance(origin.source, nn.Module):
        return tensors, origin.source
    memory = host_memory.available() if origin.memory is None else origin.memory
    if parameter_bytes(origin.skeleton) <= memory:
        model = _build_in_turn(origin.source, origin.seed)
        unwritten.refuse_again(model, origin.skeleton)
        if origin.seed and origin.skeleton in OF_VALUES:  # a skeleton's weights are of seed 0
            unwritten.refuse_others(model, origin.skeleton, origin.seed)
        built = (n for n, s in states.items() if s.kind == "parameter" and n not in tensors)
        unwritten.refuse({name: model.get_parameter(name) for name in built})
        return tensors, model
    to_initialise = [n for n, s in states.items() if s.kind == "parameter" and n not in optional]
    tensors |= _initialise(origin.skeleton, to_initialise, origin.seed, memory)
    return tensors, origin.skeleton


def _on(device: torch.device | str, state: StateSpec, tensor: Tensor) -> Tensor:
    """A tensor on `device`; one that is there already is taken as it is, not copied.

    What is a view of its conjugate or negative (`x.conj()`, `x.conj().imag`) is copied: files have
    bytes.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if state.kind != "parameter":
        return tensor.to(device)
    wanted = torch.device(device), state.held.dtype
    if isinstance(tensor, nn.Parameter) and (tensor.device, tensor.dtype) == wanted:
        return tensor
    return nn.Parameter(tensor.detach().to(*wanted), state.trainable)


def _build_in_turn(factory: Factory, seed: int) -> nn.Module:
    """Build the model while no other process of this machine and user does."""
    drawn, alone = torch.random.fork_rng(devices=[]), one_process()
    with host_memory.in_turn(), drawn, alone, unwritten.marked():
        torch.manual_seed(seed)
        model = factory()
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            torch.manual_seed(seed)
            with on_cpu():
                model = factory()
    return model


def _initialise(
    skeleton: nn.Module, names: Sequence[str], seed: int, memory: int
) -> dict[str, Tensor]:
    """Let the modules that own `names` initialise themselves, each seeded by its path."""
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    tensors: dict[str, Tensor] = {}
    for path, names_of_module in owners.items():
        module = skeleton.get_submodule(path)
        reset = initialiser(skeleton, path)
        if reset is None:
            raise ModelError(
                f"the model's parameters, {numbers.memory(parameter_bytes(skeleton))}, do not fit "
                f"in this machine's memory, {numbers.memory(memory)}, and {path or 'the model'!r} "
                f"({type(module).__name__}) has no reset_parameters to initialise it alone",
                hint="give weights=, or define reset_parameters on the module",
            )
        fakes = {k: p for k, p in module.named_parameters(recurse=False)}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, path))
            for key, fake in fakes.items():
                empty = torch.empty(fake.shape, dtype=fake.dtype, device="cpu")
                module.register_parameter(key, nn.Parameter(empty, fake.requires_grad))
            reset()
        for name in names_of_module:
            tensors[name] = module.get_parameter(name.rpartition(".")[2])
        for key, fake in fakes.items():
            module.register_parameter(key, fake)
    return tensors
