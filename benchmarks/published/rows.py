"""A row of a table of published runs, read into typed values: what ran, and what was measured.

What a row leaves out is filled in by these rules, in this order; what it says always wins.

    dp               n_gpus / (tp pp)                          mbs    gbs / (dp n_microbatches)
    n_microbatches   gbs / (dp mbs)                            vpp    2 if interleaved, else 1
    kv_heads         heads           ffn   4 hidden, or 8/3 hidden if gated
    vocab            32000 for llama, else 51200 (GPT-2's 50257, padded as Megatron-LM does)
    step seconds     gbs seq / (tokens/s n_gpus),  gbs / (samples/s n_gpus),
                     flops / (TFLOP/s n_gpus)

`flops` are those that the row's kind of TFLOP/s counts: the model's, or with recomputed work.
A row that asks for what is not modelled raises `Unsupported`, whose text says what.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from benchmarks.published.software import Row, Software, low_gradients, software_of


class Unsupported(Exception):
    """The row holds something that is not modelled, or lacks what nothing can be derived from."""


@dataclass(frozen=True)
class Model:
    """A transformer: `layers` of attention and a feed-forward part, an embedding and a head.

    Args:
        ffn: the width between the matmuls of the feed-forward part.
        gated: that part has a gate, two matmuls in (SwiGLU), as llama has.
        llama: RMS norms and rotary positions, no dropout, no biases; else as GPT-2 is.
        tied: the head is the embedding.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    gated: bool
    llama: bool
    tied: bool

    @property
    def head_dim(self) -> float:
        """Width of a head of attention; published models exist in which it is no whole number."""
        return self.hidden / self.heads

    @property
    def layer_parameters(self) -> float:
        """Weights of the matmuls of a layer, its norms and biases left out."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_heads * self.head_dim)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def embedding_parameters(self) -> float:
        """Weights of the embedding, and as many of the head where the two are not tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """All weights."""
        tables = 1 if self.tied else 2
        return self.layers * self.layer_parameters + tables * self.embedding_parameters

    def flops(self, sequences: float, recomputed: bool = False) -> float:
        """Operations of forward and backward over so many sequences, attention in full.

            6 N per token and 12 layers hidden seq for the scores and sums of attention

        (Narayanan et al., SC21, eq. 3 without its recomputation, which makes 4/3 of the layers'.)
        """
        tokens = sequences * self.seq
        layers = self.layers * (6 * self.layer_parameters + 12 * self.hidden * self.seq)
        return tokens * (layers * (4 / 3 if recomputed else 1) + 6 * self.embedding_parameters)


@dataclass(frozen=True)
class Run:
    """What ran, and what its source says of it.

    Args:
        table, source, confidence: where it was published, and how it was read there.
        name: of the model.
        model: what was trained.
        micro_batch: sequences of a micro-batch on one rank.
        micro_batches: of a step, on each data-parallel rank.
        schedule: one of autopipe's schedules, or `zb-2p`; 1f1b if there is no pipeline.
        chunks: stages on each rank.
        sequence_parallel: Megatron's, along with tensor parallelism.
        recompute: none, attention, elementwise (all but every other matmul), alternate (every
            other layer), full.
        attention: composed (of torch's ops), fused (Megatron's softmax kernel), flash1 or flash.
        software: the profile of what it ran with (`software.py`).
        dropout: there is dropout in the layers and in attention.
        sharding: the ZeRO stage, 0 to 3.
        half: its 16 bits are fp16, not bf16.
        low_gradients: gradients are summed in 16 bits (`software.low_gradients`).
        pure: weights are kept in 16 bits only, the optimizer's state too.
        gpu, memory_gb: the device as the row names it.
        within, between: the links as the row names them.
        seconds: of a step; None if not published.
        memory: bytes of the fullest device; None if not published.
        memory_kind: allocated, reserved, or device (all that the device has in use).
        oom: it ran out of memory.
    """

    id: str
    table: str
    source: str
    confidence: str
    name: str
    model: Model
    batch: int
    micro_batch: int
    micro_batches: int
    tp: int
    pp: int
    dp: int
    schedule: str
    chunks: int
    sequence_parallel: bool
    recompute: str
    attention: str
    software: Software
    dropout: bool
    sharding: int
    half: bool
    low_gradients: bool
    pure: bool
    gpu: str
    memory_gb: float | None
    devices: int
    per_node: int
    within: str
    between: str
    seconds: float | None
    memory: float | None
    memory_kind: str
    oom: bool

    @property
    def sweep(self) -> tuple[str, str, str]:
        """Rows of one section that train the same model, in layouts of their own."""
        return self.table, self.source, self.name


def read(row: Row) -> Run:
    """The run that a row describes.

    Raises:
        Unsupported: what it asks for is not modelled, or it does not say enough.
    """
    _refuse(row)
    tp, pp = _count(row, "tp", 1), _count(row, "pp", 1)
    shard = _text(row, "opt_shard")
    fsdp, software = "fsdp" in shard, software_of(row)
    # Megatron-LM's make_vocab_size_divisible_by, which those who build on it keep.
    model = _model(row, 1 if fsdp else 128 * tp)
    per_node = _count(row, "gpus_per_node", 8)
    dp = _count(row, "dp", max(1, (_number(row, "n_gpus") or tp * pp) / (tp * pp)))
    devices = tp * pp * dp
    batch, micro_batch, micro_batches = _batch(row, dp)
    schedule, chunks = _schedule(row, pp)
    attention, precision = _text(row, "attention"), _text(row, "precision")
    extra = " ".join(_text(row, name) for name in ("extra", "notes"))
    return Run(
        id=row.get("run_id") or "",
        table=row.get("table") or "",
        source=row.get("source") or "",
        confidence=row.get("confidence") or "",
        name=row.get("model") or "",
        model=model,
        batch=batch,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        tp=tp,
        pp=pp,
        dp=dp,
        schedule=schedule,
        chunks=chunks,
        sequence_parallel=_text(row, "seq_parallel") in ("1", "true", "yes") and tp > 1,
        recompute=_recompute(_text(row, "recompute")),
        attention=_attention(attention),
        software=software,
        dropout=not (model.llama or fsdp or software.no_dropout),
        sharding=_sharding(shard),
        half=precision.startswith("fp16"),
        low_gradients=low_gradients(row),
        pure="pure" in extra or fsdp and precision == "bf16" and "fsdp2" not in shard,
        gpu=row.get("gpu") or "",
        memory_gb=_number(row, "gpu_mem_gb"),
        devices=devices,
        per_node=min(per_node, devices),
        within=row.get("intra_node") or "",
        between=row.get("inter_node") or "",
        seconds=_seconds(row, model, batch, devices),
        memory=_memory(row),
        memory_kind=_memory_kind(_text(row, "mem_kind")),
        oom=_text(row, "status") == "oom",
    )


def _refuse(row: Row) -> None:
    """What is not modelled."""
    for name, what in (("cp", "context parallelism"), ("ep", "expert parallelism")):
        if (_number(row, name) or 1) > 1:
            raise Unsupported(f"{what}, {name} = {row[name]}")
    if (_number(row, "n_experts") or 0) > 1 or "moe" in _text(row, "arch"):
        raise Unsupported("experts")
    if re.search(r"fp8|float8|int8|^(fp|tf|float)32", _text(row, "precision")):
        raise Unsupported(f"precision {row['precision']}")


def _model(row: Row, padded: int) -> Model:
    """The model, its vocabulary a multiple of `padded`."""
    layers, hidden, heads, seq = (
        _required(row, name) for name in ("layers", "hidden", "heads", "seq")
    )
    arch = _text(row, "arch")
    gated = _text(row, "gated_ffn") in ("1", "true", "yes")
    llama = "llama" in arch or gated and "gpt" not in arch
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_count(row, "kv_heads", heads),
        ffn=_count(row, "ffn", hidden * (8 / 3 if gated else 4)),
        vocab=-(-_count(row, "vocab", 32000 if llama else 51200) // padded) * padded,
        seq=seq,
        gated=gated,
        llama=llama,
        tied=not llama,
    )


def _batch(row: Row, dp: int) -> tuple[int, int, int]:
    """Sequences of a step, of a micro-batch, and micro-batches."""
    batch, size, number = (_number(row, name) for name in ("gbs", "mbs", "n_microbatches"))
    if size is None and batch and number:
        size = batch / (dp * number)
    if number is None and batch and size:
        number = batch / (dp * size)
    if not size or not number:
        raise Unsupported("neither two of gbs, mbs and n_microbatches are there")
    micro_batches = max(1, round(number))
    return round(batch or size * micro_batches * dp), max(1, round(size)), micro_batches


_SCHEDULES = (
    (r"interleav|1f1b-i|vpp", "interleaved"),
    (r"zb-?v", "zb-v"),
    (r"zb-?2p|zb-?h2", "zb-2p"),
    (r"zb-?1p|zb-?h1", "zb-h1"),
    (r"gpipe|afab", "gpipe"),
    (r"1f1b", "1f1b"),
)


def _schedule(row: Row, pp: int) -> tuple[str, int]:
    """The schedule and the stages on each rank; a pipeline of none given runs 1F1B."""
    text = _text(row, "schedule")
    if re.search(r"half|min", text):
        raise Unsupported(f"schedule {row['schedule']}")
    name = next((name for pattern, name in _SCHEDULES if re.search(pattern, text)), "")
    if pp == 1 or not name and text in ("", "none"):
        name = "1f1b"
    if name == "1f1b" and pp > 1 and _count(row, "vpp", 1) > 1:
        name = "interleaved"
    if name == "interleaved":
        chunks = _count(row, "vpp", 2)
        return ("interleaved", chunks) if chunks > 1 else ("1f1b", 1)
    if not name:
        raise Unsupported(f"schedule {row['schedule']}")
    return name, 2 if name == "zb-v" else 1


def _recompute(text: str) -> str:
    if "op" in text.split():
        return "elementwise"
    if "layer" in text.split():
        return "alternate"
    if re.search(r"selective|core.?att", text):
        return "attention"
    return "full" if re.fullmatch(r"1|true|all|on|block|uniform|.*(full|yes).*", text) else "none"


def _attention(text: str) -> str:
    if "flash" in text and "unfused" not in text:
        return "flash1" if re.search(r"flash\D*1(?!\d)", text) else "flash"
    return "composed" if "torch" in text else "fused"


def _sharding(text: str) -> int:
    stage = re.search(r"zero[ -]?(\d)", text)
    if stage and "none" not in text:
        return int(stage[1])
    return 3 if "fsdp" in text else 1 if "distributed" in text else 0


def _seconds(row: Row, model: Model, batch: int, devices: int) -> float | None:
    if given := _number(row, "step_time_s"):
        return given
    if rate := _number(row, "tokens_per_s_per_gpu"):
        return batch * model.seq / (rate * devices)
    if rate := _number(row, "samples_per_s_per_gpu"):
        return batch / (rate * devices)
    if rate := _number(row, "tflops_per_gpu"):
        kind, recompute = _text(row, "tflops_kind"), _recompute(_text(row, "recompute"))
        counted = "hardware" in kind and recompute == "full"
        return model.flops(batch, counted) / (rate * 1e12 * devices)
    return None


def _memory(row: Row) -> float | None:
    """Bytes: sources that print GB count them as their tools do, in 2**30."""
    found = _number(row, "peak_mem_gb")
    return found * 2**30 if found else None


def _memory_kind(text: str) -> str:
    if "smi" in text:
        return "device"
    return "reserved" if "reserved" in text else "allocated"


def _text(row: Row, name: str) -> str:
    return (row.get(name) or "").strip().lower()


def _number(row: Row, name: str) -> float | None:
    """A number, None if there is none; 70% and 1,024 are numbers."""
    text = _text(row, name).replace(",", "").rstrip("%")
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def _count(row: Row, name: str, default: float) -> int:
    found = _number(row, name)
    return max(1, round(default if found is None or found < 1 else found))


def _required(row: Row, name: str) -> int:
    found = _number(row, name)
    if found is None or found < 1:
        raise Unsupported(f"no {name}")
    return round(found)
