"""A plan for Hugging Face: transformers' DistributedConfig, accelerate's configuration file.

(transformers 5.23, distributed/configuration_utils.py and tensor_parallel.py; accelerate 1.15,
parallelism_config.py and commands/config/config_args.py.)
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import yaml

from autopipe.interop.exported import Exported, head, printable
from autopipe.interop.layers import Layers, layers_of
from autopipe.interop.precisions import AUTOCAST, FP32, KEPT, bits, nearest
from autopipe.interop.recomputed import recomputes_all
from autopipe.interop.unsupported import NONE, Vocabulary, unsupported
from autopipe.planfile.contents import Plan
from autopipe.planfile.node_names import NodeName
from autopipe.report.megatron_terms import word
from autopipe.util import json_text
from autopipe.util.numbers import count
from autopipe.util.version import VERSION

STYLES = {"column": "colwise", "row": "rowwise"}
"""transformers' names for the ways to shard a linear layer's weight."""

TRANSFORMERS = Vocabulary(
    "transformers",
    schedules=frozenset(),
    zero=frozenset({0, 3}),
    recompute=NONE,
    tensors=True,
    own_model=True,
)

ACCELERATE = Vocabulary(
    "accelerate",
    pipeline=False,
    zero=frozenset({0, 3}),
    own_model=True,
)


def distributed_config(plan: Plan) -> Exported:
    """What `DistributedConfig.from_dict` reads; other keys it passes over."""
    mesh, layers = plan.mesh, layers_of(plan)
    replicas = mesh.dp if mesh.pp == 1 else 1
    # Without replicas it has the dtype that the model is loaded in.
    has = FP32 | {"bf16"} if replicas > 1 else frozenset({plan.precision})
    missing = [*unsupported(plan, replace(TRANSFORMERS, precisions=has), layers)]
    if replicas == 1 and plan.precision != "fp32":
        missing.append(f"the precision {plan.precision}: the trainer's, or the loaded model's")
    if replicas < mesh.dp:
        missing.append(f"{mesh.dp} replicas of a pipeline: it has replicas or stages, not both")
    data: dict[str, Any] = {
        "tp_size": mesh.tp,
        "pp_size": mesh.pp,
        "fsdp_size": replicas if plan.fully_sharded else 1,
        "dp_replicate_size": 1 if plan.fully_sharded else replicas,
    }
    if replicas > 1 and nearest(plan.precision, has) == "bf16":
        data["fsdp_mixed_precision"] = True
    if mesh.tp > 1:
        data["tp_plan"], others = tensor_plan(plan)
        if others:
            missing.append(
                f"tensors of {printable(', '.join(others))}: it deals out linear layers by columns "
                "and rows"
            )
    rows = count(plan.batch.microbatch_rows(mesh.dp), "row")
    missing.append(f"micro-batches of {rows}: the trainer's")
    written = f"autopipe {VERSION}, for transformers 5.23"
    data["autopipe"] = {"written_by": written, "cannot_express": missing}
    return Exported(json_text.layout(data), tuple(missing))


def tensor_plan(plan: Plan) -> tuple[dict[str, str], list[str]]:
    """A style for each linear layer of a block class, `blocks.*.mlp.up`; and what has no style."""
    found: dict[str, str] = {}
    others: dict[str, None] = {}
    for block in plan.blocks:
        path = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", block.name)
        for sharding in block.states:
            node, style = NodeName.of(sharding.name), word(sharding)
            if node is None or style is None or style == "sequence":
                continue
            name = f"{path}.{node.module}" if node.module else path
            if style in STYLES and node.op == "linear":
                found[name] = STYLES[style]
            else:
                others[name] = None
    return found, [*others]


def accelerate_config(plan: Plan) -> Exported:
    """What `accelerate launch --config_file` reads."""
    mesh, layers = plan.mesh, layers_of(plan)
    # It shards over replicas wherever there is tensor parallelism.
    sharded = mesh.dp > 1 and (plan.zero == 3 or mesh.tp > 1)
    low = bits(plan.precision)
    # What is sharded is gathered in its mixed precision, and its gradients summed; else it casts.
    has = replace(ACCELERATE, precisions=KEPT if sharded else AUTOCAST)
    words = replace(has, gradients=frozenset({low})) if sharded else has
    missing = unsupported(plan, words, layers)
    if sharded and plan.zero != 3:
        missing += (f"ZeRO-{plan.zero} beside tensor parallelism: it shards parameters too",)
    nodes = len(mesh.processes_per_node)
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(plan, sharded),
        "mixed_precision": low if low != "fp32" else "no",
        "num_machines": nodes,
        "num_processes": len(mesh.places),
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "use_cpu": all(place.device == "cpu" for place in mesh.places),
    }
    if mesh.tp > 1 or sharded:
        data["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": mesh.dp if sharded else 1,
            "parallelism_config_tp_size": mesh.tp,
        }
    if sharded:
        data["fsdp_config"] = _fsdp(plan, layers)
    use = (
        f"Accelerator(gradient_accumulation_steps={plan.batch.micro_batches}), batches of "
        f"{count(plan.batch.microbatch_rows(mesh.dp), 'row')} on each replica.",
    )
    text = head("accelerate 1.15", missing, *use) + yaml.safe_dump(data, sort_keys=False)
    return Exported(text, missing)


def _distributed_type(plan: Plan, sharded: bool) -> str:
    if sharded:
        return "FSDP"
    if len(plan.mesh.places) == 1:
        return "NO"
    return "MULTI_CPU" if all(place.device == "cpu" for place in plan.mesh.places) else "MULTI_GPU"


def _fsdp(plan: Plan, layers: Layers) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": recomputes_all(plan, layers),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
