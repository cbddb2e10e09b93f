"""The models of the zoo on the ranks that torchrun has started: nothing is simulated.

    torchrun --nproc-per-node 2 -m benchmarks.zoo.ranks --to rows.jsonl --way pp2
    torchrun --nproc-per-node 2 -m benchmarks.zoo.ranks --to rows.jsonl --way tp2 --gpu --only odd/

Rank 0 plans, all ranks train a step by `autopipe.parallelize`, and rank 0 holds what they have
together to plain PyTorch on its own device. Ranks may share a GPU: then tensors go over gloo.

Set PYTHONHASHSEED: ranks with seeds of their own go through sets in other orders, as Gemma 3 does.

A model that ends the ranks, or keeps them for too long, stays in the file as "crashed": the same
command, given again, goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import autopipe
from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import parse
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import InputSpec
from autopipe.sharding.collectives import together
from autopipe.sharding.plan_io import read_back
from autopipe.stages.precision import AUTOCAST
from benchmarks.zoo.compare import compared
from benchmarks.zoo.hub.kernels import importable
from benchmarks.zoo.one_process import Result
from benchmarks.zoo.row import Row, attempt, failed, said
from benchmarks.zoo.subject import Model, Subject
from benchmarks.zoo.trial import (
    CLOSE_IN_16_BITS,
    SPLITS,
    Doubled,
    Tried,
    dealt,
    micro_batches,
    processes,
    unsplit,
)
from benchmarks.zoo.versions import doubled

T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """How models are split, in which precision, and on what.

    Attributes:
        split: a key of `SPLITS`.
        device: "cpu" or "cuda".
        compiled: whether stages are; None: as the planner chooses, which compiles them on GPUs.
    """

    split: str
    precision: str
    device: str
    compiled: bool | None = None

    @property
    def name(self) -> str:
        """As it stands in a row."""
        kind = "-processes" if self.device == "cpu" else "-gpu"
        engine = "-eager" if self.compiled is False else ""
        precision = f"-{self.precision}" if self.precision != "fp32" else ""
        return self.split + kind + engine + precision

    def cluster(self, ranks: int) -> Cluster:
        """GPUs are known by a datasheet: what they are has no say in what is tried."""
        if self.device == "cpu":
            return processes(ranks)
        found = parse(f"{ranks}xH100-80GB")
        assert isinstance(found, Cluster)
        return found


@dataclass(frozen=True)
class Planned:
    """A plan, and what rank 0 wants to know of its model once it has run.

    Attributes:
        close: how far a sum in another order may be off.
        dealt: as `Row` has it.
        sizes: of all parameters, whole.
    """

    plan: Plan
    close: float
    dealt: float | None
    sizes: dict[str, torch.Size]


def main() -> None:
    """Try what is asked for and not yet in the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--to", type=Path, required=True, help="the file of rows")
    add("--way", choices=sorted(SPLITS), required=True, help="how to split: as many ranks as run")
    add("--only", default="", help="parts of names, with commas between")
    add("--gpu", action="store_true", help="on a GPU, shared if there are fewer than ranks")
    add("--precision", default="fp32", choices=("fp32", *AUTOCAST), help="of plans")
    add("--no-compile", action="store_true", help="on a GPU: many models in a short time")
    add("--share", default="0/1", help="2/5: the third of five shares of the models")
    add("--limit", type=int, default=120, help="seconds that a model may take")
    chosen = parser.parse_args()
    device, compiled = "cuda" if chosen.gpu else "cpu", False if chosen.no_compile else None
    way = Way(chosen.way, chosen.precision, device, compiled)
    importable()  # before transformers is
    from benchmarks.zoo import catalogue

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # kernels that round as their dtype says,
    torch.use_deterministic_algorithms(chosen.gpu, warn_only=True)  # and alike at every call
    dist.init_process_group("gloo")
    subjects = catalogue.named(chosen.only, every=bool(chosen.only))
    random.Random(0).shuffle(subjects)  # so that a run that is cut short is a fair sample
    number, shares = map(int, chosen.share.split("/"))
    done = from_first(lambda: _begun(chosen.to, way))
    for subject in subjects[number::shares]:
        if subject.name not in done:
            tried(subject, way, chosen.to, chosen.limit)
    dist.destroy_process_group()


def _begun(rows: Path, way: Way) -> set[str]:
    """The models that a file has a row of."""
    lines = rows.read_text().splitlines() if rows.exists() else []
    return {row["model"] for row in map(json.loads, lines) if row["what"] == way.name}


def tried(subject: Subject, way: Way, rows: Path, limit: int) -> None:
    """Try a model; the file gets a row as it begins, and another one of what comes of it.

    Args:
        limit: seconds, after which its ranks end.
    """

    def write(row: Row) -> None:
        with rows.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    first = dist.get_rank() == 0
    if first:
        write(Row(subject.name, way.name, "crashed", "the ranks ended"))
    signal.alarm(limit)
    try:
        row = outcome(subject, way)
        if row.outcome == "wrong" and way.precision == "fp32":
            again = outcome(subject, way, in_doubles=True)
            if again.outcome == "right":  # a mistake would stay in fp64
                row = replace(row, outcome="right", cause="", reference="eager in fp64")
    except Exception as error:  # a refusal, or a bug of autopipe: a row of its own
        row = failed(subject.name, way.name, error)
        if row.outcome == "crashed":
            time.sleep(2)  # a peer may know the reason, and torchrun ends this rank with it
        write(row)
        os._exit(1)  # other ranks wait for this one
    signal.alarm(0)
    if first:
        write(row)
        print(row.model, row.what, row.outcome, row.cause, flush=True)


def outcome(subject: Subject, way: Way, *, in_doubles: bool = False) -> Row:
    """What comes of a model, the same on every rank.

    Raises:
        Exception: what autopipe raises while ranks run.
    """
    one = from_first(
        lambda: attempt(subject.name, way.name, lambda: planned(subject, way, in_doubles))
    )
    if isinstance(one, Row):
        return one
    model = doubled(subject.make()) if in_doubles else subject.make()
    found = stepped(one, model)

    def held() -> Row:
        try:
            expected = eager(model, way, one.plan.inputs)
        except Exception as error:  # what plain PyTorch does not run there is no trial
            return Row(subject.name, way.name, "not built", said(error))
        worst, bitwise, differing = compared(found, expected, one.close)
        return Row(
            model=subject.name,
            what=way.name,
            outcome="wrong" if differing else "right",
            cause=", ".join(differing[:4]),
            gradient=worst,
            bitwise=bitwise,
            dealt=one.dealt,
            reference="eager",
        )

    return from_first(held)


def from_first(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank."""
    made: list[Any] = [make()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(made)
    return made[0]


def planned(subject: Subject, way: Way, in_doubles: bool) -> Planned | Row:
    """Plan a model as `autopipe.plan` does.

    Raises:
        Exception: what that raises.
    """
    try:
        model = subject.make()
    except Exception as error:  # whatever a library raises
        return Row(subject.name, way.name, "not built", said(error))
    tried = Tried(subject, model, way.cluster, way.precision, way.compiled)
    if tried.random:
        return Row(subject.name, way.name, "not built", "draws random numbers")
    if len(tried.trace.graph.outputs) > 1:
        return Row(subject.name, way.name, "not built", "its loss is a sum and a count")
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.build().modules()):
        return Row(subject.name, way.name, "not built", "its plain PyTorch would ask other ranks")
    pp, tp = SPLITS[way.split]
    plan = tried.plan(pp, tp)
    share = dealt(plan, tried.trace.graph) if tp > 1 else None
    close = tried.close if way.precision == "fp32" else CLOSE_IN_16_BITS
    if in_doubles:
        plan = Doubled(tried).plan(pp, tp)
    sizes = {name: parameter.shape for name, parameter in model.build().named_parameters()}
    return Planned(plan, close, share, sizes)


def stepped(one: Planned, given: Model) -> Result:
    """A step by `autopipe.parallelize`; on rank 0 what all ranks hold together, on the CPU."""
    pipe = autopipe.parallelize(given.build(), one.plan, inputs=given.inputs, loss=given.loss)
    loss = pipe.step(given.inputs(one.plan.batch.rows))
    named = dict(pipe.named_parameters())
    own = {name: p.grad.cpu() for name, p in named.items() if p.grad is not None}
    buffers = {name: buffer.cpu() for name, buffer in pipe.named_buffers()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (own, buffers))
    gradients = {name: gradient for part, _ in parts for name, gradient in part.items()}
    for name, lies in read_back(one.plan).states.items():
        if lies.sharded and name in gradients:
            rows = [part[name] for part, _ in parts]
            gradients[name] = together(rows, lies, one.sizes[name][lies.dim])
    every = {name: buffer for _, part in parts for name, buffer in part.items()}
    return Result([loss.detach().cpu()], gradients, every)


def eager(given: Model, way: Way, specs: Sequence[InputSpec]) -> Result:
    """What plain PyTorch computes over the same micro-batches; the mean of its losses."""
    dtype = AUTOCAST.get(way.precision)
    parts = tree_map(partial(_on, way.device), micro_batches(specs, given))
    autocast = partial(torch.autocast, way.device, dtype, enabled=dtype is not None)
    found = unsplit(given, given.build().to(way.device), parts, autocast)
    mean = torch.stack([loss.sum().float() for loss in found.losses]).mean().cpu()
    return Result([mean], _on_cpu(found.gradients), _on_cpu(found.buffers))


def _on(device: str, leaf: Any) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


if __name__ == "__main__":
    main()
