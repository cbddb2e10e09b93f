"""What DeepSpeed holds and waits for beside what a plan counts.

**Bytes** of gradients that its optimizers hold:

    N parameters of a device, dp replicas, n = N / dp of its partition, L of the embedding

    fp16, ZeRO-1     2 min(BUCKET, N)   gradients are flattened to be summed over replicas
                     8 min(L, n)        the norm of one is that of a copy in double precision
                     6 n                the partition is flattened in 16 bits, and cast to fp32
    BF16_Optimizer   2 N                the last micro-batch's stay beside the sums in fp32

(DeepSpeed of early 2022: runtime/zero/stage_1_and_2.py, allreduce_bucket, get_grad_norm_direct and
step; runtime/pipe/engine.py, _exec_backward_pass, with update_hp_grads(clear_lp_grads=False).)

**Seconds** in which ZeRO-3 of before 0.5.9 (January 2022) exchanges, for each weight of a layer:

    a gather                   forward, once more where it runs again, backward
    a sum of its gradient      backward, as long as a gather
    dp launches for each,      `torch.distributed.all_gather` is given a list of dp tensors, and
    and a copy of it           copies to each (torch, ProcessGroupNCCL.cpp); so is a sum

Nothing runs beside them: a submodule begins when all streams have ended, sums of gradients too
(runtime/zero/stage3.py of 0.3.15: PartitionedParameterCoordinator._synchronize_communication,
average_tensor), and no more elements than `stage3_max_live_parameters` are there at once, or one
weight, which are fewer than a layer of the models has that this stands for. Norms and biases stay
on each rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.collective_time import Topology, all_gather
from benchmarks.published.rows import Model, Run

BUCKET = 500_000_000
"""Elements: the default of `reduce_bucket_size`,
https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training."""

LIVE = 1_000_000_000
"""Elements: the default of `stage3_max_live_parameters`,
https://www.deepspeed.ai/docs/config-json/#zero-optimizations-for-fp16-training."""

STATES = ("parameters", "gradients", "optimizer", "buffers", "copies")
"""Kinds of bytes that are there between two steps too."""


class Held(NamedTuple):
    """Bytes of tensors at the fullest moment, and those that torch's caching allocator reserves.

    It reserves more where moments need blocks of different sizes: activations have gone by the
    sums and the optimizer's step, but each had a block of its own, and what is flat fits into none
    of them, nor most of the step into the bucket's.
    """

    allocated: int
    reserved: int


def held(run: Run, planned: int, parts: Mapping[str, int]) -> Held:
    """What the fullest device holds of a plan that counts so many bytes; those, if DeepSpeed is
    not what ran.

    Args:
        parts: the bytes by what they are for.
    """
    if _weight_by_weight(run):
        gathered = 2 * max(LIVE, *weights(run.model))
        less = planned - max(0, parts["copies"] - int(gathered))
        return Held(less, less)
    if not run.software.deepspeed or run.sharding != 1:
        return Held(planned, planned)
    if not run.low_gradients:
        more = planned + parts["gradients"] // 2
        return Held(more, more)
    parameters = parts["gradients"] // 2
    partition, embedding = parameters // run.dp, int(run.model.embedding_parameters) // run.tp
    bucket = 2 * min(BUCKET, parameters)
    step = max(8 * min(embedding, partition), 6 * partition)
    lasting = sum(parts[kind] for kind in STATES)
    return Held(
        allocated=max(planned, lasting + max(bucket, step)),
        reserved=planned + max(0, bucket + step - parts["passing"]),
    )


def waits(run: Run, cluster: Cluster) -> float:
    """Seconds of a step in which ZeRO-3 of before 0.5.9 exchanges; 0 if that is not what ran.

    Args:
        cluster: whose first ranks it ran on.
    """
    if not _weight_by_weight(run):
        return 0.0
    levels = Topology.of(cluster).levels(range(run.dp))
    launches = run.dp * max(device.launch for device in cluster.devices)

    def exchange(size: float) -> float:
        return all_gather(size, levels) + launches + 2 * size / cluster.copying

    once = sum(exchange(2 * each) for each in weights(run.model))
    times = 4 if run.recompute == "full" else 3
    return run.micro_batches * run.model.layers * times * once


def _weight_by_weight(run: Run) -> bool:
    """It ran under ZeRO-3 of before 0.5.9."""
    return run.software.lists and run.sharding == 3


def weights(model: Model) -> list[float]:
    """Elements of each weight of a layer's matmuls."""
    projected = model.hidden + 2 * model.kv_heads * model.head_dim
    attention = [model.hidden * projected, model.hidden * model.hidden]
    return [*attention, *[model.hidden * model.ffn] * (3 if model.gated else 2)]
