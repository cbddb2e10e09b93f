"""Refuse, with the user's line, what a model does that no graph can express.

a hook on a gradient                  a graph has no backward of its own
a parameter frozen or unfrozen        which are trained is decided before the first forward
a parameter's gradient read           it holds what earlier micro-batches left
random numbers seeded by the model    every random op has a stream of its own (`seeds`)
hooks on what autograd saves          they may change it
x.data = y                            a tensor of a graph is made once
x.apply_(f)                           Python computes each element

Modes that forward enters stand in `refused_modes`. `x.data` is read as `x.detach()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autopipe.eager.draws import RefusedSeeds
from autopipe.eager.registered import new_parameters
from autopipe.errors import CaptureError, Uncaptured
from autopipe.frontend import user_lines
from autopipe.frontend.refusals import depends_on_values, takes_a_number
from autopipe.ir import opaque_ops
from autopipe.ir.tensors import (
    OwnData,
    counted,
    for_any_rows,
    indexes_by_a_number,
    is_another_value,
    is_one_for_all,
    tensors_in,
    write_one,
)
from autopipe.ir.torch_patches import seeing_saved_tensors_hooks
from autopipe.ir.torch_private import (
    is_control_flow,
    is_transformed,
    module_backward_hooks,
    no_function_modes,
    tensor_hooks,
)

AS_AN_OP = (
    "make what it does an op of the forward: a torch.autograd.Function that gives its input and "
    "whose backward changes the gradient"
)
"""The smallest edit in the place of a hook."""


def check_model(model: nn.Module) -> None:
    """Refuse hooks on gradients that a model has before it runs.

    Raises:
        CaptureError: names the module or the parameter, and the line of a hook.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.momentum is None:
            raise CaptureError(
                f"{path or 'the model'} is a SyncBatchNorm with momentum=None: Python reads how "
                "many batches it has seen, another number in every micro-batch",
                hint="give it a momentum, such as 0.1",
            )
        for hook in module_backward_hooks(module) if not path else ():
            raise CaptureError(
                f"{_at(hook)}the model has a backward hook, which may change gradients and is in "
                "no graph",
                hint=AS_AN_OP,
            )
    for name, parameter in model.named_parameters():
        for hook in filter(_is_users, chain(*tensor_hooks(parameter))):
            raise CaptureError(
                f"{_at(hook)}the parameter {name!r} has a hook on its gradient, which ranks that "
                "hold a part of it, or sum it, cannot call as one process does",
                hint="change the gradient in the optimizer, or let forward read a changed "
                "parameter: op(self.weight)",
            )


def _is_users(hook: Any) -> bool:
    """Whether a hook is the user's, not one of ours that sums gradients in a run."""
    return not str(getattr(hook, "__module__", "")).startswith("autopipe.")


def _at(function: Any) -> str:
    place = user_lines.begins(function)
    return f"{place}: " if place else ""


@contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """Within, refuse what a graph cannot express; the model runs there on real inputs.

    Raises:
        CaptureError: names the user's line.
    """
    with (
        seeing_saved_tensors_hooks(_saving, lambda hooks: None),
        new_parameters(model),
        RefusedSeeds(),
    ):
        yield


def _saving(hooks: saved_tensors_hooks) -> None:
    """Refuse the user's saved-tensor hooks; torch's own only move tensors or recompute them."""
    if isinstance(hooks, save_on_cpu) or type(hooks).__module__ == "torch.utils.checkpoint":
        return
    raise CaptureError(
        f"{user_lines.here()}: hooks on saved tensors are in no graph, and may change what "
        "backward computes with",
        hint="leave them out: autopipe chooses what is kept and what is recomputed",
    )


class RefusedCalls(TorchFunctionMode):
    """Refuses calls on tensors that a graph cannot express, in runs and in traces.

    A rank needs it in its trace: the model's file may have changed since the plan was made.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_transformed, tensors_in(args))):
            raise Uncaptured(
                f"{user_lines.here()}: runs under a transform of torch.func (vmap, grad, jvp), "
                "which torch.export cannot capture with the model's own parameters",
                hint="write the batched computation out: torch.einsum, matmul, broadcasting",
                whole=True,
                lines=True,
            )
        if func == _DATA:
            return _OWN.read(args[0])
        if func == _SET_DATA and _OWN.is_of(*args):
            return None
        if func == _SET_DATA and is_another_value(*args):
            return args[0].detach().copy_(args[1].detach())
        if func is opaque_ops.PLAIN and opaque_ops.can(*args):
            return opaque_ops.ctc_loss(*args, **(kwargs or {}))
        if func is torch.cdist:
            return opaque_ops.distances(*args, **(kwargs or {}))
        if func is nn.functional.cross_entropy and opaque_ops.is_soft(*args, **(kwargs or {})):
            return opaque_ops.soft_cross_entropy(*args, **(kwargs or {}))
        if func is Tensor.__setitem__ and is_one_for_all(*args):
            return write_one(*args)
        if func in _COUNTS:
            counts = counted(*args, **(kwargs or {}))
            if counts is None:
                raise depends_on_values(user_lines.here())
            return counts
        if (result := for_any_rows(func, args, kwargs or {})) is not None:
            return result
        refuse = _control_flow if is_control_flow(func) else _REFUSALS.get(func)
        if refuse is not None:
            refuse(*args, **(kwargs or {}))
        result = _OWN.noted(func, args, func(*args, **(kwargs or {})))
        if getattr(func, "__name__", "") != "__get__":  # looks at a shape, or takes a buffer
            _check_dense((args, kwargs or {}, result))
        return result


def _check_dense(tree: Any) -> None:
    with no_function_modes():  # to look at a layout is no call of the model's
        layout = next((t.layout for t in tensors_in(tree) if t.layout != torch.strided), None)
    if layout is not None:
        raise Uncaptured(
            f"{user_lines.here()}: forward computes with a tensor of layout "
            f"{str(layout).removeprefix('torch.')}, and a graph has dense tensors alone",
            hint="keep its indices and values, and write the product out: "
            "out.index_add(0, rows, values[:, None] * x[columns])",
            lines=True,
        )


def _post_hook(tensor: Tensor, hook: Any) -> None:
    raise CaptureError(
        f"{user_lines.here()}: a hook on a gradient is set while the model runs; no graph has it",
        hint=AS_AN_OP,
    )


def _parameter_hook(tensor: Tensor, hook: Any) -> None:
    if isinstance(tensor, nn.Parameter):
        raise CaptureError(
            f"{user_lines.here()}: forward sets a hook on a parameter, one more in every "
            "micro-batch",
            hint="change the gradient in the optimizer, or let forward read a changed parameter: "
            "op(self.weight)",
        )


def _tensor_hook(tensor: Tensor, hook: Any) -> None:
    _parameter_hook(tensor, hook)
    raise Uncaptured(
        f"{user_lines.here()}: a hook on a gradient is set while the model runs; no graph has it",
        hint=AS_AN_OP,
        whole=True,
    )


def _freeze(tensor: Tensor, requires_grad: bool = True) -> None:
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad != requires_grad:
        raise CaptureError(
            f"{user_lines.here()}: forward sets requires_grad={requires_grad} on a parameter of "
            f"shape {tuple(tensor.shape)}; which parameters are trained is decided when the model "
            "is planned",
            hint="set it where the model is built; self.weight.detach() keeps a gradient out of "
            "one use",
        )


def _gradient(tensor: Tensor) -> None:
    parameter = isinstance(tensor, nn.Parameter)
    if parameter or (tensor.requires_grad and (tensor.is_leaf or tensor.retains_grad)):
        raise CaptureError(
            f"{user_lines.here()}: forward reads the gradient of a "
            f"{'parameter' if parameter else 'tensor'}, which the micro-batches before this one "
            "have left",
            hint="read gradients in the optimizer"
            if parameter
            else "torch.autograd.grad(..., create_graph=True) gives a gradient and leaves none",
        )


def _elementwise(tensor: Tensor, *args: Any) -> None:
    raise Uncaptured(
        f"{user_lines.here()}: a function of Python's computes the elements of a tensor, which no "
        "graph has",
        hint="write it with ops of torch: torch.where(x > 0, a, b)",
        whole=True,
    )


def _parameter_data(tensor: Tensor, value: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        raise CaptureError(
            f"{user_lines.here()}: forward sets the .data of a parameter of "
            f"{tuple(tensor.shape)} {tensor.dtype} to a tensor of {tuple(value.shape)} "
            f"{value.dtype}",
            hint="parameter.data.copy_(value), of its shape and dtype; or initialise it in model()",
        )


def _data(tensor: Tensor, value: Tensor) -> None:
    _parameter_data(tensor, value)
    raise Uncaptured(
        f"{user_lines.here()}: the .data of a tensor is set while the model runs; no graph has it",
        hint="compute with a new tensor, or write the old one in place: x.copy_(value)",
    )


def _control_flow(*args: Any, **kwargs: Any) -> None:
    raise CaptureError(
        f"{user_lines.here()}: a loop inside the graph (while_loop and its like) cannot be split",
        hint="write it as a loop of Python's with a fixed number of rounds",
    )


def _inner_gradient(*args: Any, **kwargs: Any) -> None:
    raise Uncaptured(
        f"{user_lines.here()}: forward takes a gradient of its own, which is in no graph",
        hint="write the derivative out as ops of the forward, or put it into a "
        "torch.autograd.Function",
        whole=True,
        lines=True,
    )


def _function_behind(tensor: Tensor) -> None:
    empty = tensor.shape == (0,)  # checkpoints of torch 2.11 hold arguments so
    if tensor.requires_grad and not tensor.is_leaf and not empty:
        raise Uncaptured(
            f"{user_lines.here()}: forward reads .grad_fn of a tensor, whose hooks are in no graph",
            hint=AS_AN_OP,
            whole=True,
        )


def _write_where(tensor: Tensor, indices: Any, values: Any, *rest: Any, **named: Any) -> None:
    """Refuse `x[mask] = w` where w needs a gradient, whose size depends on the mask's values."""
    _read_at(tensor, indices)
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))
    if masks and isinstance(values, Tensor) and values.requires_grad:
        raise depends_on_values(user_lines.here())


def _read_at(tensor: Tensor, indices: Any) -> None:
    if indexes_by_a_number(indices):
        raise takes_a_number(user_lines.here())


def _accumulated(*args: Any, **kwargs: Any) -> None:
    raise CaptureError(
        f"{user_lines.here()}: forward runs a backward of its own, which adds to the gradients of "
        "parameters",
        hint="torch.autograd.grad(..., create_graph=True) gives a gradient and changes none",
    )


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_OWN = OwnData()
_COUNTS = (torch.bincount, Tensor.bincount)

_EFFECTS: dict[Any, Callable[..., None]] = {
    Tensor.register_hook: _parameter_hook,
    Tensor.register_post_accumulate_grad_hook: _post_hook,
    Tensor.backward: _accumulated,
    torch.autograd.backward: _accumulated,
    Tensor.requires_grad_: _freeze,
    Tensor.requires_grad.__set__: _freeze,  # type: ignore[attr-defined]
    Tensor.grad.__get__: _gradient,  # type: ignore[union-attr]
    _SET_DATA: _parameter_data,
}

_REFUSALS: dict[Any, Callable[..., None]] = {
    **_EFFECTS,
    Tensor.register_hook: _tensor_hook,
    _SET_DATA: _data,
    torch.autograd.grad: _inner_gradient,
    Tensor.grad_fn.__get__: _function_behind,  # type: ignore[union-attr]
    Tensor.apply_: _elementwise,
    Tensor.map_: _elementwise,
    Tensor.__getitem__: _read_at,
    Tensor.__setitem__: _write_where,
    Tensor.index_put: _write_where,
    Tensor.index_put_: _write_where,
    torch.index_put: _write_where,
    torch.index_put_: _write_where,
}


class RefusedEffects(TorchFunctionMode):
    """Refuses what not even a call that runs as it is may do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA:  # writes through it are then seen
            return _OWN.read(args[0])
        refuse = _EFFECTS.get(func)
        if func == _SET_DATA and _OWN.is_of(*args):
            return None
        if refuse is not None:
            refuse(*args, **(kwargs or {}))
        return _OWN.noted(func, args, func(*args, **(kwargs or {})))
