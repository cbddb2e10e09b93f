"""Run plans where the GPUs are, by the command line as a user has it.

    python -m benchmarks.gpu predictions             two models on one GPU: bytes and seconds, and
                                                     what a plan says that knows the GPU by its name
    python -m benchmarks.gpu layouts                 the losses of a GPT with dropout, twelve times
    python -m benchmarks.gpu layouts --cpu           the same on a processor

`layouts` starts the ranks of a plan itself. NCCL takes ranks for those of several hosts if they say
so (NCCL_HOSTID), and then lets them share a GPU: one GPU is enough to run it. What a step takes is
of no meaning there, for ranks wait for their turn on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = Path(__file__).parent / "models"
COMMAND = (sys.executable, "-m", "autopipe")

PREDICTIONS = {
    "llama": ("llama.py", ()),
    "llama compiled": ("llama.py", ("--compile",)),
    "gpt": ("gpt.py", ()),
    "gpt compiled": ("gpt.py", ("--compile",)),
}

LAYOUTS: dict[str, tuple[int, str]] = {
    "one rank": (1, "--micro-batches 4"),
    "pp 2, 1f1b": (2, "--pp 2 --tp 1 --micro-batches 4 --schedule 1f1b"),
    "pp 2, zb-h1": (2, "--pp 2 --tp 1 --micro-batches 4 --schedule zb-h1"),
    "pp 2, zb-v": (2, "--pp 2 --tp 1 --micro-batches 4 --schedule zb-v"),
    "pp 2, interleaved": (
        2,
        "--pp 2 --tp 1 --micro-batches 4 --schedule interleaved --chunks 2",
    ),
    "pp 2, eager-1f1b": (2, "--pp 2 --tp 1 --micro-batches 4 --schedule eager-1f1b"),
    "pp 2, all again": (2, "--pp 2 --tp 1 --micro-batches 4 --recompute all"),
    "pp 2, all offloaded": (2, "--pp 2 --tp 1 --micro-batches 4 --offload all"),
    "dp 2, ZeRO 1": (2, "--pp 1 --dp 2 --micro-batches 2 --zero 1"),
    "dp 2, ZeRO 3": (2, "--pp 1 --dp 2 --micro-batches 2 --zero 3"),
    "tp 2": (2, "--pp 1 --tp 2 --micro-batches 4"),
    "pp 2 x dp 2": (4, "--pp 2 --dp 2 --tp 1 --micro-batches 2"),
}
"""Ranks and constraints: each cuts the batch of 16 rows into four micro-batches of 4."""

STEPS = 5


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("what", choices=("predictions", "layouts"))
    parser.add_argument("--cpu", action="store_true", help="on the processor")
    parser.add_argument("--kind", default="H100-80GB", help="the kind of GPU")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.what == "predictions":
            named = None if given.cpu else f"1x{given.kind}"
            predictions(Path(folder), "cpu:1" if given.cpu else "local:1", named)
        else:
            layouts(Path(folder), "cpu:{}" if given.cpu else "{}x" + given.kind, cpu=given.cpu)


def predictions(folder: Path, cluster: str, named: str | None) -> None:
    """What each model's plan predicts, and what its run measures, as the run prints it.

    Args:
        named: a cluster that is known from datasheets, for another plan beside it.
    """
    for name, (model, options) in PREDICTIONS.items():
        plan = folder / "plan.json"
        print(f"\n{name}")
        for where in (named, cluster) if named else (cluster,):
            engine = options or ("--no-compile",)
            asked = ("--cluster", where, "--micro-batches", "4", *engine, "-o", str(plan))
            command(*COMMAND, "plan", str(MODELS / model), *asked)
            told = command(*COMMAND, "explain", str(plan)).splitlines()
            print(f"{where}: {next(line for line in told if line.startswith('predicted'))}")
        print(command(*COMMAND, "run", str(plan), "--steps", "12"), flush=True)


def layouts(folder: Path, cluster: str, *, cpu: bool) -> None:
    """The losses of each layout beside those of one rank."""
    os.environ["GPT"] = "small"
    expected: list[float] = []
    print("| layout | losses of 5 steps | furthest from one rank's |\n|---|---|---|")
    for name, (ranks, constraints) in LAYOUTS.items():
        plan, metrics = folder / "plan.json", folder / "metrics.jsonl"
        how = ("--precision", "fp32", "--no-compile", "-o", str(plan))
        where = ("--cluster", cluster.format(ranks), *constraints.split(), *how)
        command(*COMMAND, "plan", str(MODELS / "gpt.py"), *where)
        run(plan, ranks, metrics, cpu=cpu)
        losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
        metrics.unlink()
        expected = expected or losses
        off = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        shown = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"| {name} | {shown} | {off:.1e} |", flush=True)


def run(plan: Path, ranks: int, metrics: Path, *, cpu: bool) -> None:
    """Train as planned, a process a rank; on a GPU over NCCL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        **({} if cpu else {"AUTOPIPE_TRANSPORT": "nccl", "NCCL_SOCKET_IFNAME": "lo"}),
    }
    started = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "NCCL_HOSTID": f"host{rank}"}
        environ = {name: str(value) for name, value in {**of_all, **own}.items()}
        arguments = ("run", str(plan), "--steps", str(STEPS), "--metrics", str(metrics))
        alone = {} if ranks == 1 else environ
        started.append(
            subprocess.Popen([*COMMAND, *arguments], env=os.environ | alone, stdout=subprocess.PIPE)
        )
    for process in started:
        process.communicate()
        assert process.returncode == 0, f"a rank of {plan} ended with {process.returncode}"


def command(*words: str) -> str:
    """What a command prints on stdout."""
    return subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
