"""A small language model, a plan of it and of a rival, and their sheets, which sliders move."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.planners.driver.make_plan import plan
from autopipe.planners.formulas.sheets import Sheets, sheets
from tests.support.remembered import traces_remembered

TOKENS, VOCABULARY, WIDTH = 16, 32, 32


class Layer(nn.Module):
    """Causal attention and a perceptron on x [b, s, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Language(nn.Module):
    """tokens [b, s] -> logits [b, VOCABULARY, s]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))).transpose(1, 2)


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(outputs, batch[1])


@dataclass(frozen=True)
class Text:
    """Batches of rows of so many tokens."""

    tokens: int

    def __call__(self, rows: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(VOCABULARY, (2, rows, self.tokens), generator=torch.Generator())
        return drawn[0], drawn[1]


CLUSTER = "2x1xA100-80GB"
LIMIT = "1290KiB"
FIXED: dict[str, Any] = {
    "loss": entropy,
    "schedule": "1f1b",
    "precision": "fp32",
    "compile": False,
    "pp": 2,
}
"""What is asked of every plan here: two stages, one on each of two nodes."""


def planned(tokens: int = TOKENS, **options: Any) -> Plan:
    """A plan of the model for rows of so many tokens."""
    with traces_remembered():
        return plan(Language, Text(tokens), **({"cluster": CLUSTER, **FIXED} | options))


@dataclass(frozen=True)
class Sheeted:
    """A plan of 16 rows in 4 micro-batches, which takes 650 KiB of `LIMIT`, and its sheet beside
    that of a rival that takes 641 KiB and half the time."""

    plan: Plan
    sheets: Sheets


@cache
def sheeted() -> Sheeted:
    """Made once a process."""
    made = planned(batch_size=16, micro_batches=4, memory=LIMIT)
    file = ModelFile("model.py", Language, Text(TOKENS), entropy, None, None, None, None)
    return Sheeted(made, sheets(made, file, lambda line: None, most=1))
