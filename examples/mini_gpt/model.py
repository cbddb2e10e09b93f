"""The mini-GPT: 8 layers, 1024 hidden, 16 heads, 4096 in the MLP, a vocabulary of 50257.

Written as textbooks write it, with a projection each for queries, keys and values. It has 153 M
parameters, as the head is the embedding's own matrix; `TIED = False` makes that 205 M.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 50257
CONTEXT = 128
HIDDEN = 1024
HEADS = 16
MLP = 4096
LAYERS = 8
TIED = True


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over x of shape [b, s, HIDDEN]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, MLP)
        self.down = nn.Linear(MLP, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm1(x)
        heads = (
            layer(h).view(b, s, HEADS, HIDDEN // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, HIDDEN))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MiniGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if TIED:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# What autopipe reads from here.

batch_size = 8
"""Rows of a whole step: 8 x 128 = 1,024 tokens."""


def model() -> nn.Module:
    return MiniGPT()


def inputs(batch_size: int) -> dict[str, Tensor]:
    return next(iter(batches(batch_size)))


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Nats per token; log(50257) = 10.8 for a model that knows nothing."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())


def batches(batch_size: int, shard: int = 0, num_shards: int = 1) -> Iterator[dict[str, Tensor]]:
    """A sequence that can be learnt: each token is the last one times 3, plus 1."""
    generator, rows = torch.Generator().manual_seed(0), batch_size // num_shards
    while True:
        drawn = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
        tokens = [drawn[shard * rows : (shard + 1) * rows]]
        for _ in range(CONTEXT):
            tokens.append((tokens[-1] * 3 + 1) % VOCABULARY)
        window = torch.cat(tokens, 1)
        yield {"tokens": window[:, :-1], "targets": window[:, 1:]}
