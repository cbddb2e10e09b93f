"""The bytes that the fullest rank needs: states, activations in flight, what passes, what is lost.

    allocated = states + in flight * what its layers keep + the largest passing tensors
    reserved  = allocated * (1 + fragmented)
    device    = reserved + context

Sources report one of the three; a run is out of memory if `device` is more than there is.
"""

from __future__ import annotations

import dataclasses

from autopipe.cluster.efficiency import GIB
from autopipe.schedules import registry
from benchmarks.published import pipeline
from benchmarks.published.constants import Constants
from benchmarks.published.rows import Run
from benchmarks.published.transformer import embedding, head, kept, layer

BUCKETS = 2 * 5e8 * 2
"""Bytes of DeepSpeed's two buckets, for reducing and for gathering, of 5e8 elements by default:
https://www.deepspeed.ai/docs/config-json/ (reduce_bucket_size, allgather_bucket_size)."""


def allocated(run: Run) -> float:
    """Bytes of tensors on the fullest rank, at most at once."""
    programs = pipeline.programs_of(run.schedule, run.pp, _enough(run), run.chunks)
    held = [0.0] * run.pp
    passing = [0.0] * run.pp
    layers = pipeline.layers_of(run)
    for rank, program in enumerate(programs):
        for stage in sorted({instruction.stage for instruction in program}):
            flying = registry.flying(program, stage)
            held[rank] += _states(run, stage, layers[stage])
            held[rank] += flying * _kept(run, stage, layers[stage])
            passing[rank] = max(passing[rank], _passing(run, stage))
    return max(map(sum, zip(held, passing, strict=True)))


def needed(allocated: float, kind: str, constants: Constants) -> float:
    """Bytes of the kind that a source reports, allocated, reserved or device, from the first."""
    if kind == "allocated":
        return allocated
    reserved = allocated * (1 + constants.fragmented)
    return reserved + (constants.context * GIB if kind == "device" else 0)


def _enough(run: Run) -> int:
    """Micro-batches with which a schedule holds as many as it does with all."""
    return min(run.micro_batches, 4 * run.pp)


def state_bytes(run: Run) -> float:
    """Bytes that a rank holds for each of its weights, in mixed precision with Adam.

        weight 2, gradient 2 or 4, and for the optimizer fp32 weight 4, two moments 8

    DeepSpeed's fp16 optimizer has an fp32 copy of the gradients besides, its bf16 optimizer a
    gradient in 16 bits; Megatron-LM keeps gradients in fp32. FSDP divides all of it, and keeps
    weights in fp32 only, or all in 16 bits if `pure`.
    """
    shards = run.dp
    if run.framework == "fsdp":
        return (8 if run.pure else 16) / shards
    if run.framework == "megatron":
        gradient, optimizer = 4, 12
    elif run.gradient_bytes == 4:
        gradient, optimizer = 6, 12
    else:
        gradient, optimizer = 2, 16
    return (
        2 / (shards if run.sharding >= 3 else 1)
        + gradient / (shards if run.sharding >= 2 else 1)
        + optimizer / (shards if run.sharding >= 1 else 1)
    )


def _states(run: Run, stage: int, layers: int) -> float:
    one = layer(run).parameters
    owned = layers * one
    owned += embedding(run).parameters if stage == 0 else 0.0
    owned += head(run).parameters if stage == run.stages - 1 else 0.0
    beside = 2 * 2 * one if run.sharding == 3 else 0.0  # a layer is gathered, and the next one
    beside += BUCKETS if run.framework == "deepspeed" and run.sharding else 0.0
    return owned * state_bytes(run) + beside


def _kept(run: Run, stage: int, layers: int) -> float:
    """Bytes of one micro-batch from forward to backward; embedding dropout keeps its mask."""
    found = layers * kept(run)
    if stage == 0 and run.dropout:
        found += run.micro_batch * run.model.seq * run.model.hidden
    return found


def _passing(run: Run, stage: int) -> float:
    """The largest tensors that come and go: of a layer's backward, or of the loss.

    Backward of a layer that is computed again holds all that it would have kept. Else there are the
    gradients of what is widest. The loss holds logits in 16 bits, in fp32, and their gradient.
    """
    model, n = run.model, run.micro_batch * run.model.seq
    wide = 4 * n * (model.ffn * (2 if model.gated else 1)) / run.tp
    if run.recompute in ("full", "alternate"):
        wide += kept(dataclasses.replace(run, recompute="none"))
    if stage < run.stages - 1:
        return wide
    return max(wide, LOSS_BYTES * n * model.vocab / run.loss_ranks)


LOSS_BYTES = 2 + 4 + 4
"""For each logit."""
