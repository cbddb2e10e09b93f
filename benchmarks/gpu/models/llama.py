"""A Llama of 853 million parameters: 16 layers of width 2048, rows of 2048 tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, LENGTH = 32000, 2048, 16, 32, 8, 5632, 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv = KV_HEADS * WIDTH // HEADS
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            made.unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.query(y), self.key(y), self.value(y))
        )
        k, v = (z.repeat_interleave(HEADS // KV_HEADS, 1) for z in (rotated(k, cos, sin), v))
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], -1) * sin.to(x.dtype)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        width = WIDTH // HEADS
        angles = torch.outer(
            torch.arange(LENGTH), 10000 ** -(torch.arange(0, width, 2) / width)
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def model() -> Llama:
    return Llama()


def inputs(batch_size: int) -> dict[str, Tensor]:
    words = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))
    return {"tokens": words[:, :-1], "labels": words[:, 1:]}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), batch["labels"].flatten())


batch_size = 32
