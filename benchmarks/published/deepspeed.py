"""Bytes of gradients that DeepSpeed's optimizers hold beside those that a plan counts.

    N parameters of a device, dp replicas, n = N / dp of its partition, L of the embedding

    fp16, ZeRO-1     2 min(BUCKET, N)   gradients are flattened to be summed over replicas
                     8 min(L, n)        the norm of one is that of a copy in double precision
                     6 n                the partition is flattened in 16 bits, and cast to fp32
    BF16_Optimizer   2 N                the last micro-batch's stay beside the sums in fp32

(DeepSpeed of early 2022: runtime/zero/stage_1_and_2.py, allreduce_bucket, get_grad_norm_direct and
step; runtime/pipe/engine.py, _exec_backward_pass, with update_hp_grads(clear_lp_grads=False).)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.published.rows import Run

BUCKET = 500_000_000
"""Elements: the default of `reduce_bucket_size`,
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
