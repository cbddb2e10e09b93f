"""Peak memory of a run while it saves, loads and converts, above what the run itself takes.

    python -m benchmarks.checkpoint --gigabytes 2 --folder /tmp/checkpoints

A stack of square linear layers is trained by one process, SGD with momentum. `VmHWM` of
/proc/self/status, which is reset before each part, is the most that was ever resident.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import autopipe
from autopipe.util import allocator

WIDTH = 8192
"""Of a layer: 256 MiB of fp32."""


def resident() -> int:
    """The most bytes resident since `forget`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def forget() -> None:
    """Begin to count anew; proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")


def measured(part: str, action: Callable[[], object], **more: float) -> None:
    """Run a part, and print what it took."""
    forget()
    before, began = resident(), perf_counter()
    action()
    told = {"seconds": round(perf_counter() - began, 2), "peak_mb": resident() // 10**6}
    print(json.dumps({"part": part, **told, "at_first_mb": before // 10**6, **more}), flush=True)


def child(part: str, argv: Iterable[str]) -> None:
    """A command's peak, as the kernel reports it when the process has ended."""
    code = (
        "import resource, subprocess, sys, time\n"
        "began = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(time.perf_counter() - began, peak)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "autopipe", *argv]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    told = {"seconds": round(float(found[0]), 2), "peak_mb": int(found[1]) * 1024 // 10**6}
    print(json.dumps({"part": part, **told}), flush=True)


def main(
    gigabytes: Annotated[float, typer.Option(help="Of the model's fp32 weights.")] = 2.0,
    folder: Annotated[Path, typer.Option(help="Where checkpoints go.")] = Path("checkpoints"),
) -> None:
    """Save beside a step, load, and convert; one JSON object a part."""
    allocator.keep()
    layers = max(1, round(gigabytes * 2**30 / (4 * WIDTH * WIDTH)))

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"input": torch.randn(rows, WIDTH), "target": torch.zeros(rows, WIDTH)}

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - batch["target"]).square().mean()

    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    plan = autopipe.plan(
        model, inputs, loss=loss, optimizer=sgd, cluster="local:1", batch_size=16, micro_batches=1
    )
    pipe = autopipe.parallelize(model, plan, loss=loss)
    optimizer = sgd(pipe.parameters())
    batch = inputs(16)
    saving = pipe.checkpoints(folder)

    def step() -> None:
        pipe.step(batch)
        saving.settle()
        optimizer.step()
        saving.agree()

    def save() -> None:
        saving.begin(pipe.content(optimizer), pipe.steps, pipe.values())

    def saved_step() -> None:
        save()
        step()

    step()
    for _ in range(2):
        measured("a step", step)
    measured("a step, and a checkpoint written beside it", saved_step)
    measured("a step", step)
    measured("a checkpoint alone", lambda: (save(), saving.close()))
    measured("a checkpoint loaded", lambda: pipe.load(folder, optimizer))
    newest = str(max(folder.glob("step-*")))
    child("checkpoint info", ["checkpoint", "info", newest])
    with tempfile.TemporaryDirectory(dir=folder) as made:
        one = f"{made}/model.safetensors"
        child("to one file", ["checkpoint", "convert", newest, "-o", one])
        (Path(made) / "config.json").write_text("{}")
        words = ["-o", f"{made}/hf", "--config", made]
        child("to a folder", ["checkpoint", "convert", newest, *words])
        child("to a folder of DCP", ["checkpoint", "convert", newest, "-o", f"{made}/d", "--dcp"])
        child("verify, checksums", ["checkpoint", "verify", newest])
        child("verify, two", ["checkpoint", "verify", newest, newest])
    shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(main)
