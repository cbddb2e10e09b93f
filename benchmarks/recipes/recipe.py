"""A row of a table of recipes, read: the question that it answers, and the layout that it chose.

What a row leaves empty is inherited there from the model's default, which the table does not have.
It is taken here as: one rank of each kind, no recomputation, a distributed optimizer (ZeRO-1), and
the length of a row that `models` has, or in fine-tuning `TUNED`.

What is trained is in a recipe's name: all weights if it says `pretrain` or `sft`. If it says `peft`
or `lora`, it is adapters beside queries, keys and values, as Llama 3's have it (Megatron-Bridge,
`perf_recipes/llama/b200/llama3.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.recipes.models import DECODERS, Decoder

Row = Mapping[str, str]

RANK = 16
"""Of adapters: that of Llama 3 70B (Megatron-Bridge, `llama3_70b_peft_config`), taken for all."""

TUNED = 4096
"""Tokens of a row in fine-tuning, of recipes that do not say."""


class Unbuilt(Exception):
    """The recipe's question cannot be put: it says why."""


@dataclass(frozen=True)
class Layout:
    """What experts chose; `replaced` is what of it cannot be said to the tool, and stands for it.

    `even` is whether stages have equally many layers, as Megatron-LM deals them out where a recipe
    writes no cuts.
    """

    tp: int
    pp: int
    dp: int
    micro_batches: int
    chunks: int
    even: bool
    zero: int
    sequence_parallel: bool
    recompute: str
    replaced: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """A question, and its answer by experts.

    Args:
        name: of the recipe.
        model: what is trained, on rows of `seq` tokens.
        gpu, gpus: the device as the name has it, and how many.
        batch: rows of the whole batch.
        rank: of the adapters that are trained; None: all weights are.
        layout: the experts'; a text says why the tool cannot be given it.
    """

    name: str
    model: Decoder
    seq: int
    gpu: str
    gpus: int
    batch: int
    rank: int | None
    layout: Layout | str


def read(row: Row) -> Recipe:
    """The recipe of a row.

    Raises:
        Unbuilt: its model or its devices cannot be told, or are none that the tool knows.
    """
    name = row.get("recipe") or ""
    if not (where := re.search(r"_(\d+)gpu_([a-z]+\d+)", name)):
        raise Unbuilt("its name has no devices: expected ..._64gpu_h100_...")
    task = re.search(r"_(pretrain|sft|peft|lora)_", name)
    if task is None:
        raise Unbuilt("its name does not say what is trained: pretrain, sft, peft or lora")
    model = next((m for key, m in DECODERS.items() if name.startswith(f"{key}_")), None)
    if model is None:
        raise Unbuilt("its dimensions are not in benchmarks/recipes/models.py")
    batch = _count(row, "global_batch_size")
    if batch is None:
        raise Unbuilt("no global_batch_size")
    seq = _count(row, "seq_length") or (model.seq if task[1] == "pretrain" else TUNED)
    gpus, rank = int(where[1]), RANK if task[1] in ("peft", "lora") else None
    layout = _undivided(row, model) or _layout(row, gpus, batch)
    return Recipe(name, model, seq, where[2], gpus, batch, rank, layout)


def _undivided(row: Row, model: Decoder) -> str | None:
    """What a layout divides that the tool does not divide."""
    ep = _count(row, "expert_model_parallel_size")
    if ep is None and model.experts:
        return "expert parallel, ep inherited"
    return f"expert parallel, ep={ep}" if ep is not None and ep > 1 else None


def _layout(row: Row, gpus: int, batch: int) -> Layout | str:
    cp = _count(row, "context_parallel_size") or 1
    if cp > 1:
        return f"context parallel, cp={cp}"
    tp, pp = (_count(row, f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline"))
    size = _count(row, "micro_batch_size") or 1
    dp, left = divmod(gpus, tp * pp)
    if left or batch % (dp * size):
        return f"tp={tp} pp={pp} micro-batches of {size} do not divide {gpus} GPUs and {batch} rows"
    even = _said(row, "layout") is None
    replaced = [] if even else ["its own cuts"]
    granularity = _said(row, "recompute_granularity")
    if granularity == "selective":
        replaced.append("recompute selective as none")
    if (some := _count(row, "recompute_num_layers")) and granularity == "full":
        replaced.append(f"recompute {some} layers as all")
    fsdp = _said(row, "use_megatron_fsdp") == "True"
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batches=batch // (dp * size),
        chunks=_count(row, "virtual_pipeline_model_parallel_size") or 1,
        even=even,
        zero=3 if fsdp else 1,
        sequence_parallel=_said(row, "sequence_parallel") == "True",
        recompute="all" if granularity == "full" else "none",
        replaced=tuple(replaced),
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
