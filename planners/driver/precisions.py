"""Choose the precision of a plan.

asked for        that precision, or a refusal
not asked for    on GPUs bf16; if the model cannot be planned in it, bf16-autocast, or else fp32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import LocalSpec
from autopipe.errors import AutopipeError, ModelError
from autopipe.planners.driver.arguments import on_gpus
from autopipe.tracing.capture.low_precision import KEPT
from autopipe.util.progress import Say

T = TypeVar("T")


def usual_precisions(cluster: Cluster | LocalSpec, model: nn.Module, say: Say) -> Sequence[str]:
    """The precisions to try in order if none is asked for: fp32 alone, except for an fp32 model on
    GPUs that have bf16."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        return ("fp32",)
    if not on_gpus(cluster):
        return ("fp32",)
    if isinstance(cluster, LocalSpec):
        bf16, fp16 = torch.cuda.is_bf16_supported(including_emulation=False), True
    else:
        bf16, fp16 = (all(d in of.flops for of in cluster.devices) for d in ("bf16", "fp16"))
    if not bf16:
        if fp16:
            say("precision: fp32, as not all GPUs have bf16; --precision fp16 is quicker there")
        return ("fp32",)
    say("precision: bf16 with fp32 master weights; --precision asks for another")
    return "bf16", "bf16-autocast", "fp32"


def in_the_first(precisions: Sequence[str], planned: Callable[[str], T], say: Say) -> T:
    """The result of `planned` in the first precision in which the model can be planned.

    Raises:
        ModelError: there is none; the error of the last precision, or one that two have in common.
    """
    refusal: ModelError | None = None
    for precision in precisions:
        try:
            found = planned(precision)
        except ModelError as error:
            again = refusal is not None and refusal.message == error.message
            if again or precision == precisions[-1]:
                raise
            refusal = error
        else:
            if refusal is not None:
                say(
                    f"precision: {precision}; in {precisions[0]} the model is refused: "
                    f"{refusal.message}; --precision {precisions[0]} says how to mend it"
                )
            return found
    raise AssertionError("no precision to plan in")


def dtypes_of(precision: str, gradients: str | None, optimizer: str | None) -> dict[str, Any]:
    """The three words of a precision: itself, `grad_dtype` and `optimizer_dtype`.

    Raises:
        AutopipeError: a dtype is asked for that does not go with the precision or with the other.
    """
    known = ("fp32", precision) if precision in KEPT else ("fp32",)
    for name, asked in (("grad_dtype", gradients), ("optimizer_dtype", optimizer)):
        if asked is not None and asked not in known:
            raise AutopipeError(
                f"{name}={asked} was asked for under the precision {precision}, which has "
                f"{' or '.join(known)}",
                hint=f"16 bits go with the precision of that name, {' or '.join(KEPT)}",
            )
    optimizer = optimizer or "fp32"
    gradients = gradients or optimizer
    if optimizer != "fp32" and gradients == "fp32":
        raise AutopipeError(
            f"optimizer_dtype={optimizer} and grad_dtype=fp32 were asked for: an optimizer takes "
            "gradients in the dtype of what it changes",
            hint=f"grad_dtype={optimizer}, or optimizer_dtype=fp32 for master weights",
        )
    return {"precision": precision, "grad_dtype": gradients, "optimizer_dtype": optimizer}
