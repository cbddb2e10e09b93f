"""A plan as FlagScale's configuration: the runtime that takes devices of unlike kinds.

    hetero_process_meshes: [tp, cp, ep, dp, pp,  tp, cp, ep, dp, pp]     a mesh for each kind
    hetero_pipeline_layer_split: [18, 14]                                layers of each stage

(FlagScale, examples/llama3/conf/train/8b_hetero.yaml, of 2026.)
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import yaml

from autopipe.interop.exported import Exported, head
from autopipe.interop.layers import layers_of
from autopipe.interop.megatron import precision, recomputation, sequence_parallel
from autopipe.interop.precisions import KEPT
from autopipe.interop.unsupported import Vocabulary, kinds_of_ranks, unsupported
from autopipe.planfile.contents import Plan

WORDS = Vocabulary(
    "FlagScale",
    uneven=True,
    tied=True,
    schedules=frozenset({"1f1b"}),
    zero=frozenset({0, 1}),
    selective=True,
    devices=True,
    precisions=KEPT,
    gradients=KEPT,
)


def config(plan: Plan) -> Exported:
    """The parts `system` and `model` that say how a plan splits."""
    mesh, batch, layers = plan.mesh, plan.batch, layers_of(plan)
    missing = [*unsupported(plan, WORDS, layers)]
    kinds = _kinds(plan)
    if any(len(of) > 1 for of in kinds_of_ranks(plan)):
        missing.append("a stage whose replicas are on devices of unlike kinds")
    system: dict[str, Any] = {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "sequence_parallel": sequence_parallel(plan),
        "use_distributed_optimizer": plan.deals,
    }
    if low := precision(plan):
        system["precision"] = low
    if mesh.pp > 1 and layers.total and len(plan.stages) == mesh.pp:
        system["hetero"] = {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": [*layers.counts],
            "hetero_process_meshes": [
                size for _, ranks in kinds for size in (mesh.tp, 1, 1, mesh.dp, ranks)
            ],
            "hetero_device_types": [kind for kind, _ in kinds],
            "standalone_embedding_stage": False,
        }
    again = recomputation(plan, layers)
    if again:
        system["recompute"] = again
    model: dict[str, Any] = {
        "micro_batch_size": batch.microbatch_rows(mesh.dp),
        "global_batch_size": batch.rows,
    }
    if layers.total:
        model = {"num_layers": layers.total, **model}
    use = "Into conf/train/MODEL.yaml, beside the model's own sizes."
    text = head("FlagScale of 2026", tuple(missing), use)
    text += yaml.safe_dump({"system": system, "model": model}, sort_keys=False)
    return Exported(text, tuple(missing))


def _kinds(plan: Plan) -> list[tuple[str, int]]:
    """Runs of pipeline ranks on one kind of device: (kind, ranks)."""
    firsts = [kinds[0] for kinds in kinds_of_ranks(plan)]
    return [(kind, len([*run])) for kind, run in groupby(firsts)]
