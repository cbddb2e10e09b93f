"""Parameters that a constructor makes and never writes: they are whatever their memory held.

    self.projection = nn.Parameter(torch.empty(64, 64))      and no nn.init after it

In one process that is a bad start, and on several ranks it is another weight on each: nothing that
compares two of them can be right. torch can write nan where it would leave memory as it is; what is
nan after that, nobody has written.

A module that `model()` gives a second time has none of its values either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.torch_private import is_fake

_HINT = (
    "initialise it in model(), with nn.init for example, or start from weights that have it "
    "(--weights)"
)


@contextmanager
def marked() -> Iterator[None]:
    """Within, memory that is made and not written is nan, where its dtype has one."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # whose one attribute no type checker knows
    fills = memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implem")
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
            yield
    finally:
        memory.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)


def with_numbers(
    factory: Callable[[], nn.Module], read: Container[str], say: Callable[[str], None]
) -> nn.Module:
    """Build a model; give parameters that it does not write small random numbers.

    Args:
        read: the names of those that the model computes with.
        say: receives a line for each of these. A run may have values for it from elsewhere.
    """
    with marked():
        model = factory()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _has_nan(parameter):
                parameter.normal_(std=0.02)
                if name in read:
                    say(f"{_said(name)}; a run refuses that, but for one from --weights")
    return model


def refuse(parameters: Mapping[str, Tensor]) -> None:
    """Refuse the first of these parameters, made while `marked`, that is not written.

    Raises:
        ModelError: there is one.
    """
    for name, parameter in parameters.items():
        if _has_nan(parameter):
            raise ModelError(_said(name), hint=_HINT)


def refuse_again(model: nn.Module, skeleton: nn.Module) -> None:
    """Refuse what `model()` gives if it is the module that an earlier call has given.

    Args:
        skeleton: that of the earlier call, whose parameters are fake.

    Raises:
        ModelError: it is the same one, so its parameters have lost their values.
    """
    fake = {id(parameter) for parameter in skeleton.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in fake:
            raise ModelError(
                f"model() gives the same {name!r} each time: the module was made before the call, "
                "or is kept from the first one, and each rank builds it to have its own part",
                hint="make the module inside of model(), anew in each call; what else needs it, as "
                "a loss that is its method, finds it in a global that model() sets",
            )


def _said(name: str) -> str:
    """The sentence for one of them."""
    return (
        f"model() makes the parameter {name!r} and writes no values into all of it, as by "
        "torch.empty alone: what its memory held would be its values, others on each rank"
    )


def _has_nan(parameter: Tensor) -> bool:
    tensor = parameter.detach()
    if is_fake(parameter) or tensor.is_meta:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    # A sum takes no memory; an infinite one may be nan too.
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())
