"""A plan as arguments of Megatron-LM, in a bash array.

    --pipeline-model-parallel-layout 'Et*4|t*3|t*5L'     E embedding, t a layer, L loss, | a stage

Stages stand in the model's order, which is Megatron's own for virtual stages too: rank 0's first
chunk, rank 1's, ..., rank 0's second. Ranks are counted alike: tensor parallel innermost, then
data, then pipeline. (Megatron-LM core_r0.16, megatron/training/arguments.py and
core/transformer/pipeline_parallel_layer_layout.py.)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from autopipe.interop.exported import Exported, head
from autopipe.interop.layers import Layers, layers_of
from autopipe.interop.precisions import KEPT, nearest
from autopipe.interop.recomputed import recomputes_all, selected
from autopipe.interop.unsupported import Vocabulary, unsupported
from autopipe.planfile.contents import Plan
from autopipe.planfile.placements import parse

WORDS = Vocabulary(
    "Megatron-LM",
    uneven=True,
    tied=True,
    schedules=frozenset({"1f1b", "interleaved"}),
    zero=frozenset({0, 1, 3}),
    selective=True,
    precisions=KEPT,
    gradients=KEPT,
)


def arguments(plan: Plan) -> Exported:
    """The arguments that say how a plan splits; those of the model and its data are the user's."""
    layers = layers_of(plan)
    missing = unsupported(plan, WORDS, layers)
    lines = "".join(f"    {shlex.join(words)}\n" for words in _arguments(plan, layers))
    use = 'In bash: source THIS, then pretrain_gpt.py "${PARALLEL[@]}" and the model\'s arguments.'
    more = "Megatron-FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1: leave it unset, or higher."
    top = head("Megatron-LM core 0.16", missing, use, *([more] if plan.fully_sharded else []))
    return Exported(f"{top}# shellcheck disable=SC2034,SC2148\nPARALLEL=(\n{lines})\n", missing)


def _arguments(plan: Plan, layers: Layers) -> Iterator[tuple[str, ...]]:
    mesh, batch = plan.mesh, plan.batch
    yield "--tensor-model-parallel-size", str(mesh.tp)
    yield "--pipeline-model-parallel-size", str(mesh.pp)
    if layers.total:
        yield "--num-layers", str(layers.total)
    if mesh.pp > 1 and layers.total:
        yield "--pipeline-model-parallel-layout", layout(layers)
    if sequence_parallel(plan):
        yield ("--sequence-parallel",)
    yield "--micro-batch-size", str(batch.microbatch_rows(mesh.dp))
    yield "--global-batch-size", str(batch.rows)
    for name in precision(plan):
        yield (f"--{name.replace('_', '-')}",)
    if plan.deals:
        yield ("--use-distributed-optimizer",)
    if plan.fully_sharded:
        yield ("--use-megatron-fsdp",)
        yield "--data-parallel-sharding-strategy", "optim_grads_params"
        yield "--ckpt-format", "fsdp_dtensor"
    for name, value in recomputation(plan, layers).items():
        words = value if isinstance(value, list) else [str(value)]
        yield f"--{name.replace('_', '-')}", *words


def layout(layers: Layers) -> str:
    """Megatron's text for which stage has which layers: `Et*3|t*4|t*3L`."""
    stages = ["t" if n == 1 else f"t*{n}" if n else "" for n in layers.counts]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    return "|".join(stages)


def precision(plan: Plan) -> dict[str, bool]:
    """Megatron's switches for what it computes in, and sums gradients in.

    By itself it sums gradients of bf16 in fp32, those of fp16 in fp16.
    """
    low = nearest(plan.precision, KEPT)
    found = {} if low == "fp32" else {low: True}
    if low == "fp16" and plan.grad_dtype == "fp32":
        found["accumulate_allreduce_grads_in_fp32"] = True
    if low == "bf16" and plan.grad_dtype == "bf16":
        found["grad_reduce_in_bf16"] = True
    return found


def recomputation(plan: Plan, layers: Layers) -> dict[str, str | int | list[str]]:
    """Megatron's fields for what runs again: all layers whole, parts of all layers, or none."""
    if recomputes_all(plan, layers):
        whole = {"recompute_granularity": "full", "recompute_method": "uniform"}
        return {**whole, "recompute_num_layers": 1}
    modules = selected(plan, layers).modules
    if not modules:
        return {}
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


def sequence_parallel(plan: Plan) -> bool:
    """Whether activations between layers are sharded by tokens, dim 1."""
    if plan.mesh.tp == 1:
        return False
    made = [state for block in plan.blocks for state in block.states if "/" in state.name]
    return any(
        name in state.name
        for state in made
        if (lies := parse(state.state)).sharded and lies.dim == 1
        for name in ("layer_norm", "rms_norm", "/add/")
    )
