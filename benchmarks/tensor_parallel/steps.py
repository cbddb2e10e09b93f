"""Seconds of a training step in two parts: autopipe's, and torch's own tensor parallelism.

    python -m benchmarks.tensor_parallel.steps [llama] [bert] [--rounds 12]

Three sides in the same two processes, one after the other in each round:

    one        the model as it is, on rank 0 alone
    autopipe   `autopipe.plan(..., tp=2)` and `pipe.step`, no word about the model
    torch      `parallelize_module` with ColwiseParallel and RowwiseParallel by module name

Forward and backward, no optimizer. Overhead is what a step takes beyond half of one process's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

RANKS = 2
ROWS, TOKENS, VOCABULARY = 4, 64, 1024

COLUMNS = {
    "llama": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "bert": ("attention.self.query", "attention.self.key", "attention.self.value",
             "intermediate.dense"),
}  # fmt: skip
ROW = {
    "llama": ("o_proj", "down_proj"),
    "bert": ("attention.output.dense", "output.dense"),
}
"""What torch has to be told of each family."""


def make(name: str) -> nn.Module:
    """A model of four layers, 256 wide."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=8, use_cache=False)
        return transformers.LlamaForCausalLM(config)
    config = transformers.BertConfig(
        **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def inputs(rows: int) -> dict[str, Tensor]:
    """A batch, the same on every rank."""
    tokens = torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def plainly(model: nn.Module) -> Callable[[], Tensor]:
    """Forward and backward of a module."""

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(**inputs(ROWS)).loss
        loss.backward()
        return loss.detach()

    return step


def torchs(name: str) -> Callable[[], Tensor]:
    """The model as torch deals it out."""
    model = make(name)
    styles = {
        path: ColwiseParallel() if path.endswith(COLUMNS[name]) else RowwiseParallel()
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path.endswith((*COLUMNS[name], *ROW[name]))
        and not path.startswith("cls.")
    }  # fmt: skip
    return plainly(parallelize_module(model, init_device_mesh("cpu", (RANKS,)), styles))


def ours(name: str) -> Callable[[], Tensor]:
    """The model as autopipe deals it out."""
    import autopipe

    made: list[Any] = [None]
    if dist.get_rank() == 0:
        made[0] = autopipe.plan(
            lambda: make(name), inputs, cluster=f"local:{RANKS}", batch_size=ROWS, tp=RANKS, pp=1,
            dp=1, micro_batches=1,
        )  # fmt: skip
    dist.broadcast_object_list(made)
    pipe = autopipe.parallelize(make(name), made[0])
    return lambda: pipe.step(inputs(ROWS))


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One line of the table; every rank calls it."""
    sides = {"one": plainly(make(name)), "autopipe": ours(name), "torch": torchs(name)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    losses = {}
    for number in range(rounds + 3):  # three to warm up
        for side, step in sides.items():
            dist.barrier()
            began = perf_counter()
            if side != "one" or dist.get_rank() == 0:
                losses[side] = float(step())
            dist.barrier()
            if number >= 3:
                seconds[side].append(perf_counter() - began)
    ideal = [one / RANKS for one in seconds["one"]]
    over = {s: [t - i for t, i in zip(seconds[s], ideal, strict=True)] for s in sides if s != "one"}
    ratio = [theirs / mine for theirs, mine in zip(over["torch"], over["autopipe"], strict=True)]
    return {
        "model": name,
        **{f"{side}_ms": round(statistics.median(t) * 1e3, 2) for side, t in seconds.items()},
        **{f"{side}_over_ms": round(statistics.median(t) * 1e3, 2) for side, t in over.items()},
        "ratio": [round(q, 2) for q in statistics.quantiles(ratio, n=4)],
        "losses": {side: round(loss, 5) for side, loss in losses.items()},
        "rounds": rounds,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel.steps")
    parser.add_argument("models", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    if "RANK" not in os.environ:
        from autopipe.runtime.launch.world import spawn

        root = str(Path(__file__).parent.parent.parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        sys.exit(spawn(RANKS, sys.argv[1:], command=(sys.executable, __file__)))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in asked.models or list(COLUMNS):
        found = measure(name, asked.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
