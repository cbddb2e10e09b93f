"""The command line: is every family right over several ranks, and how much do ranks share?

python -m benchmarks.tensor_parallel.families > rows.jsonl
python -m benchmarks.tensor_parallel.families llama t5 --tp 4
python -m benchmarks.tensor_parallel.families --table rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values
from autopipe.ir.graph import Graph, at_batch, bytes_at
from autopipe.ir.op_costs import costs
from autopipe.planfile.placements import I
from autopipe.sharding.functionalize import out_of_place
from autopipe.sharding.ilp import Sharding, shard
from autopipe.sharding.local_graph import sent_by, shard_graph
from autopipe.tracing.traced import Trace
from benchmarks.tensor_parallel.configs import FAMILIES, Family
from tests.support import simulated
from tests.support.staged import micro_batches, trace_model

ROWS = 2
"""Of the micro-batch."""

MANY = 512
"""Rows that plans with shards of sequences are made for: with few it never pays."""

CLOSE = {torch.float32: 1e-5, torch.float64: 1e-9}
"""How far a gradient may be from that of one process, relative to its largest element."""

Row = dict[str, Any]


class Subject:
    """A model, traced, with what one process makes of a micro-batch."""

    def __init__(self, family: Family, attention: str) -> None:
        self.model: nn.Module = family.build(attention)
        self.trace: Trace = trace_model(
            self.model, family.batch, family.loss, training=family.training
        )
        (self.leaves,) = micro_batches(self.trace, family.batch(ROWS), 1)
        self.loss, self.gradients = simulated.one_process(self.trace, self.model, self.leaves, ROWS)
        self.trace = replace(self.trace, graph=out_of_place(self.trace.graph))
        self.flow: Dataflow = analyse(self.trace.graph)

    def plan(self, ranks: int, sequence: bool) -> Sharding:
        """How to deal it out."""
        blocks = find_blocks(self.trace.graph)
        rows = MANY if sequence else ROWS
        return shard(self.flow, blocks, simulated.axis(ranks), rows, sequence=sequence)

    def differences(self, sharding: Sharding) -> tuple[float, float, str]:
        """From one process: the loss, the worst gradient, and whose it is."""
        losses, gradients = simulated.step(self.trace, self.model, self.leaves, ROWS, sharding)
        worst, name = simulated.worst(gradients, self.gradients)
        loss = max(abs(float(loss - self.loss)) for loss in losses)
        return loss / max(abs(float(self.loss)), 1e-3), worst, name


def row(subject: Subject, ranks: int, sequence: bool) -> Row:
    """Deal it out, compare, and count."""
    begin = time.perf_counter()
    sharding = subject.plan(ranks, sequence)
    seconds = time.perf_counter() - begin
    loss, gradient, name = subject.differences(sharding)
    graph = subject.trace.graph
    parameters = {n: s for n, s in graph.states.items() if s.kind == "parameter"}
    sharded = [n for n in parameters if n in sharding.states and sharding.states[n].sharded]
    size = {n: bytes_at(s.spec, ROWS) for n, s in parameters.items()}
    forward, backward = collectives(shard_graph(subject.flow, sharding, 0))
    work, alone = shared_work(subject.flow, sharding)
    close = CLOSE[subject.loss.dtype]
    return {
        "sharded": len(sharded),
        "parameters": len(parameters),
        "bytes": round(sum(size[n] for n in sharded) / sum(size.values()), 3),
        "work": round(work, 3),
        "gradient": gradient,
        "of": name,
        "loss": loss,
        "right": gradient < close and loss < close,
        "forward": forward,
        "backward": backward,
        "seconds": round(seconds, 2),
        "alone": alone,
    }


def shared_work(flow: Dataflow, sharding: Sharding) -> tuple[float, list[str]]:
    """The part of all operations that ranks share, and the ops that cost most of the rest."""
    shared, alone = 0.0, Counter[str]()
    graph = flow.graph
    for node, cost in zip(graph.nodes, costs(graph), strict=True):
        flops = at_batch(cost.forward_flops + cost.backward_flops, ROWS)
        inputs, output = sharding.nodes.get(node.name, ((), I))
        if any(lies.sharded for lies in (*inputs, output)):
            shared += flops
        else:
            alone[node.op] += flops
    return shared / (shared + alone.total()), [op for op, _ in alone.most_common(4)]


def collectives(graph: Graph) -> tuple[int, int]:
    """How many a rank's graph has in forward and in backward."""
    carrying = gradient_values(graph)
    forward = backward = 0
    for node in graph.nodes:
        there, back = sent_by(node, carrying)
        forward += there is not None
        backward += back is not None
        forward += node.op == "autopipe.largest.default"
    return forward, backward


def rows(chosen: argparse.Namespace) -> Iterator[Row]:
    """A row for each family, attention, number of ranks and kind of plan."""
    for name in chosen.names or FAMILIES:
        family = FAMILIES[name]
        for attention in family.attention:
            print(f"{name}, {attention}", file=sys.stderr, flush=True)
            known: Row = {"family": name, "attention": attention}
            try:
                subject = Subject(family, attention)
            except Exception as error:
                yield {**known, **failed(error)}
                continue
            for ranks, sequence in product(chosen.tp, (False, True)):
                known |= {"tp": ranks, "sequence": sequence}
                try:
                    yield {**known, **row(subject, ranks, sequence)}
                except Exception as error:
                    yield {**known, **failed(error)}


def failed(error: Exception) -> Row:
    """What is said of a case that came to no end; the rest goes on."""
    traceback.print_exception(error)
    return {"right": False, "error": f"{type(error).__name__}: {error}"}


def table(found: Sequence[Row]) -> str:
    """A line for each family and number of ranks: the worst difference of all its rows there.

    What is divided and sent is that of the ordinary plan with the first kind of attention.
    """
    lines = [
        "| family | attention | tp | parameters divided | of their bytes | of the operations "
        "| gradients differ by | loss | collectives, forward + backward | seconds to plan |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["family"] for r in found):
        of_it = [r for r in found if r["family"] == name]
        kinds = " ".join(dict.fromkeys(r["attention"] for r in of_it))
        refused = [r["error"].split(":")[0] for r in of_it if "error" in r]
        if refused:
            lines.append(f"| {name} | {kinds} | | {refused[0]} | | | | | | |")
        for ranks in sorted({r["tp"] for r in of_it if "error" not in r}):
            some = [r for r in of_it if r.get("tp") == ranks and "error" not in r]
            first = some[0]
            cells = [name, kinds, ranks, f"{first['sharded']} of {first['parameters']}"]
            cells += [f"{first['bytes']:.0%}", f"{first['work']:.0%}"]
            cells += [f"{max(r[of] for r in some):.1e}" for of in ("gradient", "loss")]
            cells += [f"{first['forward']} + {first['backward']}"]
            cells += [f"{max(r['seconds'] for r in some):.2f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tensor_parallel.families",
        description="Loss and gradients of tiny models, dealt out, against those of one process.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="family", help="all by default: " + " ".join(FAMILIES))
    add("--tp", nargs="+", type=int, default=[2, 4], help="ranks")
    add("--table", type=Path, help="the rows of an earlier run as a table; runs nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Print a row for each case; the exit code is 1 if one is wrong."""
    chosen = arguments().parse_args(argv)
    if chosen.table:
        print(table([json.loads(line) for line in chosen.table.read_text().splitlines()]))
        return 0
    torch.set_num_threads(1)
    wrong = 0
    for found in rows(chosen):
        print(json.dumps(found), flush=True)
        wrong += not found["right"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
