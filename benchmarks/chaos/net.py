"""The model of the chaos runs: plain PyTorch, and a rank that may come to harm (`harm.install`).

tokens [b, 12] -> embedding -> 4 blocks -> norm -> head -> logits [b, 12, 64]

block:  x + down(gelu(up(norm(x))))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.chaos import harm

VOCABULARY = 64
LENGTH = 12
WIDTH = 32
BLOCKS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def inputs(batch_size: int) -> dict[str, Tensor]:
    text = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def loss(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


harm.install()
