"""Seconds of CPU to find the best sharding of a deep model.

    python -m benchmarks.tensor_parallel.solving [--layers 32] [--tp 2 4 8]

One JSON object per line: with blocks of a class sharing their variables, and without.
"""

from __future__ import annotations

import argparse
import json
import sys
from time import process_time

from autopipe.cluster.spec import parse
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.sharding.ilp import AxisCosts, shard
from tests.support.staged import trace_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel.solving")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    asked = parser.parse_args()

    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1376, num_hidden_layers=asked.layers,
        num_attention_heads=16, num_key_value_heads=16, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(rows, 128, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens}

    print(f"tracing {asked.layers} layers", file=sys.stderr)
    graph = trace_model(model, inputs).graph
    flow, blocks = analyse(graph), find_blocks(graph)
    cluster = parse("8xH100-80GB")
    assert not hasattr(cluster, "processes")
    shard(flow, blocks, AxisCosts(2, cluster.within, cluster.row[0]), 4)  # imports
    for tp in asked.tp:
        for alike in (True, False):
            axis = AxisCosts(tp, cluster.within, cluster.row[0])
            began = process_time()
            found = shard(flow, blocks, axis, 4, alike=alike)
            row = {
                "layers": asked.layers,
                "nodes": len(graph.nodes),
                "tp": tp,
                "blocks_alike": alike,
                "cpu_seconds": round(process_time() - began, 2),
                "sharded": sum(lies.sharded for lies in found.states.values()),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
