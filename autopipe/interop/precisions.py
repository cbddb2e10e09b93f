"""Choose the precision in which another runtime runs a plan; say so if it is not the plan's own.

plan            a runtime with bf16 and fp32     one with bf16-autocast and fp32
bf16            bf16                             bf16-autocast
bf16-autocast   bf16                             bf16-autocast
fp16            fp32                             fp32
"""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.planfile.contents import Plan

FP32 = frozenset({"fp32"})
KEPT = FP32 | {"bf16", "fp16"}
"""Those in which parameters and activations are of one dtype; and what gradients are summed in."""

AUTOCAST = FP32 | {"bf16-autocast", "fp16-autocast"}
EVERY = KEPT | AUTOCAST

_SUFFIX = "-autocast"


def bits(precision: str) -> str:
    """The dtype of its products: `bf16-autocast` -> `bf16`."""
    return precision.removesuffix(_SUFFIX)


def nearest(precision: str, said: frozenset[str]) -> str:
    """The precision of `said` that comes nearest: the same, the other kind of 16 bits, or fp32."""
    low = bits(precision)
    other = low if precision.endswith(_SUFFIX) else f"{low}{_SUFFIX}"
    return next((each for each in (precision, other) if each in said), "fp32")


def unlike(
    plan: Plan, said: frozenset[str], gradients: frozenset[str], optimizer: frozenset[str]
) -> Iterator[str]:
    """A sentence for each dtype of the plan that the runtime has nothing for."""
    if plan.precision not in said:
        yield f"the precision {plan.precision}: it runs in {nearest(plan.precision, said)}"
    if plan.grad_dtype not in gradients:
        yield f"sums of gradients in {plan.grad_dtype}: it has {', '.join(sorted(gradients))}"
    if plan.optimizer_dtype not in optimizer:
        masters = "" if plan.optimizer_dtype == "fp32" else ", without fp32 master weights"
        yield f"an optimizer of parameters in {plan.optimizer_dtype}{masters}"
