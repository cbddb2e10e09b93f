"""Plan GPT models with whole blocks recomputed, and with the recomputation the planner chooses.

`python -m benchmarks.recompute [CASE ...]` prints a JSON object for each plan.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import autopipe
from autopipe.errors import InfeasibleError
from autopipe.planfile.again import repeated
from benchmarks.published import rows
from benchmarks.published.module import Transformer


@dataclass(frozen=True)
class Case:
    """A GPT whose attention is matmuls and a softmax, and where it is planned.

    Attributes:
        dims: layers, width, heads and vocabulary; rows have 2048 tokens.
        layout: constraints of the plan.
        limits: memory limits of a device to plan under; "": what it has.
    """

    dims: tuple[int, int, int, int]
    cluster: str
    batch: int
    layout: dict[str, Any]
    limits: tuple[str, ...]


INTERLEAVED = {"schedule": "interleaved", "chunks": 3}

CASES = {
    "GPT-6.7B": Case(
        (32, 4096, 32, 51200),
        "1x8xA100-40GB",
        128,
        {"tp": 1, "pp": 8, "dp": 1, "micro_batches": 64, "schedule": "1f1b"},
        ("32GiB", "26GiB", "22GiB"),
    ),
    "GPT-22B": Case(
        (48, 6144, 64, 51200),
        "1x8xA100-80GB",
        4,
        {"tp": 8, "pp": 1, "dp": 1, "micro_batches": 1},
        ("", "62GiB", "56GiB"),
    ),
    "GPT-175B": Case(
        (96, 12288, 96, 51200),
        "8x8xA100-80GB",
        64,
        {"tp": 8, "pp": 8, "dp": 1, "micro_batches": 64, **INTERLEAVED},
        ("", "56GiB", "50GiB"),
    ),
}
"""By name. The last two are of Korthikanti et al. (2022), tables 3 and 5."""


def inputs(vocab: int, batch: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    tokens = torch.randint(vocab, (2, batch, 2048), generator=torch.Generator().manual_seed(0))
    return tokens[0], tokens[1]


def plans(name: str) -> Iterator[dict[str, Any]]:
    """Each plan of a case: nothing again, whole blocks, and the planner's choice under limits."""
    case = CASES[name]
    layers, width, heads, vocab = case.dims
    row = {
        **{"run_id": name, "table": name, "model": name, "arch": "gpt", "source": ""},
        **{"layers": layers, "hidden": width, "heads": heads, "kv_heads": heads},
        **{"ffn": 4 * width, "gated_ffn": 0, "vocab": vocab, "seq": 2048, "gbs": case.batch},
        **{"mbs": 1, "attention": "unfused", "precision": "bf16", "gpu": "A100-SXM4-80GB"},
        **{"n_gpus": 8, "gpus_per_node": 8, "gpu_mem_gb": 80, "status": "ok"},
    }
    run = rows.read({key: str(value) for key, value in row.items()})
    asked = [("none", ""), ("all", ""), *((None, limit) for limit in case.limits)]
    for recompute, limit in asked:
        said = {"case": name, "recompute": recompute or "chosen", "limit": limit}
        try:
            plan = autopipe.plan(
                partial(Transformer, run),
                partial(inputs, vocab),
                cluster=case.cluster,
                batch_size=case.batch,
                precision="bf16",
                recompute=recompute,
                memory=limit or None,
                loss_parts="off",
                **case.layout,
            )
        except InfeasibleError as error:
            yield {**said, "refused": str(error).partition("\n")[0]}
            continue
        again = repeated(plan, plan.stages)
        yield {
            **said,
            "step_seconds": plan.prediction.step_seconds,
            "fullest_gib": max(s.predicted.memory.peak for s in plan.stages) / 2**30,
            "again": "; ".join(map(str, again)),
        }


if __name__ == "__main__":
    for asked_for in sys.argv[1:] or CASES:
        for found in plans(asked_for):
            print(json.dumps(found), flush=True)
