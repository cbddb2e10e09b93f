"""Trace one of several equal modules, and let export run a stub in place of each other one.

    model.layers.0   forward                  begin([x], 0)  its ops ...  end([y], 0)
    model.layers.1   a stand-in               stand_in([y], 0) -> [z]
    model.layers.2   a stand-in               stand_in([z], 0) -> [...]

The results of a stub have the shapes and dtypes of the first block's. When the exported program
becomes a graph, the nodes between `begin` and `end` are copied for every `stand_in`, under the
names of the module that it replaces: the graph is the one that a full trace gives.

`same_modules` has proved which modules are equal; here the arguments are compared once more, since
their sizes are symbols now. A mismatch raises `BlocksDiffer`, and then the model is traced in full.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.eager.frozen import frozen
from autopipe.ir.blocks import Visit
from autopipe.ir.graph import Node, Ref, State, Value
from autopipe.ir.torch_private import expression, storage_key
from autopipe.opaque.calls.trees import distinct_tensors, parts_of, whole_of
from autopipe.rewriting.checkpoint_calls import like, moved
from autopipe.tracing.capture.module_makes import modes

BEGIN = "autopipe.begin.default"
END = "autopipe.end.default"
STAND_IN = "autopipe.stand_in.default"


class BlocksDiffer(Exception):
    """Raised where a block cannot stand in for another, though their modules look alike."""


@dataclass(frozen=True)
class _Result:
    """Shape and dtype of a result of the first block; sizes may be symbols."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


_results: dict[int, list[_Result]] = {}
"""The results of each block by its number, during an export: ops cannot take them as arguments."""


@torch.library.custom_op("autopipe::begin", mutates_args=())
def begin_op(tensors: list[Tensor], number: int) -> None:
    """Marks in a traced graph the beginning of a block with the arguments `tensors`."""


@torch.library.custom_op("autopipe::end", mutates_args=())
def end_op(tensors: list[Tensor], number: int) -> None:
    """Marks in a traced graph the end of a block with the results `tensors`."""


@torch.library.custom_op("autopipe::stand_in", mutates_args=())
def stand_in_op(tensors: list[Tensor], number: int) -> list[Tensor]:
    """Replaces the ops of a block that equals block `number`; a parameter may come last."""
    raise NotImplementedError("a stand-in is for traces alone")


@begin_op.register_fake
def _(tensors: list[Tensor], number: int) -> None:
    return None


@end_op.register_fake
def _(tensors: list[Tensor], number: int) -> None:
    return None


@stand_in_op.register_fake
def _(tensors: list[Tensor], number: int) -> list[Tensor]:
    return [
        torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)
        for like in _results[number]
    ]


@dataclass(frozen=True)
class _First:
    """The arguments and results of a block that is traced for its equals."""

    number: int
    arguments: Any
    output: Any
    carrying: tuple[bool, ...]


@contextmanager
def standing_in(model: nn.Module, alike: Mapping[str, str]) -> Iterator[None]:
    """Within, run a stub for each module in `alike` (path -> path of its equal, see `Likeness`)."""
    firsts: dict[str, list[_First]] = {path: [] for path in alike.values()}
    numbers = itertools.count()
    with ExitStack() as until:
        until.callback(_results.clear)
        for path, first in [*zip(firsts, firsts, strict=True), *alike.items()]:
            module = model.get_submodule(path)
            module.forward = _forward(module, path, firsts[first], numbers)
            until.callback(delattr, module, "forward")
        yield


def _forward(
    module: nn.Module, path: str, firsts: list[_First], numbers: Iterator[int]
) -> Callable[..., Any]:
    """The forward of a module: a stub if one of the `firsts` had equal arguments."""
    original = module.forward
    called = False

    def traced(args: Any, kwargs: Any, described: Any, given: list[Tensor]) -> Any:
        number = next(numbers)
        begin_op(given, number)
        output = original(*args, **kwargs)
        new = [t for t in distinct_tensors(output) if not any(t is tensor for tensor in given)]
        _results[number] = [_Result(tuple(t.shape), t.stride(), t.dtype, t.device) for t in new]
        carrying = tuple(tensor.requires_grad for tensor in new)
        firsts.append(_First(number, described, parts_of(output, [*given, *new]), carrying))
        end_op(new, number)
        return output

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        if called:
            raise BlocksDiffer(f"{path} is called again")
        called = True
        given = list(distinct_tensors((args, kwargs)))
        described = _comparable((args, kwargs), given)
        first = next((first for first in firsts if first.arguments == described), None)
        if first is None:
            return traced(args, kwargs, described, given)
        trained = [p for p in module.parameters() if p.requires_grad][:1]
        new = stand_in_op([*given, *trained], first.number)
        if tuple(tensor.requires_grad for tensor in new) != first.carrying:
            raise BlocksDiffer(f"a gradient flows through {path} otherwise than through its like")
        return whole_of(first.output, [*given, *new])

    return forward


def _comparable(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Arguments, and torch's modes around the call, in a form that can be compared."""
    storages: dict[int, int] = {}
    looks = tuple(
        (
            tuple(map(_size, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))),
            *(tensor.dtype, tensor.device, tensor.requires_grad),
            storages.setdefault(storage_key(tensor), number),
        )
        for number, tensor in enumerate(tensors)
    )
    return frozen(parts_of(tree, tensors)), looks, modes()


def _size(size: Any) -> Any:
    """A size that can be compared without a guard on it."""
    return expression(size) if isinstance(size, torch.SymInt) else size


@dataclass
class Span:
    """The nodes of the first block in the graph under construction: positions [first, stop).

    `around` is the text of the `CheckpointCall` around the block, if there is one.
    """

    scopes: tuple[str, ...]
    arguments: tuple[Value, ...]
    first: int
    around: str = ""
    stop: int = 0
    results: tuple[Value, ...] = ()

    def copied(
        self,
        nodes: Sequence[Node],
        scopes: tuple[str, ...],
        arguments: Sequence[Value],
        name: Callable[[tuple[str, ...], str], str],
        states: Mapping[str, object],
    ) -> tuple[list[Node], tuple[Value, ...]]:
        """The nodes and results of a module that equals this one.

        Args:
            nodes: the nodes of the graph so far.
            scopes: the module calls around the other module, its own call last.
            arguments: those of the other module; any beyond this block's number are ignored.
            name: makes a node's name from its scopes and its op.
            states: the model's states by name.

        Raises:
            BlocksDiffer: a node reads a value that is neither an argument nor a state of the block.
        """
        home, there = self.scopes[-1], scopes[-1]
        if Visit.of(home).number or Visit.of(there).number:
            raise BlocksDiffer(f"{home} or {there} is called more than once")
        known: dict[Value, Value] = {}
        for argument, counterpart in zip(self.arguments, arguments, strict=False):
            if known.setdefault(argument, counterpart) != counterpart:
                raise BlocksDiffer(f"{home} takes one tensor where {there} takes two")
        added: list[Node] = []
        before = nodes[: self.first]
        for node in nodes[self.first : self.stop]:
            depth = len(self.scopes)
            if node.scopes[:depth] != self.scopes:
                raise BlocksDiffer(f"{node.name} ran in {node.scopes}, not in {home}")
            inner = tuple(_moved(scope, home, there) for scope in node.scopes[depth:])
            for value in node.values():
                if value not in known:
                    known[value] = _counterpart(value, home, there, states, before)
            alike = replace(
                node.reading(known),
                name=name((*scopes, *inner), node.op),
                scopes=(*scopes, *inner),
            )
            added.append(alike)
            for number in range(len(node.outputs)):
                known[Ref(node.name, number)] = Ref(alike.name, number)
        return added, tuple(known[result] for result in self.results)

    def called_from(self, copies: Sequence[Node], around: str) -> Iterator[Node]:
        """Copies of the nodes, in other calls of checkpoints.

        Args:
            around: the text of the checkpoint's call around the copies; "": none.

        Raises:
            BlocksDiffer: one block runs again in backward, and the other does not, or otherwise.
        """
        if not like(self.around, around):
            raise BlocksDiffer(f"{self.scopes[-1]} runs again in backward as its copy does not")
        for node in copies:
            yield replace(node, again=moved(node.again, around, node.scopes[len(self.scopes) - 1]))


def _moved(path: str, home: str, there: str) -> str:
    if not path.startswith(f"{home}."):
        raise BlocksDiffer(f"{path} runs in a call of {home}")
    return there + path.removeprefix(home)


def _counterpart(
    value: Value, home: str, there: str, states: Mapping[str, object], before: Sequence[Node]
) -> Value:
    """The equal block's counterpart of a state of the first block, or of a cast of such a state
    made before the block: buffers read in 16 bits are all cast before the first block."""
    if isinstance(value, State):
        return _state_counterpart(value, home, there, states)
    cast = next((node for node in before if Ref(node.name) == value and node.short == "to"), None)
    if cast is not None and isinstance(state := cast.args[0], State):
        alike = cast.reading({state: _state_counterpart(state, home, there, states)})
        for node in before:
            if (node.op, node.args, node.kwargs) == (alike.op, alike.args, alike.kwargs):
                return Ref(node.name)
    raise BlocksDiffer(f"{value} comes into {home} from outside, and not as an argument")


def _state_counterpart(value: State, home: str, there: str, states: Mapping[str, object]) -> State:
    """The equal block's parameter or buffer that corresponds to one of the first block."""
    moved = _moved(value.name, home, there)
    if moved not in states:
        raise BlocksDiffer(f"{moved} is missing")
    return State(moved)
