"""Write the declarations of a stage's parameters and buffers: a tree of `States` by model path.

blocks.0.norm.weight  [32]      self.norm = States(weight=parameter(32), bias=parameter(32))
blocks.0.norm.bias    [32]      self.mlp = States({"0": States(weight=parameter(128, 32))})
blocks.0.mlp.0.weight [128, 32]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopipe.emit.pretty_print import INDENT, Call, Expression, behind, is_name, lay_out, text
from autopipe.ir.graph import StateSpec, shape_at

Tree = dict[str, "Tree | Expression"]


def declared(state: StateSpec) -> Call:
    """The declaration of one tensor: `parameter(128, 32)`, `buffer(dtype=torch.int64)`."""
    items = [str(dim) for dim in shape_at(state.held, 1)]
    if state.held.dtype != torch.float32:
        items.append(f"dtype={state.held.dtype}")
    if state.kind == "parameter" and not state.trainable:
        items.append("trainable=False")
    return Call("parameter" if state.kind == "parameter" else "buffer", tuple(items))


def assignments(states: Mapping[str, Expression], home: str = "") -> list[str]:
    """The lines that declare states, as a tree of `States` along their dotted names."""
    tree: Tree = {}
    for name, expression in states.items():
        *path, leaf = name.removeprefix(f"{home}.").split(".")
        branch = tree
        for part in path:
            below = branch.setdefault(part, {})
            assert isinstance(below, dict), f"{name} stands below a tensor"
            branch = below
        branch[leaf] = expression
    lines: list[str] = []
    for name, found in tree.items():
        if is_name(name):
            lines += lay_out(_expression(found), INDENT, f"self.{name} = ")
        else:
            lines += lay_out(Call("setattr", ("self", text(name), _expression(found))), INDENT)
    return lines


def _expression(tree: Tree | Expression) -> Expression:
    if not isinstance(tree, dict):
        return tree
    named = [
        behind(f"{name}=", _expression(subtree)) for name, subtree in tree.items() if is_name(name)
    ]
    numbered = [
        behind(f"{text(name)}: ", _expression(subtree))
        for name, subtree in tree.items()
        if not is_name(name)
    ]
    first = [Call("", tuple(numbered), "{}")] if numbered else []
    return Call("States", (*first, *named))


def constructor(declared: Sequence[str], *, draws: bool) -> list[str]:
    """The lines of `__init__`; none if it would be empty."""
    if not declared and not draws:
        return []
    path = " " * INDENT + "self._path = path"
    return [
        f"    def __init__(self{', path: str' * draws}) -> None:",
        " " * INDENT + "super().__init__()",
        *([path] if draws else []),
        *declared,
        "",
    ]
