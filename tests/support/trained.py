"""A small net as a model file, and one training of it."""

from collections.abc import Callable

from autopipe import Pipe
from autopipe.frontend.model_file import ModelFile
from autopipe.runtime.train import Measured, train

MODEL = """\
import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))


def inputs(batch_size):
    return {"input": torch.randn(batch_size, 6), "target": torch.zeros(batch_size, 1)}


def loss(outputs, batch):
    return ((outputs - batch["target"]) ** 2).mean()
"""


Load = Callable[..., tuple[Pipe, ModelFile]]


def run(pipe: Pipe, file: ModelFile, steps: int | None) -> tuple[Measured, list[str]]:
    said: list[str] = []
    return train(pipe, file, steps, said.append), said


FINITE = """
def batches(batch_size):
    for step in range({steps}):
        yield inputs(batch_size)
"""
