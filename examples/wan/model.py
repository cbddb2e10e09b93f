"""A decoder of 1.5 billion parameters, and text that streams from several sources mixed by tokens.

    tokens [b, CONTEXT] -> embedding -> LAYERS x block -> norm -> head -> logits [b, CONTEXT, 256]

    block:  x + attention(norm(x)),  then  x + mlp(norm(x))

Sizes and sources come from the environment, so that the same file runs on a laptop:

    WIDTH=64 LAYERS=4 CONTEXT=64 autopipe plan model.py --cluster cpu:4 --pp 4
    SOURCES=/data/web:0.7,/data/code:0.3      folders of text with their shares of all tokens
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = int(os.environ.get("WIDTH", 2048))
LAYERS = int(os.environ.get("LAYERS", 30))
HEADS = int(os.environ.get("HEADS", max(1, WIDTH // 128)))
CONTEXT = int(os.environ.get("CONTEXT", 1024))
VOCABULARY = 256  # bytes: no tokenizer to download

STAND_IN = f"{Path(os.__file__).parent}:0.75,{Path(torch.__file__).parent / 'nn'}:0.25"
"""Where nothing else is said: Python's own library, and torch's layers."""

batch_size = int(os.environ.get("ROWS", 64))


class Block(nn.Module):
    """A layer, over x of shape [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        heads = (p.unflatten(2, (HEADS, -1)).transpose(1, 2) for p in self.qkv(normed).chunk(3, 2))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """12 WIDTH^2 parameters a layer: 1.51 billion for 30 of 2048."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sources() -> list[tuple[Path, float]]:
    """Folders, and the share of all tokens that each is to have."""
    parts = os.environ.get("SOURCES", STAND_IN).split(",")
    found = [
        (Path(folder), float(share)) for folder, _, share in (p.rpartition(":") for p in parts)
    ]
    whole = sum(share for _, share in found)
    return [(folder, share / whole) for folder, share in found]


def stream(folder: Path) -> Iterator[bytes]:
    """CONTEXT + 1 bytes at a time, from file to file in the order of their names, again and again.

    One file is open at a time: nothing is kept in memory but what the next row needs.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".txt", ".md"))
    if not files:
        raise FileNotFoundError(f"{folder}: no text in it")
    rest = b""
    while True:
        for path in files:
            rest += path.read_bytes()
            while len(rest) > CONTEXT:
                yield rest[: CONTEXT + 1]
                rest = rest[CONTEXT:]


def mixed() -> Iterator[bytes]:
    """Rows from all sources: always the next of the one that is furthest behind its share.

    After n tokens none is a row ahead or behind; the order is the same on every rank and in every
    run.
    """
    found = [(stream(folder), share) for folder, share in sources()]
    given = [0] * len(found)
    while True:
        total = sum(given) + 1
        behind = [share * total - rows for (_, share), rows in zip(found, given, strict=True)]
        chosen = behind.index(max(behind))
        given[chosen] += 1
        yield next(found[chosen][0])


# What autopipe reads from here.


def model() -> nn.Module:
    return Decoder()


def inputs(batch_size: int) -> dict[str, Tensor]:
    return next(batches(batch_size))


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Nats a byte."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())


def batches(batch_size: int, shard: int = 0, num_shards: int = 1) -> Iterator[dict[str, Tensor]]:
    """Rows of the mixture; each replica skips those of the others."""
    rows, own = mixed(), batch_size // num_shards
    while True:
        batch = [next(rows) for _ in range(batch_size)][shard * own : (shard + 1) * own]
        text = torch.tensor([list(row) for row in batch])
        yield {"tokens": text[:, :-1], "targets": text[:, 1:]}
