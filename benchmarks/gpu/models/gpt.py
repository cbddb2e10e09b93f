"""A GPT with dropout: `medium` (GPT-2's, 355 million parameters), or `small` with 0.9 million."""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = os.environ.get("GPT", "medium") == "small"
VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = (
    (512, 128, 4, 4, 64) if SMALL else (50304, 1024, 24, 16, 1024)
)
DROPOUT = 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, 2)
        )
        p = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=p)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(places))
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


def model() -> GPT:
    return GPT()


def inputs(batch_size: int) -> dict[str, Tensor]:
    words = torch.randint(VOCABULARY, (batch_size, LENGTH + 1))
    return {"tokens": words[:, :-1], "labels": words[:, 1:]}


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), batch["labels"].flatten())


batch_size = 16 if SMALL else 32
