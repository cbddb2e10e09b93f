"""All ranks of a plan as processes of this machine, over gloo: nothing is simulated."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import autopipe
from autopipe.errors import ModelError
from autopipe.planfile.contents import Plan
from autopipe.runtime.launch.spawn import free_port
from autopipe.sharding.collectives import together
from autopipe.sharding.plan_io import read_back
from benchmarks.zoo.one_process import Result
from benchmarks.zoo.subject import Model


def in_processes(plan: Plan, given: Model, whole: dict[str, Tensor]) -> Result:
    """A step by `autopipe.parallelize` on every rank, each a fork of this process.

    Args:
        whole: parameters of the model, for their shapes.

    Returns:
        the mean loss, what all ranks hold of gradients put together, and buffers.

    Raises:
        ModelError: a rank refuses the model.
        RuntimeError: a rank has ended without a result; says what it raised.
    """
    fork = multiprocessing.get_context("fork")
    ranks, port = len(plan.mesh.places), free_port()
    with TemporaryDirectory() as name:
        folder = Path(name)
        running = [
            fork.Process(target=_rank, args=(plan, given, rank, port, folder))
            for rank in range(ranks)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()
        failed = [file.read_text() for file in sorted(folder.glob("*.txt"))]
        if refused := [text for text in failed if "ModelError" in text]:
            raise ModelError(refused[0])  # its peers lose a connection
        if failed or any(process.exitcode for process in running):
            codes = [process.exitcode for process in running]
            raise RuntimeError("; ".join(failed) or f"ranks ended with codes {codes}")
        found = [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]
    gradients: dict[str, Tensor] = {}
    for one in found:
        gradients |= one["gradients"]
    for name, lies in read_back(plan).states.items():
        if lies.sharded and name in gradients:
            parts = [one["gradients"][name] for one in found]
            gradients[name] = together(parts, lies, whole[name].shape[lies.dim])
    buffers: dict[str, Tensor] = {}
    for one in found:
        buffers |= one["buffers"]
    return Result([found[0]["loss"]], gradients, buffers)


def _rank(plan: Plan, given: Model, rank: int, port: int, folder: Path) -> None:
    """The whole of a rank's process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(plan.mesh.places)),
        "LOCAL_WORLD_SIZE": str(len(plan.mesh.places)),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    atexit._clear()  # what the parent does at its own end
    try:
        torch.save(_stepped(plan, given), folder / f"{rank}.pt")
    except BaseException as error:  # whatever it is, the parent says it
        (folder / f"{rank}.txt").write_text(f"rank {rank}: {type(error).__name__}: {error}")
    atexit._run_exitfuncs()  # which a fork does not do by itself: leaves the process group


def _stepped(plan: Plan, given: Model) -> dict[str, Any]:
    model = given.build()
    pipe = autopipe.parallelize(model, plan, inputs=given.inputs, loss=given.loss)
    loss = pipe.step(given.inputs(plan.batch.rows))
    named = dict(pipe.named_parameters())
    return {
        "loss": loss.detach(),
        "gradients": {name: p.grad for name, p in named.items() if p.grad is not None},
        "buffers": dict(pipe.named_buffers()),
    }
