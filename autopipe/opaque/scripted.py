"""Replace modules that torch.jit has scripted or traced by plain modules that call their code.

    model.encoder     a ScriptModule, whose tensors cannot be replaced from outside
                ->    a `Scripted`, a plain module with parameters and buffers of the same names,
                      which it puts into the compiled code for each call

Compiled code has no Python that a trace could follow, so a `Scripted` always runs as it is
(`search`). A function that is compiled has no tensors of its own, and runs op by op in a trace
(`functions_op_by_op`).
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from autopipe.errors import CaptureError, Uncaptured
from autopipe.frontend import user_lines
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import is_fake, scripted_from

Compiled: TypeAlias = "torch.jit.ScriptFunction[Any, Any]"
"""A function that torch.jit has scripted, or traced on an example."""

_AS_IT_WAS = "use the module that it was made from"


def plain(model: nn.Module) -> nn.Module:
    """A model that shares all tensors with `model`, with a `Scripted` for each scripted part.

    It is `model` itself where no part is scripted.

    Raises:
        CaptureError: a part keeps something that is no buffer from one call to the next, or all of
            the model is scripted, which leaves nothing to cut.
    """
    parts = dict(_outermost(model))
    if not parts:
        return model
    if "" in parts:
        raise CaptureError(
            "the model is compiled by torch.jit as a whole: it runs in one piece, so "
            "there is nothing to cut",
            hint=f"{_AS_IT_WAS}, or script its parts: self.block = torch.jit.script(self.block)",
        )
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in (*_tensors_of(module).values(), *vars(module).values()):
            if isinstance(value, Tensor | torch.jit.ScriptFunction):
                memo[id(value)] = value
    known: dict[int, nn.Parameter] = {}
    for path, part in parts.items():
        _check(path, part)
        memo[id(part)] = Scripted(part, Code.of(part), known)
    return copy.deepcopy(model, memo)


@contextmanager
def functions_op_by_op() -> Iterator[None]:
    """Within, a function that torch.jit has compiled runs as a trace can follow it.

    A scripted one runs as the Python that it was made from. One that was traced on an example may
    compute otherwise than its Python, so its own ops run. After a few calls torch.jit runs a graph
    of its own for either, whose backward no trace sees: gradients would be lost.
    """
    fresh: dict[int, tuple[Compiled, Callable[..., Any]]] = {}

    def call(function: Compiled, *args: Any, **kwargs: Any) -> Any:
        python = scripted_from(function)
        if python is not None:
            return python(*args, **kwargs)
        if id(function) not in fresh:  # a copy has not been called yet
            fresh[id(function)] = function, _copied(function)
        return fresh[id(function)][1](*args, **kwargs)

    unoptimized = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    with patched(torch.jit.ScriptFunction, "__call__", call), unoptimized:
        yield


def _copied(function: Compiled) -> Callable[..., Any]:
    module = torch.jit.load(  # type: ignore[no-untyped-call]
        io.BytesIO(function.save_to_buffer(_extra_files={}))
    )
    return cast(Callable[..., Any], module.forward)


def _outermost(model: nn.Module, path: str = "") -> Iterator[tuple[str, torch.jit.ScriptModule]]:
    """The scripted modules that are in no other scripted module, with their paths."""
    if isinstance(model, torch.jit.ScriptModule):
        yield path, model
        return
    for name, child in model.named_children():
        yield from _outermost(child, f"{path}.{name}".strip("."))


class Code:
    """Compiled code without tensors, except constants; a copy of it is the same object."""

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self.module = module

    @classmethod
    def of(cls, script: torch.jit.ScriptModule) -> Code:
        """The code of a module, which keeps its tensors."""
        with torch.no_grad():
            code = cls(copy.deepcopy(script))
            code.let_go()
        return code

    @cached_property
    def parts(self) -> dict[str, torch.jit.ScriptModule]:
        """The compiled submodules by their paths, itself under ""."""
        return dict(self.module.named_modules())

    def let_go(self) -> None:
        """Be without parameters and buffers."""
        for part in self.parts.values():
            for name in _tensors_of(part):
                setattr(part, name, torch.empty(0))

    def __deepcopy__(self, memo: dict[int, Any]) -> Code:
        return Code(copy.deepcopy(self.module))


class Scripted(nn.Module):
    """Compiled code as a plain module; so are its submodules.

    Args:
        script: the compiled module, which has the tensors.
        code: its code.
        known: the parameters made so far, by the identity of the tensors they were made from.
    """

    def __init__(
        self, script: torch.jit.ScriptModule, code: Code, known: dict[int, nn.Parameter]
    ) -> None:
        super().__init__()
        self.training = bool(script.training)
        for name, parameter in script.named_parameters(recurse=False, remove_duplicate=False):
            self.register_parameter(name, known.setdefault(id(parameter), _parameter(parameter)))
        for name, tensor in script.named_buffers(recurse=False, remove_duplicate=False):
            self.register_buffer(name, tensor)
        for name, child in script.named_children():
            assert isinstance(child, torch.jit.ScriptModule)
            self.add_module(name, Scripted(child, Code(code.parts[name]), known))
        self.code = code  # last, since `__getattr__` asks it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the compiled code gives; it writes the buffers of this module."""
        if any(map(is_fake, tensors_in((args, kwargs, [*self.parameters()])))):
            raise Uncaptured(
                f"{user_lines.here()}: a module is called that is compiled by torch.jit",
                hint=_AS_IT_WAS,
            )
        modules, parts = dict(self.named_modules(remove_duplicate=False)), self.code.parts
        lent = {
            (path, name): tensor
            for path in parts
            for name, tensor in _tensors_of(modules[path]).items()
        }
        for path, part in parts.items():
            if part.training != modules[path].training:
                part.training = modules[path].training
        for (path, name), tensor in lent.items():
            setattr(parts[path], name, tensor)
        try:
            result = self.code.module(*args, **kwargs)
            for (path, name), tensor in lent.items():
                now = getattr(parts[path], name)
                if now is not tensor:  # a batch norm counts: self.batches = self.batches + 1
                    setattr(modules[path], name, now)
        finally:
            self.code.let_go()
        return result

    def __getattr__(self, name: str) -> Any:
        """A value that the compiled code has besides: a number, a text."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "code" not in vars(self):
                raise
            value = getattr(self.code.module, name)
        if callable(value):
            raise CaptureError(
                f"{user_lines.here()}: {name}() of a module that is compiled by torch.jit is "
                "called: only its forward is known",
                hint=_AS_IT_WAS,
            )
        return value


def _parameter(tensor: Tensor) -> nn.Parameter:
    """A tensor as an `nn.Parameter`: of code loaded from a file, parameters are plain tensors."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module itself."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


def _check(path: str, script: torch.jit.ScriptModule) -> None:
    """Refuse compiled code that keeps something besides its buffers from call to call.

    Raises:
        CaptureError: names the attribute and the user's line.
    """
    states = {name for name, _ in (*script.named_parameters(), *script.named_buffers())}
    graph = script.inlined_graph
    homes = {value: "" for value in [next(graph.inputs()).debugName()]}
    kept: dict[str, str] = {}
    for node in _nodes(graph):
        first = next((value.debugName() for value in node.inputs()), "")
        name = kept.get(first)
        if node.kind() in ("prim::GetAttr", "prim::SetAttr"):
            attribute = f"{homes.get(first, '')}.{node.s('name')}".strip(".")
            name = None if attribute in states else attribute
        if node.kind() == "prim::GetAttr":
            homes[node.output().debugName()] = attribute
        aliasing = node.kind() == "prim::GetAttr" or "(a" in node.schema()
        if name is not None and aliasing:
            kept |= {value.debugName(): name for value in node.outputs()}
        if name is not None and (node.kind() == "prim::SetAttr" or "!)" in node.schema()):
            raise CaptureError(
                f"{_place(node)}{path}, which is compiled by torch.jit, keeps {name} from one call "
                "to the next, which is no buffer",
                hint="make it one: self.register_buffer(...), of a tensor",
            )


def _nodes(block: Any) -> Iterator[Any]:
    """The nodes of a graph, those of its branches and loops too."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


_LINE = re.compile(r" # (\S+:\d+):\d+")
"""Where torch.jit writes the user's line behind a node."""


def _place(node: Any) -> str:
    """The user's line that a node was compiled from: `model.py:12: `; empty if it is not known.

    For the setting of an attribute it is the line of the new value.
    """
    places = [_LINE.search(str(part)) for part in (node, *(v.node() for v in node.inputs()))]
    return next((f"{found[1]}: " for found in places if found), "")
