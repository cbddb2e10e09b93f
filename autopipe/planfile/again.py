"""Describe in words what runs a second time in the backward of a plan's blocks.

h.0 ... h.7     attn/scaled_dot_product_attention/0, mlp.up/linear/0      attention, up
h.8             all of it
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import StagePlan
from autopipe.util.numbers import count, ranges

ACTIVATIONS = frozenset("gelu silu relu relu2 tanh sigmoid elu leaky_relu hardswish mish".split())
PRODUCTS = frozenset("linear addmm mm conv1d conv2d conv3d convolution embedding".split())
"""Ops that are called by the module that they are in."""
BETWEEN = frozenset("matmul bmm baddbmm einsum".split())
"""Ops that multiply two activations, unless one of them is a state."""
SOFTMAX = frozenset("softmax _softmax _safe_softmax".split())


class Repeated(NamedTuple):
    """Blocks in which the same ops run again.

    Attributes:
        ops: names of nodes, without the block's path; empty: the blocks run again whole.
    """

    blocks: tuple[str, ...]
    ops: tuple[str, ...]

    def __str__(self) -> str:
        """attention, q_proj and k_proj of 8 blocks; or, of whole ones, 8 blocks"""
        number = count(len(self.blocks), "block")
        return f"{words(self.ops)} of {number}" if self.ops else number

    def where(self) -> str:
        """attention, q_proj and k_proj of h.0-7; or, of whole ones, h.0-7"""
        places = folded(self.blocks)
        return f"{words(self.ops)} of {places}" if self.ops else places


def by_op(plan: Plan) -> bool:
    """Whether single ops run again, in blocks that do not."""
    return any(stage.ops_again for stage in plan.stages)


def offloaded(plan: Plan) -> tuple[str, ...]:
    """The blocks that keep what they make for backward in the host's memory."""
    return tuple(dict.fromkeys(path for stage in plan.stages for path in stage.offload))


def repeated(plan: Plan, stages: Iterable[StagePlan]) -> list[Repeated]:
    """The blocks of some stages grouped by what runs again in them; whole blocks first."""
    stages, paths = list(stages), {path for kind in plan.blocks for path in kind.members}
    ops: dict[str, list[str]] = {}
    for name in (name for stage in stages for name in stage.ops_again):
        path = block_of(name, paths)
        ops.setdefault(path, []).append(within(path, name))
    by_ops: dict[tuple[str, ...], list[str]] = {}
    for path in dict.fromkeys(path for stage in stages for path in stage.blocks_again):
        by_ops.setdefault((), []).append(path)
    for path, ops_again in ops.items():
        by_ops.setdefault(tuple(ops_again), []).append(path)
    return [Repeated(tuple(blocks), ops_again) for ops_again, blocks in by_ops.items()]


_NUMBERED = re.compile(r"(.*\.|)(\d+)((?:\.[^.\d][^.]*)*)")
"""A module's path around the last number in it."""


def folded(paths: Iterable[str]) -> str:
    """Paths of modules, consecutive numbers in one: `h.0-7, h.9, decoder.layers.0-3.mlp, head`."""
    alike: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        match = _NUMBERED.fullmatch(path)
        before, number, after = match.groups() if match else (path, "", "")
        alike.setdefault((before, after), []).extend([int(number)] if number else [])
    return ", ".join(
        f"{before}{run}{after}"
        for (before, after), numbers in alike.items()
        for run in ranges(sorted(numbers)).split(", ")
    )


def block_of(name: str, paths: Collection[str]) -> str:
    """The path of the given block that a node is in; for a node in none, its module's path."""
    module = name.partition("/")[0]
    path = module
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path or module


def within(path: str, name: str) -> str:
    """A node's name without the path of the block that it is in: `attn/softmax/0`, `/add/0`."""
    # Not `0.` within `0.10.fc`, nor behind another part of a path: `h.0` in `h.0.h.0.fc`.
    inside = re.sub(rf"(?<![\w.]){re.escape(path)}\.", "", name)
    return inside.removeprefix(path) if name.startswith(f"{path}/") else inside


def named(path: str, op: str) -> str:
    """The name of the node that `within` calls `op` in the block at `path`."""
    return f"{path}{op}" if op.startswith("/") else f"{path}.{op}"


def words(ops: Iterable[str]) -> str:
    """Some ops of a block in words: `attention, norms, q_proj and k_proj`.

    A product is named after its module. The ops of a module that multiplies activations or has a
    softmax are called attention. Ops of exchanges between tensor-parallel ranks are named as such.
    """
    *most, last = by_word(ops)
    return f"{', '.join(most)} and {last}" if most else last


def by_word(ops: Iterable[str]) -> dict[str, list[str]]:
    """Some ops of a block by the words that `words` has for them, products last."""
    names = sorted(ops, key=_is_product)
    attending = {module_of(name) for name in names if op_of(name) in SOFTMAX | BETWEEN}
    names_by_word: dict[str, list[str]] = {}
    for name in names:
        names_by_word.setdefault(_word(name, attending), []).append(name)
    return names_by_word


def _is_product(name: str) -> bool:
    return op_of(name) in PRODUCTS


def op_of(name: str) -> str:
    """The op of a node; for an exchange of a node's tensor, the op of that node."""
    return name.split("/")[1]


def module_of(name: str) -> str:
    """The path of the module that a node is in; empty outside of all modules."""
    return name.partition("/")[0]


def is_norm(name: str) -> bool:
    """Whether a node is a norm, or is in a module that is called so."""
    return "norm" in module_of(name).rpartition(".")[2] or "norm" in op_of(name)


def is_activation(name: str) -> bool:
    """Whether a node is an activation function."""
    return op_of(name) in ACTIVATIONS


def is_exchange(name: str) -> bool:
    """Whether a node is an exchange between tensor-parallel ranks."""
    return ">" in name


def _word(name: str, attending: Collection[str]) -> str:
    module, op = module_of(name), op_of(name)
    if is_exchange(name):
        return "what is exchanged"
    if is_norm(name):
        return "norms"
    if is_activation(name):
        return "activations"
    attends = module in attending and op not in PRODUCTS
    if op == "scaled_dot_product_attention" or attends:
        return "attention"
    if op == "mul":
        return "gated products"
    place = _last(module)
    if op in PRODUCTS and place and not place.isdigit():
        return place
    return f"{place}'s {op}" if place else op


def _last(module: str) -> str:
    """The last name of a module's path, with the one before it where it is a number."""
    *before, last = module.split(".")
    return f"{before[-1]}.{last}" if before and last.isdigit() else last
