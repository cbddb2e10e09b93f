"""How long the GPU works in one step of a plan, and which kernels take longest.

    python -m benchmarks.gpu.kernels plan.json

Runs the plan on this GPU, its third step under torch's profiler; prints the seconds of the step and
of all its kernels and copies, and the kernels that took longest. Profiling slows the host alone.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from autopipe import cli
from autopipe.runtime.step.pipe import Pipe

PROFILED = 3
"""The step: programs have run before, so that kernels are loaded and memory is there."""

SHOWN = 12

WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of a trace's events that the GPU works at."""


def main() -> None:
    """Run the plan, and print."""
    plan = sys.argv[1]
    step, steps = Pipe.step, 0

    def profiled(pipe: Pipe, batch: Any, **how: Any) -> Tensor:
        nonlocal steps
        steps += 1
        if steps != PROFILED:
            return step(pipe, batch, **how)
        torch.cuda.synchronize()
        began = perf_counter()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            loss = step(pipe, batch, **how)
            torch.cuda.synchronize()
        show(seen, perf_counter() - began)
        return loss

    Pipe.step = profiled  # type: ignore[method-assign]
    sys.argv = ["autopipe", "run", plan, "--steps", str(PROFILED), "--quiet"]
    cli.main()


def show(seen: profile, seconds: float) -> None:
    """The table of one step."""
    with TemporaryDirectory() as folder:
        seen.export_chrome_trace(path := f"{folder}/trace.json")
        events = json.loads(Path(path).read_text())["traceEvents"]
    took, times = Counter[str](), Counter[str]()
    for event in events:
        if event.get("cat") in WORK:
            took[event["name"]] += event["dur"]
            times[event["name"]] += 1
    print(f"a step: {seconds * 1e3:.1f} ms, profiled; kernels: {took.total() / 1e3:.1f} ms")
    for name, micros in took.most_common(SHOWN):
        print(f"{micros / 1e3:9.2f} ms {times[name]:6} times  {name[:90]}")


if __name__ == "__main__":
    main()
