"""Which entries of a batch the model's forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from autopipe.batch.tree import empty_in
from autopipe.errors import ModelError

_PASS_ALL_ON = "torch.", "peft."
"""The packages whose wrappers of a module (`torch.compile`, `AveragedModel`, `PeftModel`) call it
with all that they are given."""


def forward_arguments(
    model: nn.Module, batch: Any, loss: Callable[..., Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Find the arguments of the model's forward in `batch`.

    With a loss, entries without a parameter in forward are left for the loss.

    Raises:
        ModelError: forward needs an argument that the batch lacks; or, without a loss, the batch
            has an entry that forward does not take; or it takes an empty container.
    """
    named = _naming(model)
    signature = inspect.signature(named.forward)
    parameters = signature.parameters.values()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        extra = [] if takes_all else [key for key in batch if key not in signature.parameters]
        kwargs = {key: item for key, item in batch.items() if key not in extra}
    else:
        args = tuple(batch) if isinstance(batch, Sequence) else (batch,)
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        extra = [] if takes_all else [str(i) for i in range(len(positional), len(args))]
        args = args[: len(args) - len(extra)]
    called = f"{type(named).__name__}.forward{signature}"
    if extra and loss is None:
        raise ModelError(
            f"inputs do not fit the model: {called} takes no {', '.join(extra)}, and there is no "
            "loss(outputs, batch) that could read it",
            hint="def loss(outputs, batch): return the scalar to be minimised; or leave these "
            "entries out of inputs()",
        )
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = list(batch) if isinstance(batch, Mapping) else f"{len(args)} positional"
        raise ModelError(
            f"inputs do not fit the model: {called} called with {given}: {error}",
            hint="a dict is given to forward by its names, a tuple in its order",
        ) from error
    for name, item in (*enumerate(args), *kwargs.items()):
        if (empty := empty_in(item, str(name))) is not None:
            raise ModelError(
                f"batch[{empty[0]!r}] is an empty {type(empty[1]).__name__}, and a plan has "
                "tensors, numbers, texts and None alone: forward on a rank would not get it",
                hint="leave it out, and let forward have it as a default; or give None",
            )
    return args, kwargs


def _naming(model: nn.Module) -> nn.Module:
    """The module whose forward names the arguments: a wrapper's is `forward(*args, **kwargs)`."""
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    held = [*model.children()]
    passes_on = kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
    if passes_on and len(held) == 1 and type(model).__module__.startswith(_PASS_ALL_ON):
        return _naming(held[0])
    return model
