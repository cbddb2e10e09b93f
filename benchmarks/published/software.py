"""The software that a row names, as one of three profiles.

    profile    pointwise ops           said by a row as
    megatron   fused by hand           Megatron, Transformer Engine, NeMo, a fused or RMS kernel,
                                       a distributed optimizer; several tp or pp ranks and no FSDP
    compiled   fused by torch.compile  compile, inductor
    eager      a kernel each           FSDP, DeepSpeed and DDP without compile; a row whose column
                                       of kernels has no other than attention's

Profiles are chosen from what the row itself says, never from how far off its prediction is.
A row of fused kernels, by hand or by a compiler, is planned with compiled stages, others with eager
ones. Compiled stages of autopipe run dropout again rather than keep what it made; Megatron-LM keeps
its mask and its result, of scores too, 34 + 5 as/h bytes of a layer's sbh in all (Korthikanti et
al., 2022, section 4.1), which is what eager stages keep: its bytes are those of eager ones. Of
logits these have two gradients at once, which a kernel for the whole loss has not: Megatron-LM's
(`core/tensor_parallel/cross_entropy.py`) writes them over what it has kept, llm-foundry's, whose
default is flash-attention's (`loss_fn: fused_crossentropy`), makes one in 16 bits. torch.compile
is given the model, torchtitan's its blocks one by one (`apply_compile`), and the loss stays
outside: rows of it hold what an eager loss does. A pipeline of
software that deals its layers out evenly is planned with even cuts, the planner `uniform`; cuts of
others are the planner's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

Row = Mapping[str, str]
"""A row of a table by the names of its columns."""


@dataclass(frozen=True)
class Software:
    """A software stack.

    Args:
        name: of the profile.
        fused: whether neighbouring pointwise ops are one kernel, or each its own.
        even: whether a pipeline's stages get equally many layers, embedding and head counted as a
            layer each where their number divides so alone.
        deepspeed: whether the optimizer is DeepSpeed's, in a pipeline of Megatron-DeepSpeed's.
        lists: whether DeepSpeed is older than 0.5.9, whose ZeRO-3 exchanges weight by weight.
        keeps_dropout: whether fused kernels keep what a dropout made.
        fused_loss: whether a kernel makes the gradient of logits from what it has kept of them.
        eager_loss: whether blocks are compiled and the loss is not.
        early: whether its kernels are older than CUDA 12 and FlashAttention 2.
        overlaps: whether tensor-parallel ranks exchange while they multiply.
        sums: whether gradients are summed over replicas while the last backward makes them.
        gathers: whether sequence-parallel ranks keep their parts alone of what they gather.
        asynchronous: whether ranks exchange beside products in backward (`megatron.py`).
        adds: whether the product for a weight's gradient adds it to the sum (`megatron.py`).
        no_dropout: whether it is known to have trained its model without dropout.
    """

    name: str
    fused: bool
    even: bool = True
    deepspeed: bool = False
    lists: bool = False
    keeps_dropout: bool = False
    fused_loss: bool = False
    eager_loss: bool = False
    early: bool = False
    overlaps: bool = False
    sums: bool = False
    gathers: bool = False
    asynchronous: bool = False
    adds: bool = False
    no_dropout: bool = False


MEGATRON = Software("megatron", fused=True, keeps_dropout=True, fused_loss=True)
COMPILED = Software("compiled", fused=True, eager_loss=True)
EAGER = Software("eager", fused=False)

_FIELDS = ("software", "framework", "extra", "notes", "attention", "opt_shard")
"""Columns in which tables record it."""

_COMPILED = r"compil|inductor"
_UNCOMPILED = (
    r"(?:no|not|non|without|w/o)[\s-]*(?:torch\W*)?compil\w*|compil\w*\W{1,3}(?:false|no|off)\b"
)
"""`no-compile`, `without torch.compile`, `compile=false`."""
_FUSED = r"megatron|\bte\b|transformer.?engine|nemo|(?<!un)fused|rms kernel|distributed optimizer"
_UNFUSED = r"fsdp|hugging"
_ATTENTION_ALONE = r"torch|fused|flash_attention\S*"
"""A column `attention` that names kernels, and of no norm (`X + RMS kernel` does): that of the
softmax, as `fused` alone, says nothing of other ops."""


_OWN_CUTS = r"\(alpa\)|aleph-alpha"
_DEEPSPEED = r"deepspeed|bigscience"
_OF_2021 = r"sc'?21\b|2104\.04473"
"""Sources that are older than 0.5.9 of DeepSpeed: Narayanan et al., SC21."""
_WAITS = rf"{_OF_2021}|megatron-lm 2019|overlap off"
"""Megatron-LM without exchanges beside products: before 2022, or where a row says so."""
_FUSED_LOSS = r"llm-foundry"
_EARLY = r"llm-foundry"
"""Its benchmarks, on H100 too, ran with torch 1.13 and 2.0 for CUDA 11.7 and 11.8, and the Triton
kernel of FlashAttention 1 (scripts/train/benchmarking: `IMAGE` of sweep.sh, `--attn_impl` of
submit_benchmarks.py)."""
_NO_DROPOUT = r"nemotron|neox|pythia|falcon"
"""Models that are no llamas and train without dropout, by their configurations: NeMo's
conf/training/nemotron, gpt-neox's configs/20B.yml, Pythia's, and that of tiiuae/falcon-40b."""
_NEMO = r"\bnemo\b|megatron.?bridge|dgxc"
_OVERLAPS = rf"{_NEMO}|tp.comm.overlap"
"""NeMo's recipes turn on Transformer Engine's overlap of tensor parallelism, `tp_comm_overlap`, as
Megatron-LM's measurements on H100 do (its README, "Training Speed and Scalability")."""
_SUMS = rf"{_NEMO}|overlap.?grad"
"""NeMo's recipes turn on `overlap_grad_reduce`. Megatron-LM sums after the last backward unless
`--overlap-grad-reduce` is given, which it has had since 2023, and DeepSpeed's pipeline does
(runtime/pipe/engine.py, _exec_reduce_grads); torch's DistributedDataParallel and FSDP sum in
backward, and stand for rows of replicas alone."""
_SCALING = r"megatron.*(readme|scaling|model_table)"
"""That README's measurements on H100, which have both options, by what a row says of its source."""
_GATHERS = rf"{_NEMO}|megatron-lm|korthikanti"
"""Megatron-LM's and Transformer Engine's linear layers gather once more in backward (`layers.py`,
LinearWithGradAccumulationAndAsyncCommunication; Korthikanti et al., 2022, section 4.2.2)."""
_ADDS = rf"{_NEMO}|qi et al|simumax"
"""What is built on Megatron-LM of 2023 and later, whose default it is. In 2022 it was "supported
only with fp32 gradient accumulation" (`arguments.py`): Megatron-LM's own rows of fp16 have none."""


def software_of(row: Row) -> Software:
    """The profile of a row, by its kernels, its cuts and its optimizer.

    Megatron-LM refuses layers that its stages do not divide (`arguments.py`), or counts embedding
    and head as a layer each (`--account-for-embedding-in-pipeline-split`), as its zero-bubble fork
    (Qi et al., 2024) and torchtitan do (`generate_llm_fqn_per_model_part`).
    Megatron-DeepSpeed cuts by `type:transformer` (`gpt_model.py`, GPTModelPipe), BigScience's last
    rows by `type:transformer|embedding` (bigscience, tr11-176B-ml/chronicles-prequel.md,
    "Rebalancing layers"). Alpa looks for its cuts (Zheng et al., OSDI 2022, section 5); Scaling,
    which is Aleph Alpha's, counts embedding, last norm and head as layers
    (`pipe_partition_uniform`).
    """
    said = " ".join(
        row.get(name) or "" for name in (*_FIELDS, "schedule", "source", "table")
    ).lower()
    even, deepspeed = not re.search(_OWN_CUTS, said), bool(re.search(_DEEPSPEED, said))
    profile = _profile(row)
    megatron = "megatron-lm" in said and not deepspeed
    overlaps = bool(re.search(_OVERLAPS, said))
    measured = "h100" in (row.get("gpu") or "").lower() and bool(re.search(_SCALING, said))
    fused_loss = profile.fused_loss or bool(re.search(_FUSED_LOSS, said))
    return replace(
        profile,
        even=even,
        deepspeed=deepspeed,
        lists=deepspeed and bool(re.search(_OF_2021, said)),
        fused_loss=fused_loss,
        early=bool(re.search(_EARLY, said)),
        overlaps=measured or overlaps,
        sums=measured or bool(re.search(_SUMS, said)) or not deepspeed and _replicated(row),
        gathers=bool(re.search(_GATHERS, said)),
        asynchronous=bool(re.search(_GATHERS, said))
        and not (measured or overlaps or deepspeed or re.search(_WAITS, said)),
        adds=bool(re.search(_ADDS, said)) or megatron and not low_gradients(row),
        no_dropout=bool(re.search(_NO_DROPOUT, f"{row.get('arch')} {row.get('model')}".lower())),
    )


def _profile(row: Row) -> Software:
    attention = (row.get("attention") or "").strip().lower()
    alone = re.fullmatch(_ATTENTION_ALONE, attention)
    others = " ".join(row.get(name) or "" for name in _FIELDS if name != "attention").lower()
    said = others if alone else f"{others} {attention}"
    if re.search(_COMPILED, re.sub(_UNCOMPILED, "", said)):
        return COMPILED
    if re.search(_FUSED, said):
        return MEGATRON
    if alone:
        return EAGER
    return MEGATRON if _split(row) and not re.search(_UNFUSED, said) else EAGER


def _split(row: Row) -> bool:
    """It has several tensor-parallel ranks or pipeline stages."""
    return any((row.get(name) or "1").strip() not in ("1", "") for name in ("tp", "pp"))


def _replicated(row: Row) -> bool:
    """It has replicas alone, without ZeRO of another kind than FSDP's."""
    shard = (row.get("opt_shard") or "none").strip().lower()
    return "fsdp" in shard or shard in ("none", "ddp") and not _split(row)


def low_gradients(row: Row) -> bool:
    """Whether gradients are summed in the 16 bits that a row trains in.

    Megatron-LM sums those of fp16 so, and turns on sums in fp32 for bf16 alone (`arguments.py`,
    accumulate_allreduce_grads_in_fp32). DeepSpeed's ZeRO sums in the model's own dtype
    (`grad_accum_dtype`, https://www.deepspeed.ai/docs/config-json/#data-type-options) unless its
    BF16_Optimizer is used. FSDP reduces in fp32. What NVIDIA publishes of NeMo sums in 16 bits
    (NeMo, scripts/performance: `trainer.plugins.grad_reduce_in_fp32 = False`).
    """
    said = " ".join(row.get(name) or "" for name in (*_FIELDS, "table", "source")).lower()
    precision, shard = ((row.get(name) or "").lower() for name in ("precision", "opt_shard"))
    if "fp32 grad" in precision or "bf16_optimizer" in shard or "fsdp" in shard:
        return False
    deepspeed = re.match(r"zero[ -]?[123]", shard)
    return precision.startswith("fp16") or bool(deepspeed or re.search(_NEMO, said))
