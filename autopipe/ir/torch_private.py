"""The file that uses torch's private names, above all for fake tensors (without memory).

`torch.export` is public; its parts are not. autopipe needs these private names directly:

* `FakeTensorMode` (torch._subclasses), described in torch's own guide on fake tensors and used by
  every compiler on top of torch. `meta` tensors, its public sibling, will not do: ops that mix a
  meta parameter with a CPU input are refused, and their kernels save other tensors for backward.
* `SymInt.node.expr`, the only way from an exported size to the sympy expression behind it;
* `TorchDispatchMode` and an op's `_schema`, to see every op a model runs and what it writes;
* the decomposition of an LSTM, which gives fake tensors of a wrong shape before torch 2.13;
* a tensor's `_version`, which counts writes to it, and `_base`, what it is a view of;
* `tree_map` (torch.utils._pytree), to cast the tensors in whatever a model takes and gives;
* a module's `_parameters`, `_buffers` and `_modules`, for two modules that hold the same ones;
* the Python function that `torch.jit.script` has compiled, for a trace to follow;
* what torch.utils.checkpoint notes of a call, since no public name tells whether `early_stop` or
  `set_checkpoint_early_stop` holds there;
* whether a tensor belongs to a transform of `torch.func`, which no public function tells;
* hooks on gradients, to see that there are any, and the weights that an RNN lists, to lend others:
  `torch.func.functional_call` takes them back before a checkpoint's backward runs it once more.

Two functions of torch that constructors call cannot work on fake tensors: see `constructing`.
"""

from __future__ import annotations

import keyword
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, cast

import sympy
import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from autopipe.ir.torch_patches import patched

__all__ = [  # torch's own; what is defined here needs no list
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "TorchDispatchMode",
    "tree_map",
]


def in_code(base: str, target: str = "") -> str:
    """The code that reads `target` of `base`: `getattr(self.body, "0").weight`."""
    for part in filter(None, target.split(".")):
        name = part.isidentifier() and not keyword.iskeyword(part)
        base = f"{base}.{part}" if name else f'getattr({base}, "{part}")'
    return base


# For good: fx writes `self.lambda` and `aten.random_.from`, which are no Python, wherever a module
# of a graph is made or copied. Of all other names this is what it writes itself.
fx.graph._format_target = in_code
_name_of = vars(fx.graph)["_get_qualified_name"]
vars(fx.graph)["_get_qualified_name"] = lambda op: in_code(*_name_of(op).split(".", 1))


def _lstm_layer(*args: Any, **kwargs: Any) -> Any:
    results, states = _one_layer_lstm(*args, **kwargs)
    return results, tuple(h.squeeze(0) if h.ndim == 3 else h for h in states)


# For good: of fake tensors torch 2.11 and 2.12 make an LSTM's last states [layers, 1, b, h].
if torch.__version__ < "2.13":
    _one_layer_lstm: Any = decompositions.one_layer_lstm
    vars(decompositions)["one_layer_lstm"] = _lstm_layer


_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(dir(nn.Module()))


def in_graph_module(name: str) -> str:
    """The name of a state or a module in a graph module, which has a `graph` and a `code` itself;
    no name that a user writes ends in `!`."""
    return ".".join(f"{part}!" if part in _TAKEN else part for part in name.split("."))


def fake_mode() -> FakeTensorMode:
    """A mode in which ops compute only shapes, dtypes and strides; real operands are allowed."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake: it has no values."""
    return isinstance(tensor, FakeTensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of a transform of torch.func: it stands for a batch or a dual."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


@contextmanager
def no_saved_tensors_hooks() -> Iterator[None]:
    """Within, no hooks see what autograd saves: torch.func refuses to run where there are any."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def no_modes() -> AbstractContextManager[object]:
    """Within, no mode sees an op: no trace records it."""
    return cast(AbstractContextManager[object], _disable_current_modes())


def no_function_modes() -> AbstractContextManager[object]:
    """Within, no mode sees a call of torch, above all none that sets whether gradients are on."""
    return cast(AbstractContextManager[object], torch._C.DisableTorchFunction())


def outside_fake_mode() -> AbstractContextManager[object]:
    """Within, make real tensors although a fake mode is active."""
    return cast(AbstractContextManager[object], unset_fake_temporarily())


@contextmanager
def quiet() -> Iterator[None]:
    """Within, torch logs nothing of an error that it raises as well, and the caller catches: of an
    op that has no version for fake tensors, or of a condition on sizes that no line has made."""
    sizes = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with patched(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True):
        sizes.addFilter(_is_no_error)
        try:
            yield
        finally:
            sizes.removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Unable to find user code")


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same shape, strides, dtype and device in `mode`."""
    return cast(torch.Tensor, mode.from_tensor(tensor))


@contextmanager
def lists_as_one_read() -> Iterator[None]:
    """Within, `tolist` of a fake tensor is one call, as for a real one, not one `item` each."""
    with patched(FakeTensor, "tolist", torch.Tensor.tolist):
        yield


def expression(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def hint(size: torch.SymInt) -> int | None:
    """What a symbolic size is in the example; None: that depends on values of tensors."""
    return cast("int | None", size.node.hint)


def is_control_flow(op: object) -> bool:
    """Whether an op takes subgraphs as arguments: `cond`, `while_loop`, `map`."""
    return isinstance(op, HigherOrderOperator)


@cache
def formal_arguments(op: Any) -> Mapping[str, Any]:
    """The names of an op's arguments, in order, with their defaults; None if there is none."""
    taken = getattr(getattr(op, "_schema", None), "arguments", ())
    return {argument.name: argument.default_value for argument in taken}


@cache
def argument_types(op: Any) -> Mapping[str, str]:
    """The names of a torch op's arguments, in order, with their types: `{"n": "int"}`."""
    return {argument.name: str(argument.type) for argument in op._schema.arguments}


@cache
def writes(op: Any) -> tuple[int, ...]:
    """Positions of the arguments that an op writes in place; empty if `op` is no torch op."""
    schema = getattr(op, "_schema", None)
    aliases = [] if schema is None else [argument.alias_info for argument in schema.arguments]
    return tuple(i for i, alias in enumerate(aliases) if alias is not None and alias.is_write)


@cache
def views(op: Any) -> bool:
    """Whether an op's results may share memory with its first argument."""
    schema = getattr(op, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that one call of an op writes in place."""
    names = [*formal_arguments(op)] if writes(op) else []
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(names[position]) for position in writes(op)]


def scripted_from(function: torch.jit.ScriptFunction[Any, Any]) -> Callable[..., Any] | None:
    """The Python function that torch.jit has scripted; None: it has traced one on an example."""
    attributes = vars(function)  # only a scripted one is given a name
    return attributes["_torchdynamo_inline"] if "__name__" in attributes else None


def second_run_of(pack: Callable[[torch.Tensor], object]) -> tuple[bool, bool]:
    """How a call of a non-reentrant checkpoint runs again: (stops early, has a `context_fn`).

    Args:
        pack: the hook by which this call packs saved tensors; the call is read from its closure.
    """
    call = _read_by(pack, "frame")
    context = _read_by(call.recompute_fn, "recompute_context")
    return call.early_stop, not isinstance(context, nullcontext)


def _read_by(function: Any, name: str) -> Any:
    """The value of a variable of the enclosing code that a function closes over."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, through any of its views."""
    return int(tensor._version)


def viewed(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a view of, in autograd's eyes; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def share_members(module: nn.Module, other: nn.Module) -> None:
    """Make `module` share the dicts of parameters, buffers and submodules with `other`: a tensor
    replaced in one of them is replaced in both, and two calls of one module stay one module."""
    module._parameters, module._buffers = other._parameters, other._buffers
    module._modules = other._modules


def buffer_names(module: nn.Module) -> set[str]:
    """The names of a module's own buffers, of those that are None as well."""
    return set(module._buffers.keys())  # those of a scripted module can only be asked for keys


def lend(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Let `module` compute with `tensor` in the place of its own parameter or buffer `name`."""
    tensors = module._parameters if name in module._parameters else module._buffers
    cast(dict[str, object], tensors)[name] = tensor
    inside = vars(module)
    if name in inside.get("_flat_weights_names", ()):
        inside["_flat_weights"][inside["_flat_weights_names"].index(name)] = tensor


@contextmanager
def hooks_put_aside(module: nn.Module) -> Iterator[None]:
    """Within, a module has no hooks of its own; one that is added now is gone afterwards."""
    names = [name for name in vars(module) if name in _HOOKS]
    before = {name: vars(module)[name] for name in names}
    vars(module).update({name: type(hooks)() for name, hooks in before.items()})
    try:
        yield
    finally:
        vars(module).update(before)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def constructing() -> Iterator[None]:
    """Within, make the operations of constructors on parameters work for fake parameters.

    Two private functions of torch have no public way in:

    * `Module._apply`, the inside of `.to(dtype)`, `.half()` and their like, swaps fake parameters
      for others, which goes wrong where anything holds a weak reference. Here a fake one stays the
      same object, on the CPU: where a model computes is for the plan to say.
    * `_no_grad_trunc_normal_`, which draws until no value is out of bounds. A fake tensor has none.
    """
    apply: Callable[..., object] = nn.Module._apply
    draw: Callable[..., torch.Tensor] = nn.init._no_grad_trunc_normal_

    def convert(self: nn.Module, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        parameters = dict(self._parameters)
        for name, parameter in parameters.items():
            if parameter is not None and is_fake(parameter):
                with torch.no_grad():
                    parameter.data = fn(parameter).to("cpu")
                self._parameters.pop(name)
        apply(self, fn, recurse=False)
        parameters.update(self._parameters)
        self._parameters.clear()
        self._parameters.update(parameters)
        return self

    def drawn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if is_fake(tensor) else draw(tensor, *args, **kwargs)

    with patched(nn.Module, "_apply", convert), patched(nn.init, "_no_grad_trunc_normal_", drawn):
        yield


def fake_parameter(mode: FakeTensorMode, parameter: nn.Parameter) -> nn.Parameter:
    """A fake copy of a parameter with its attributes, always on the CPU."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        like = fake_like(mode, parameter.detach()).to("cpu")
    fake = nn.Parameter(like, parameter.requires_grad)
    fake.__dict__.update(parameter.__dict__)
    return fake


def module_backward_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """The hooks on the gradients that go through a module."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def tensor_hooks(tensor: torch.Tensor) -> tuple[list[Callable[..., object]], ...]:
    """The hooks on the gradient of a tensor: those that may change it, those after it is summed."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*(tensor._backward_hooks or {}).values()], [*(after or {}).values()]


def storage_key(tensor: torch.Tensor) -> int:
    """A key of a tensor's storage: equal for two tensors, real or fake, that share memory.

    A sparse one is made of several tensors, and counts as its own.
    """
    dense = tensor.layout == torch.strided
    return int(tensor.untyped_storage()._cdata) if dense else id(tensor)
