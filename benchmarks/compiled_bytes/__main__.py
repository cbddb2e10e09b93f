"""Bytes of a compiled stage beside its states, as planned and as torch's allocator counts them.

    python -m benchmarks.compiled_bytes [CASE ...]

A line of JSON for each case. One process, one stage, two micro-batches, after a step that compiles:

    alive   states, sums of the 1st micro-batch | 2nd: forward, kept | backward: peak |
            `before`                                                                  ^ `allocated`

`planned` is what the plan counts between the two: kept, and made (`joint.fullest_call`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import autopipe
from autopipe.frontend.model_file import ModelFile
from autopipe.runtime.step.engine import JointEngine
from benchmarks.honesty.models import MODELS, example

ON_GPUS = "../benchmarks/gpu/models"
"""Where the models stand that were measured on GPUs, seen from the examples."""

LLAMA = {"VOCABULARY": 3200, "WIDTH": 256, "LAYERS": 2, "HEADS": 4, "KV_HEADS": 2, "HIDDEN": 704}
GPT = {"VOCABULARY": 2000, "WIDTH": 128, "LAYERS": 6, "HEADS": 2, "LENGTH": 64}

MEASURED = "the measured step"


class Case(NamedTuple):
    """A model and the precision that it is planned in."""

    file: Callable[[], ModelFile]
    precision: str


CASES = {
    "llama": Case(partial(example, f"{ON_GPUS}/llama.py", **LLAMA, LENGTH=128), "fp32"),
    "llama-bf16": Case(partial(example, f"{ON_GPUS}/llama.py", **LLAMA, LENGTH=128), "bf16"),
    "gpt": Case(partial(example, f"{ON_GPUS}/gpt.py", **GPT), "fp32"),
    "gpt-bf16": Case(partial(example, f"{ON_GPUS}/gpt.py", **GPT), "bf16"),
    "conv": Case(MODELS["conv"], "fp32"),
    "hf-llama": Case(MODELS["llama"], "fp32"),
}
"""By name: a vocabulary that is most of what is there, dropout and tied weights, batch norms, and
blocks whose weights are large beside their activations."""

ROWS = 8


def main(names: Sequence[str]) -> int:
    """Measure the cases of these names, or all."""
    torch.set_num_threads(1)  # each has scratch memory of its own
    for name in names or CASES:
        print(json.dumps({"case": name, **row(CASES[name])}), flush=True)
    return 0


def row(case: Case) -> dict[str, float]:
    """A case's bytes in MiB, and by how many percent the planned ones are above the allocator's."""
    planned, kept, before, allocated = measured(case)
    mib = {"kept": kept, "planned": planned, "allocated": allocated - before, "before": before}
    off = 100 * (planned / (allocated - before) - 1)
    return {**{name: round(size / 2**20, 2) for name, size in mib.items()}, "off": round(off, 1)}


def measured(case: Case) -> tuple[int, int, int, int]:
    """Bytes: planned, those of it that forward keeps, alive before the second micro-batch, and the
    most in its backward."""
    file = case.file()
    plan = autopipe.plan(
        file.model,
        file.inputs,
        loss=file.loss,
        cluster="local:1",
        batch_size=ROWS,
        micro_batches=2,
        precision=case.precision,
        compile=True,
    )
    pipe = autopipe.parallelize(file.model, plan, loss=file.loss)
    torch.manual_seed(0)
    batch = file.inputs(ROWS)
    engines: list[JointEngine] = []
    with _marked(engines), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        pipe.step(batch)
        with record_function(MEASURED):
            pipe.step(batch)
    memory = plan.stages[0].predicted.memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    planned = memory.activations + memory.transfers + memory.passing
    return planned, engines[0].joint.kept, *moments(events)


@contextmanager
def _marked(engines: list[JointEngine]) -> Iterator[None]:
    """Within, forwards and backwards are events with the micro-batch's number; notes who runs."""

    def marking(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(engine: JointEngine, microbatch: int, tensors: Any) -> Any:
            engines.append(engine)
            with record_function(f"{name}{microbatch}"):
                return method(engine, microbatch, tensors)

        return run

    with (
        patch.object(JointEngine, "forward", marking(JointEngine.forward, "F")),
        patch.object(JointEngine, "backward_input", marking(JointEngine.backward_input, "B")),
    ):
        yield


def moments(events: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Bytes alive before `F1` of the measured step, and the most during its `B1`."""
    begin, end = _span(events, MEASURED, 0.0, float("inf"))
    before = _span(events, "F1", begin, end)[0]
    backward = _span(events, "B1", begin, end)
    alive = [
        (float(event["ts"]), int(event["args"]["Total Allocated"]))
        for event in events
        if event.get("name") == "[memory]"
    ]
    alive.sort(key=lambda one: one[0])
    last = [size for at, size in alive if at <= before][-1]
    return last, max(size for at, size in alive if backward[0] <= at <= backward[1])


def _span(
    events: Sequence[dict[str, Any]], name: str, begin: float, end: float
) -> tuple[float, float]:
    """When an event of this name began and ended, of those within a time."""
    event = next(
        e for e in events if e.get("name") == name and begin <= float(e.get("ts", -1)) <= end
    )
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
