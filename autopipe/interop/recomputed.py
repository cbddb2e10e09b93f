"""Tell what runs again in backward of a plan's layers: all, or parts with names in Megatron-LM.

    attention                        core_attn    from its first product to its second
    the layer's own norms            layernorm    Megatron's are the one before attention, and the
                                                  one before the MLP
    of an MLP all products but one   mlp          backward does not read what the last one makes

A name holds for all layers: ops that only some layers run again have none.

(Megatron-LM core_r0.16, `recompute_modules` in megatron/core/transformer/transformer_config.py; its
`moe_act`, `moe`, `shared_experts` and `mla_up_proj` are modules that no plan can be known to have.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from autopipe.interop.layers import Layers
from autopipe.planfile.again import (
    BETWEEN,
    PRODUCTS,
    Repeated,
    by_word,
    is_activation,
    module_of,
    named,
    op_of,
    repeated,
)
from autopipe.planfile.contents import Plan

NAMES = ("core_attn", "layernorm", "mlp")

MLP = re.compile(r"mlp|ffn|feed_?forward", re.IGNORECASE)
"""What modules are called that are one. In a compiled stage nothing else shows it: activations run
again anyway, and are not told."""


class Selected(NamedTuple):
    """The ops that run again in blocks that keep the rest.

    Attributes:
        modules: Megatron's names for the ops that run again in every layer.
        left: ops without such a name, as texts: `q_proj and k_proj of 8 blocks`.
    """

    modules: tuple[str, ...]
    left: tuple[str, ...]


def recomputes_all(plan: Plan, layers: Layers) -> bool:
    """Whether every layer of a plan runs again in backward."""
    again = {block for stage in plan.stages for block in stage.blocks_again}
    return bool(again) and again >= {layer for own in layers.stages for layer in own}


def ops_again(plan: Plan) -> list[Repeated]:
    """The blocks of which single ops run again, by what does."""
    return [own for own in repeated(plan, plan.stages) if own.ops]


def selected(plan: Plan, layers: Layers) -> Selected:
    """The ops of a plan that run again, as far as Megatron-LM has names for them."""
    groups = [(own, dict(_modules(plan, own))) for own in ops_again(plan)]
    of = {block: modules.keys() for own, modules in groups for block in own.blocks}
    every = [of.get(layer, {}.keys()) for stage in layers.stages for layer in stage]
    modules = tuple(name for name in NAMES if every and all(name in own for own in every))
    left = []
    for own, found in groups:
        said = {op for name in modules for op in found.get(name, ())}
        rest = tuple(op for op in own.ops if op not in said)
        left += [str(own._replace(ops=rest))] if rest else []
    return Selected(modules, tuple(left))


def _modules(plan: Plan, own: Repeated) -> Iterator[tuple[str, list[str]]]:
    """Megatron's names for what runs again of some blocks, and the ops that each is for."""
    words = by_word(own.ops)
    attention = words.pop("attention", [])
    if any(op_of(op) in BETWEEN or op_of(op) == "scaled_dot_product_attention" for op in attention):
        yield "core_attn", attention
    norms = [op for op in words.pop("norms", []) if "." not in module_of(op)]
    if norms:
        yield "layernorm", norms
    parts: dict[str, list[str]] = {}
    for op in (op for ops in words.values() for op in ops):
        parts.setdefault(module_of(op).partition(".")[0], []).append(op)
    mlps = [ops for module, ops in parts.items() if _is_mlp(plan, own.blocks[0], module, ops)]
    if mlps:
        yield "mlp", [op for ops in mlps for op in ops]


def _is_mlp(plan: Plan, block: str, module: str, ops: list[str]) -> bool:
    """Whether ops of a module are all of an MLP but its last product."""
    if not module:
        return False
    prefix = named(block, module)
    parameters = [name for stage in plan.stages for name in stage.parameters]
    layers = {name.rpartition(".")[0] for name in parameters if name.startswith(f"{prefix}.")}
    again = {named(block, module_of(op)) for op in ops if op_of(op) in PRODUCTS}
    activated = any(map(is_activation, ops)) or (plan.compiled and MLP.search(module) is not None)
    return activated and bool(again) and again < layers and len(layers - again) == 1
