"""Where a rank's own parameters and buffers come from; no rank ever holds the others'.

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

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from autopipe import numbers
from autopipe.building import Factory, in_turn, on_cpu
from autopipe.errors import ModelError
from autopipe.fake import is_fake
from autopipe.graph import Graph
from autopipe.randomness import seed as derive_seed
from autopipe.runtime.weights import read
from autopipe.source import available_memory, parameter_bytes


def materialize(
    graph: Graph,
    names: Sequence[str],
    skeleton: nn.Module,
    source: nn.Module | Factory,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    memory: int | None = None,
    part: Callable[[str, Tensor], Tensor] | None = None,
    optional: Collection[str] = (),
    say: Callable[[str], None] | None = None,
) -> dict[str, Tensor]:
    """The tensors of `names` on `device`: parameters as `nn.Parameter`, buffers and constants.

    Args:
        skeleton: the model with fake parameters and real buffers.
        source: the model with its weights, or what constructs it.
        weights: what `autopipe.runtime.weights` reads.
        seed: of the initialisation.
        memory: bytes of host memory there are; None asks the system.
        part: what this rank keeps of a tensor, by its name; the tensor itself where that is all.
        optional: those of `names` that are left out where they are not to be had.
        say: takes a line of talk about `weights`.

    Raises:
        ModelError: a tensor is not to be had; the sentence says which and why.
    """
    states = {name: graph.states[name] for name in names}
    found: dict[str, Tensor] = {n: graph.constants[n] for n in names if n in graph.constants}
    wanted = [name for name, state in states.items() if state.kind == "parameter"]
    if weights is not None:
        saved = [n for n in names if states[n].kind == "parameter" or states[n].persistent]
        saved = [n for n in saved if n not in found]
        found |= read(Path(weights), graph, saved, optional, say)
        model = skeleton
    elif isinstance(source, nn.Module):
        model = source
    else:
        memory = available_memory() if memory is None else memory
        if parameter_bytes(skeleton) <= memory:
            model = _build_in_turn(source, seed)
        else:
            found |= _initialise(skeleton, [n for n in wanted if n not in optional], seed, memory)
            model = skeleton
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
        if part is not None:
            tensor = part(name, tensor)
        if state.kind != "parameter":
            result[name] = tensor.to(device)
        elif isinstance(tensor, nn.Parameter) and tensor.device == torch.device(device):
            result[name] = tensor
        else:
            result[name] = nn.Parameter(tensor.detach().to(device), state.trainable)
    return result


def _build_in_turn(factory: Factory, seed: int) -> nn.Module:
    """Build the model while no other process of this machine and user does."""
    with in_turn(), torch.random.fork_rng(devices=[]):
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
    found: dict[str, Tensor] = {}
    for path, own in owners.items():
        module = skeleton.get_submodule(path)
        reset = _initialiser(skeleton, path)
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
                empty = torch.empty(fake.shape, dtype=fake.dtype)
                module.register_parameter(key, nn.Parameter(empty, fake.requires_grad))
            reset()
        for name in own:
            found[name] = module.get_parameter(name.rpartition(".")[2])
        for key, fake in fakes.items():
            module.register_parameter(key, fake)
    return found


def _initialiser(skeleton: nn.Module, path: str) -> Callable[[], object] | None:
    """What initialises the module at `path`.

    transformers' convention comes first: its models overrule `reset_parameters` in a method that
    is called with every module, parents after their children, whose parameters they may scale.
    """
    shared = getattr(skeleton, "_init_weights", None)
    if callable(shared):
        parts = path.split(".") if path else []
        paths = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
        return lambda: [shared(skeleton.get_submodule(own)) for own in paths]
    own: object = getattr(skeleton.get_submodule(path), "reset_parameters", None)
    return own if callable(own) else None
