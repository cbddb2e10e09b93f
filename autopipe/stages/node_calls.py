"""Functions that the code of a lowered stage calls besides torch's ops: reads, autocast, results.

Emitted files call them too, by `runtime.emitted`.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from autopipe.ir.opaque_ops import run as run_opaque
from autopipe.planfile.parts import Read
from autopipe.rewriting.gpu_autocast import autocast_of_model
from autopipe.rewriting.gpu_kernels import kernel_of
from autopipe.stages import gathering
from autopipe.stages.op_tape import ASKED, PLACE, marking
from autopipe.stages.rng import draw
from autopipe.tracing.capture.value_guards import check

NODE_NAME = "autopipe_node"
"""The key in an fx node's meta under which its graph node's name stands."""


def place_of(error: BaseException) -> str:
    """The user's line whose op in a stage's code has raised an error; "": unknown."""
    passed = [*traceback.walk_tb(error.__traceback__)]
    return _place(reversed(passed))


def place_now() -> str:
    """The user's line whose op a stage's code runs now; "": it runs none."""
    return _place(traceback.walk_stack(inspect.currentframe()))


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The user's line of the innermost code of a stage; frames begin with the innermost.

    A module of torch.fx runs as Python that it has written itself, one line for each of its nodes:
    `embedding = torch.ops.aten.embedding.default(weight, tokens);  weight = tokens = None`.
    """
    for frame, line in frames:
        code = frame.f_code
        if code.co_name != "forward":
            continue
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and code is type(module).forward.__code__:
            written = linecache.getline(code.co_filename, line, frame.f_globals)
            name = re.split(r"\W", written.strip(), maxsplit=1)[0]
            return next((n.meta.get(PLACE, "") for n in module.graph.nodes if n.name == name), "")
    return ""


class Arrived(torch.autograd.Function):
    """Passes a tensor on that a stage receives, and hands out its gradient as backward makes it.

    In the `.grad` of a leaf, autograd lays a gradient out as the leaf lies ("gradient layout
    contract"); in the whole model nothing does, and sums in another layout add in another order.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, found: list[Tensor]) -> Tensor:
        ctx.found = found
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.found.append(gradient)
        return None, None


def arrived(tensor: Tensor) -> tuple[Tensor, list[Tensor]]:
    """A received tensor for a stage to read, and a list that backward puts its gradient into."""
    found: list[Tensor] = []
    if tensor.requires_grad:
        tensor = Arrived.apply(tensor, found)  # type: ignore[no-untyped-call]  # torch's `apply` has no types
    return tensor, found


def take(values: Any, position: int) -> Any:
    """One of the results of a block or of an op that has several."""
    return values[position]


def check_read(tensor: Tensor, kind: str, value: Any, place: str) -> None:
    """Compare what a read node reads with the record of it.

    Raises:
        ModelError: the value differs (`value_guards.check`).
    """
    check(tensor, Read(kind, value, place))


def under_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    op: Any,
    /,  # an op has a dtype of its own: `torch.arange(n, dtype=torch.float32)`
    *args: Any,
    **kwargs: Any,
) -> Any:
    """An op under the autocast that the model itself had around it (`autocast_of_model`)."""
    with autocast_of_model(device_type, dtype, enabled, args):
        return kernel_of(op)(*args, **kwargs)


def draw_under_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    op: Any,
    node: str,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A random op under the autocast that the model had around it (`stages.rng.draw`)."""
    return under_autocast(device_type, dtype, enabled, partial(draw, op, node), *args, **kwargs)


def opaque_under_autocast(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    op: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`opaque_ops.run` under the autocast that the model had around the op."""
    run = partial(run_opaque, op)
    return under_autocast(device_type, dtype, enabled, run, *args, **kwargs)


def saturated(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An op whose numbers are limited to the range of its first tensor of floating-point numbers,
    if autocast made that low.

    `torch.finfo(x.dtype).min` was read from the fp32 of the trace; in bf16 it would overflow, and
    the model's own code would have read that of bf16.
    """
    dtypes = [kwargs.get("dtype"), *(arg.dtype for arg in args if isinstance(arg, Tensor))]
    floating = (dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point)
    most = next((torch.finfo(dtype).max for dtype in floating), float("inf"))

    def within(arg: Any) -> Any:
        return min(max(arg, -most), most) if is_limit(arg) else arg

    kwargs = {name: within(arg) for name, arg in kwargs.items()}
    return kernel_of(op)(*map(within, args), **kwargs)


def is_limit(arg: Any) -> bool:
    """Whether a number is finite, and too large for bf16: one of the limits of fp32."""
    return isinstance(arg, float) and torch.finfo(torch.bfloat16).max < abs(arg) < float("inf")


def repeated(call: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that backward is to run a second time (`joint.run_again`).

    Args:
        call: an op; or the name of a function of autopipe's own.
    """
    with marking(ASKED, True):
        return kernel_of(_OURS.get(call, call))(*args, **kwargs)


_CALLS = draw, draw_under_autocast, under_autocast, saturated
_OURS = {call.__name__: call for call in _CALLS}


python_only = frozenset({draw, draw_under_autocast, check_read, *gathering.CALLS})
"""Functions in a stage's code that seed generators, read values or gather parameters: no compiler
may look inside."""
