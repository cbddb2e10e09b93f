"""A plan as configurations of torchtitan: a Python file with ParallelismConfig and TrainingConfig.

(torchtitan 0.3, torchtitan/config/configs.py. Its mesh counts ranks as plans do: pp, dp, tp.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopipe.interop.exported import Exported, head
from autopipe.interop.layers import layers_of
from autopipe.interop.precisions import FP32, nearest
from autopipe.interop.recomputed import recomputes_all
from autopipe.interop.unsupported import ALL, Vocabulary, unsupported
from autopipe.planfile.contents import Plan

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
"""torch's own names; what is not among them goes into a file of its own."""

CSV = "schedule.csv"
"""Where `autopipe export --to pipelining` is to put it."""

WORDS = Vocabulary(
    "torchtitan",
    uneven=True,
    modules=True,
    schedules=None,
    zero=frozenset({0, 3}),
    recompute=ALL,
)


def configs(plan: Plan) -> Exported:
    """The two configurations, for a model of torchtitan's whose modules have the plan's names."""
    layers, mesh, batch = layers_of(plan), plan.mesh, plan.batch
    words = _words(plan)
    missing = unsupported(plan, words, layers)
    if plan.precision.startswith("bf16") and words.precisions == FP32:
        missing += (
            "bf16 beside pp or tp without ZeRO-3: mixed_precision_param acts only with "
            "data_parallel_shard_degree > 1, or on replicas alone",
        )
    sharded = plan.fully_sharded
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1 if sharded else mesh.dp,
        "data_parallel_shard_degree": mesh.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if sharded else "default",
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
    }
    use = ["In a config of torchtitan's: parallelism=PARALLELISM, training=TRAINING."]
    if mesh.pp > 1:
        parts = [layers.modules(stage) for stage in range(len(plan.stages))]
        parallelism["module_fqns_per_model_part"] = parts
        parallelism["pipeline_parallel_microbatch_size"] = batch.microbatch_rows(mesh.dp)
        if plan.schedule in SCHEDULES:
            parallelism["pipeline_parallel_schedule"] = SCHEDULES[plan.schedule]
        else:
            parallelism["pipeline_parallel_schedule"] = "_PipelineScheduleRuntime"
            parallelism["pipeline_parallel_schedule_csv"] = CSV
            use.append(f"Its schedule: autopipe export PLAN --to pipelining -o {CSV}")
    if recomputes_all(plan, layers):
        use.append("All layers run again in backward: activation_checkpoint=FullAC.Config().")
    # A pipeline cuts its local batch itself; without one, gradients of several are accumulated.
    local = batch.rows // mesh.dp if mesh.pp > 1 else batch.microbatch_rows(mesh.dp)
    training: dict[str, Any] = {
        "local_batch_size": local,
        "global_batch_size": batch.rows,
        "mixed_precision_param": _NAMES.get(nearest(plan.precision, words.precisions), "float32"),
    }
    if plan.optimizer_dtype == "bf16":
        training["dtype"] = "bfloat16"
    text = (
        head("torchtitan 0.3", missing, *use)
        + "from torchtitan.config import ParallelismConfig, TrainingConfig\n\n"
        + _call("PARALLELISM", "ParallelismConfig", parallelism)
        + "\n"
        + _call("TRAINING", "TrainingConfig", training)
    )
    return Exported(text, missing)


_NAMES = {"bf16": "bfloat16", "bf16-autocast": "bfloat16"}


def _words(plan: Plan) -> Vocabulary:
    """What torchtitan can express on the plan's mesh.

    Its mixed precision is FSDP's where parameters are sharded, autocast on one pipeline and tensor
    rank, and absent elsewhere. Its `dtype` sets parameters, gradients and optimizer state alike.
    """
    if plan.optimizer_dtype == "bf16":
        low = frozenset({"bf16"})
        return replace(WORDS, precisions=FP32 | low, gradients=low, optimizer=FP32 | low)
    if plan.fully_sharded:
        return replace(WORDS, precisions=FP32 | {"bf16"})
    if plan.mesh.pp * plan.mesh.tp == 1:
        return replace(WORDS, precisions=FP32 | {"bf16-autocast"})
    return WORDS


def _call(name: str, of: str, values: dict[str, Any]) -> str:
    """An assignment in Python."""
    lines = "".join(f"    {key}={value!r},\n" for key, value in values.items())
    return f"{name} = {of}(\n{lines})\n"
