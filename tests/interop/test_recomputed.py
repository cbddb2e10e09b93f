"""Which recomputed parts of layers have names in Megatron-LM; a sentence tells of other parts."""

from dataclasses import replace

import pytest

from autopipe.interop.layers import layers_of
from autopipe.interop.recomputed import Selected, selected
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import BlockClass
from tests.support.plans import chain

LAYERS = "h.0", "h.1"
PARTS = "ln_1", "attn.q", "attn.out", "ln_2", "mlp.gate", "mlp.up", "mlp.down"


def llama(*again: str, compiled: bool = False) -> Plan:
    """Two stages of a layer each, with what runs again of them."""
    plan = chain(2, 4)
    stages = tuple(
        replace(
            stage,
            parameters=tuple(f"{layer}.{part}.weight" for part in PARTS),
            recompute=tuple(name for name in again if name.startswith(layer)),
        )
        for stage, layer in zip(plan.stages, LAYERS, strict=True)
    )
    return replace(plan, stages=stages, blocks=(BlockClass("h.0", LAYERS),), compiled=compiled)


def both(*ops: str, compiled: bool = False) -> Plan:
    return llama(*(f"{layer}.{op}" for layer in LAYERS for op in ops), compiled=compiled)


SDPA, SOFTMAX = "attn/scaled_dot_product_attention/0", "attn/softmax/0"
GATE, UP, DOWN = (f"mlp.{name}/linear/0" for name in ("gate", "up", "down"))
SILU, Q = "mlp.act/silu/0", "attn.q/linear/0"


@pytest.mark.parametrize(
    ("plan", "modules", "left"),
    [
        (both(), "", ()),
        (both(SDPA), "core_attn", ()),
        (both("attn/matmul/0", SOFTMAX, "attn/matmul/1"), "core_attn", ()),
        (both(SOFTMAX), "", ("attention of 2 blocks",)),
        (both("ln_1/layer_norm/0", "ln_2/layer_norm/0"), "layernorm", ()),
        (both("attn.q_norm/rms_norm/0"), "", ("norms of 2 blocks",)),
        (both(SILU), "", ("activations of 2 blocks",)),
        (both(GATE, UP, SILU, "mlp/mul/0"), "mlp", ()),
        (both(GATE, UP, compiled=True), "mlp", ()),
        (both(UP, SILU), "", ("activations and up of 2 blocks",)),
        (both(Q, compiled=True), "", ("q of 2 blocks",)),
        (both(SDPA, Q, UP), "core_attn", ("q and up of 2 blocks",)),
        (llama(f"h.0.{SDPA}"), "", ("attention of 1 block",)),
        (llama(f"h.0.{SDPA}", f"h.1.{SDPA}", f"h.1.{UP}"), "core_attn", ("up of 1 block",)),
        (llama("h.0", f"h.1.{SDPA}"), "", ("attention of 1 block",)),
        (replace(both(SDPA), blocks=()), "", ("attention of 2 blocks",)),
    ],
    ids=[
        "nothing", "an attention", "its ops", "no product of it", "norms", "a norm inside",
        "activations", "an MLP", "a compiled MLP", "half an MLP", "no MLP", "attention and more",
        "one layer", "more of one layer", "a whole layer beside", "no layers",
    ],
)  # fmt: skip
def test_what_has_a_name(plan: Plan, modules: str, left: tuple[str, ...]) -> None:
    assert selected(plan, layers_of(plan)) == Selected(tuple(modules.split()), left)
