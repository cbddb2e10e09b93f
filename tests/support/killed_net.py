"""A model file whose run kills one of its own ranks, or asks it to stop, at a moment it is told.

    KILL="1 5 0.031"        rank 1 is killed 0.031 s after it draws its 5th batch
    ASK="1 5 0"             rank 1 is sent SIGUSR1 when it draws its 5th batch

Under torchrun only the first attempt is. It draws random numbers wherever a run may: dropout, the
batches, and the order of a shuffle. A schedule changes the rate while it runs.
"""

import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

WIDTH = 256  # a checkpoint takes as long as a step, about

Batch = dict[str, Tensor]


def model() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def inputs(batch_size: int) -> Batch:
    return {"input": torch.randn(batch_size, WIDTH), "target": torch.randn(batch_size, 4)}


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return ((outputs - batch["target"]) ** 2).mean()


def batches(batch_size: int) -> Iterator[Batch]:
    """Six batches an epoch."""
    for _ in range(6):
        drawn.append(True)
        _send("KILL", signal.SIGKILL)
        _send("ASK", signal.SIGUSR1)
        batch = inputs(batch_size)
        batch["input"] *= random.random()
        yield batch


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7, 11], 0.5)


drawn: list[bool] = []


def _send(variable: str, number: signal.Signals) -> None:
    rank, at, seconds = (os.environ.get(variable) or "none 0 0").split()
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and rank == os.environ.get("RANK") and len(drawn) == int(at):
        if float(seconds):
            threading.Timer(float(seconds), os.kill, (os.getpid(), number)).start()
        else:
            os.kill(os.getpid(), number)
