"""A model file of four residual layers, as text, which tests change a line of."""

from __future__ import annotations

LAYERS = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x):
        return self.h(x).square().mean()


def model():
    return Net()


def inputs(batch_size):
    return (torch.randn(batch_size, 8),)
"""
