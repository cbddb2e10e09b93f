"""A plan as DeepSpeed's configuration, a JSON file.

What JSON has no comments for stands under `autopipe`, a key that DeepSpeed does not read.
(DeepSpeed 0.19, docs/_pages/config-json.md; train_batch_size = micro_batch * accumulation *
replicas.)
"""

from __future__ import annotations

from typing import Any

from autopipe.interop.exported import Exported
from autopipe.interop.layers import layers_of
from autopipe.interop.unsaid import BLOCKS, Vocabulary, unsaid
from autopipe.planfile.consistency import ZERO
from autopipe.planfile.contents import Plan
from autopipe.util import json_text
from autopipe.util.version import VERSION

WORDS = Vocabulary(
    "DeepSpeed's configuration",
    pipeline=False,
    zero=frozenset(ZERO),
    recompute=BLOCKS,
    own_model=True,
)


def config(plan: Plan) -> Exported:
    """The configuration; stages of a pipeline are code with DeepSpeed (PipelineModule)."""
    mesh, batch, layers = plan.mesh, plan.batch, layers_of(plan)
    missing = [*unsaid(plan, WORDS, layers)]
    again = sorted({block for stage in plan.stages for block in stage.blocks_again})
    if again:
        missing.append(
            f"recomputation of {len(again)} blocks: the model's code calls "
            "deepspeed.checkpointing.checkpoint"
        )
    data: dict[str, Any] = {
        "train_batch_size": batch.rows,
        "train_micro_batch_size_per_gpu": batch.microbatch_rows(mesh.dp),
        "gradient_accumulation_steps": batch.micro_batches,
        "zero_optimization": {"stage": plan.zero if mesh.dp > 1 else 0},
    }
    if plan.precision in ("bf16", "fp16"):
        data[plan.precision] = {"enabled": True}
    if mesh.tp > 1:
        data["tensor_parallel"] = {"autotp_size": mesh.tp}
    written = f"autopipe {VERSION}, for DeepSpeed 0.19"
    data["autopipe"] = {"written_by": written, "cannot_express": missing}
    return Exported(json_text.layout(data), tuple(missing))
