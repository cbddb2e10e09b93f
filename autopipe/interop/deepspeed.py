"""A plan as DeepSpeed's configuration, a JSON file.

JSON has no comments, so remarks stand under `autopipe`, a key that DeepSpeed does not read.
(DeepSpeed 0.19, docs/_pages/config-json.md; train_batch_size = micro_batch * accumulation *
replicas.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopipe.interop.exported import Exported
from autopipe.interop.layers import layers_of
from autopipe.interop.precisions import EVERY, FP32, bits
from autopipe.interop.unsupported import BLOCKS, Vocabulary, unsupported
from autopipe.planfile.consistency import ZERO
from autopipe.planfile.contents import Plan
from autopipe.util import json_text
from autopipe.util.numbers import count
from autopipe.util.version import VERSION

WORDS = Vocabulary(
    "DeepSpeed's configuration",
    pipeline=False,
    zero=frozenset(ZERO),
    recompute=BLOCKS,
    precisions=EVERY,
    own_model=True,
)

BESIDE_TENSORS = frozenset({0, 1, 2})
"""The ZeRO stages that it trains with where it divides tensors too (config-json.md, AutoTP)."""

AUTOCAST = {"bf16-autocast": "bfloat16", "fp16-autocast": "float16"}


def config(plan: Plan) -> Exported:
    """The configuration; stages of a pipeline are code with DeepSpeed (PipelineModule)."""
    mesh, batch, layers = plan.mesh, plan.batch, layers_of(plan)
    zero = WORDS.zero if mesh.tp == 1 else BESIDE_TENSORS
    words = replace(WORDS, zero=zero, gradients=_gradients(plan))
    missing = [*unsupported(plan, words, layers)]
    again = sorted({block for stage in plan.stages for block in stage.blocks_again})
    if again:
        missing.append(
            f"recomputation of {count(len(again), 'block')}: the model's code calls "
            "deepspeed.checkpointing.checkpoint"
        )
    data: dict[str, Any] = {
        "train_batch_size": batch.rows,
        "train_micro_batch_size_per_gpu": batch.microbatch_rows(mesh.dp),
        "gradient_accumulation_steps": batch.micro_batches,
        "zero_optimization": {"stage": min(plan.zero_at_work, max(zero))},
    }
    data.update(_precision(plan))
    if mesh.tp > 1:
        data["tensor_parallel"] = {"autotp_size": mesh.tp}
    written = f"autopipe {VERSION}, for DeepSpeed 0.19"
    data["autopipe"] = {"written_by": written, "cannot_express": missing}
    return Exported(json_text.layout(data), tuple(missing))


def _gradients(plan: Plan) -> frozenset[str]:
    """The dtypes in which DeepSpeed can sum gradients: without ZeRO only the compute dtype."""
    if plan.precision in AUTOCAST:
        return FP32
    own = frozenset({bits(plan.precision)})
    return own | FP32 if plan.zero_at_work else own


def _precision(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's settings for computing in 16 bits, and for the dtype of sums of gradients.

    DeepSpeed sums gradients in 16 bits unless told otherwise, and under autocast those of modules
    listed as safe in low precision: the list stays empty.
    """
    if plan.precision in AUTOCAST:
        kind = AUTOCAST[plan.precision]
        words = {"enabled": True, "dtype": kind, "lower_precision_safe_modules": []}
        return {"torch_autocast": words}
    if plan.precision == "fp32":
        return {}
    found: dict[str, Any] = {plan.precision: {"enabled": True}}
    if plan.zero_at_work:
        found["data_types"] = {"grad_accum_dtype": plan.grad_dtype}
    return found
