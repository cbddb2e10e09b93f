"""A byte-level GPT of 10.9 million parameters and the text it learns: Python's standard library.

The model is plain PyTorch and knows nothing of autopipe. The functions below it are what
`autopipe plan examples/gpt.py` looks for; only `model` and `inputs` are required.

    tokens [b, 128] -> embedding + position -> 6 blocks -> norm -> head -> logits [b, 128, 256]

    block:  x + attention(norm(x)),  then  x + mlp(norm(x))
"""

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
CONTEXT = 128
WIDTH = 384
HEADS = 6
LAYERS = 6


class Attention(nn.Module):
    """Causal self-attention over x of shape [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# What autopipe reads from here. A batch is {"tokens": [b, 128], "targets": [b, 128]}, both int64:
# `forward` takes the entries it names, `loss` sees all of them.

batch_size = 8
"""Rows of a whole step: 8 x 128 = 1,024 tokens."""


def model() -> nn.Module:
    return GPT()


def inputs(batch_size: int) -> dict[str, Tensor]:
    """An example batch, to trace and to measure with."""
    return next(iter(batches(batch_size)))


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Nats per byte: log(256) = 5.5 for a model that knows nothing."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())


def batches(batch_size: int, shard: int = 0, num_shards: int = 1) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text without end: part `shard` of each batch of `batch_size` rows.

    All shards draw the same stream and keep their own rows of it, so a step sees the same
    `batch_size` windows however many ways it is split.
    """
    corpus, generator = text(), torch.Generator().manual_seed(0)
    rows = batch_size // num_shards
    while True:
        starts = torch.randint(len(corpus) - CONTEXT, (batch_size,), generator=generator)
        own = starts[shard * rows : (shard + 1) * rows]
        window = own[:, None] + torch.arange(CONTEXT)
        yield {"tokens": corpus[window].long(), "targets": corpus[window + 1].long()}


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@functools.cache
def text() -> Tensor:
    """The sources of the running Python's standard library, a few million bytes as one tensor."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8
    )
