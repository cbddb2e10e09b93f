"""A row of a table of recipes, read: the question that it answers, and the layout that it chose.

What a row leaves empty is inherited there from the model's default, which the table does not have.
It is taken here as: one rank of each kind, no recomputation, a distributed optimizer (ZeRO-1), and
the length of a row that `models` has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.recipes.models import DECODERS, Decoder

Row = Mapping[str, str]


class Unbuilt(Exception):
    """The recipe's question cannot be put: it says why."""


@dataclass(frozen=True)
class Layout:
    """What experts chose; `unsaid` is what of it cannot be said to the tool, and stands for it."""

    tp: int
    pp: int
    dp: int
    micro_batches: int
    chunks: int
    zero: int
    sequence_parallel: bool
    recompute: str
    unsaid: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """A question, and its answer by experts.

    Args:
        name: of the recipe.
        model: what is trained, on rows of `seq` tokens.
        gpu, gpus: the device as the name has it, and how many.
        batch: rows of the whole batch.
        layout: the experts'; a text says why the tool cannot be given it.
    """

    name: str
    model: Decoder
    seq: int
    gpu: str
    gpus: int
    batch: int
    layout: Layout | str


def read(row: Row) -> Recipe:
    """The recipe of a row.

    Raises:
        Unbuilt: its model or its devices cannot be told, or are none that the tool knows.
    """
    name = row.get("recipe") or ""
    if not (where := re.search(r"_(\d+)gpu_([a-z]+\d+)", name)):
        raise Unbuilt("its name has no devices: expected ..._64gpu_h100_...")
    if (_count(row, "expert_model_parallel_size") or 1) > 1 or "moe" in (row.get("file") or ""):
        raise Unbuilt("experts, which the tool's models of transformers do not divide")
    if "_pretrain" not in name:
        raise Unbuilt("fine-tuning: the row does not say which weights are trained")
    model = next((m for key, m in DECODERS.items() if name.startswith(f"{key}_")), None)
    if model is None:
        raise Unbuilt("its dimensions are not in benchmarks/recipes/models.py")
    batch = _count(row, "global_batch_size")
    if batch is None:
        raise Unbuilt("no global_batch_size")
    seq = _count(row, "seq_length") or model.seq
    gpus = int(where[1])
    return Recipe(name, model, seq, where[2], gpus, batch, _layout(row, gpus, batch))


def _layout(row: Row, gpus: int, batch: int) -> Layout | str:
    cp = _count(row, "context_parallel_size") or 1
    if cp > 1:
        return f"context parallel, cp={cp}"
    tp, pp = (_count(row, f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    size = _count(row, "micro_batch_size") or 1
    dp, left = divmod(gpus, tp * pp)
    if left or batch % (dp * size):
        return f"tp={tp} pp={pp} micro-batches of {size} do not divide {gpus} GPUs and {batch} rows"
    unsaid = [] if _said(row, "layout") is None else ["its own cuts"]
    granularity = _said(row, "recompute_granularity")
    if granularity == "selective":
        unsaid.append("recompute selective as none")
    if (some := _count(row, "recompute_num_layers")) and granularity == "full":
        unsaid.append(f"recompute {some} layers as all")
    fsdp = _said(row, "use_megatron_fsdp") == "True"
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batches=batch // (dp * size),
        chunks=_count(row, "virtual_pipeline_model_parallel_size") or 1,
        zero=3 if fsdp else 1,
        sequence_parallel=_said(row, "sequence_parallel") == "True",
        recompute="all" if granularity == "full" else "none",
        unsaid=tuple(unsaid),
    )


def _said(row: Row, name: str) -> str | None:
    """A field without its quotes; None: empty, or Python's None."""
    text = (row.get(name) or "").strip()
    if text in ("", "None"):
        return None
    return str(json.loads(text)) if text.startswith('"') else text


def _count(row: Row, name: str) -> int | None:
    text = _said(row, name)
    return int(text) if text is not None and text.isdigit() else None
