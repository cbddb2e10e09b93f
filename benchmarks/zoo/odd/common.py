"""What odd models share: batches, losses, and the table that `@odd` puts them in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.subject import (
    Batch,
    Loss,
    Model,
    Subject,
    entropy,
    integers,
    noise,
    seeded,
)

WIDTH, LENGTH, WORDS, CLASSES = 8, 6, 24, 5

Inputs = Callable[[int], Batch]
Kind = TypeVar("Kind", bound=type[nn.Module])


def vectors(rows: int) -> Batch:
    """x [b, WIDTH], y [b, WIDTH]."""
    return {"x": noise(WIDTH)[:rows].clone(), "y": noise(WIDTH, seed=1)[:rows].clone()}


def sequences(rows: int) -> Batch:
    """x [b, LENGTH, WIDTH], y the same."""
    x, y = noise(LENGTH, WIDTH), noise(LENGTH, WIDTH, seed=1)
    return {"x": x[:rows].clone(), "y": y[:rows].clone()}


def tokens(rows: int) -> Batch:
    """x [b, LENGTH] and labels [b, LENGTH] in [0, WORDS)."""
    x, labels = (integers(LENGTH, low=0, below=WORDS, seed=seed) for seed in (1, 2))
    return {"x": x[:rows].clone(), "labels": labels[:rows].clone()}


def pictures(rows: int) -> Batch:
    """x [b, 3, 16, 16] and labels [b] in [0, CLASSES)."""
    labels = integers(low=0, below=CLASSES, seed=1)
    return {"x": noise(3, 16, 16)[:rows].clone(), "labels": labels[:rows].clone()}


def square(outputs: Any, batch: Any) -> Tensor:
    """Mean square of the distance from y."""
    return ((outputs - batch["y"]) ** 2).mean()


def words(outputs: Any, batch: Any) -> Tensor:
    """Cross-entropy of logits [b, LENGTH, WORDS]."""
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


LOSSES: dict[Inputs, Loss] = {
    vectors: square,
    sequences: square,
    tokens: words,
    pictures: entropy,
}

ODD: dict[str, Subject] = {}


def odd(
    inputs: Inputs = vectors, loss: Loss | None = None, loss_over: str = "micro-batch"
) -> Callable[[Kind], Kind]:
    """Put a class in the table, with its batches and its loss (default: that of the batches)."""

    def mark(kind: Kind) -> Kind:
        file = kind.__module__.rpartition(".")[2]
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", kind.__name__).lower()
        made = partial(_made, kind, inputs, loss or LOSSES[inputs], loss_over)
        ODD[f"odd/{name}/{file}"] = Subject(f"odd/{name}/{file}", made)
        return kind

    return mark


def own_loss(outputs: Any, batch: Any) -> Any:
    """The output is the loss."""
    return outputs


def _made(kind: type[nn.Module], inputs: Inputs, loss: Loss, loss_over: str) -> Model:
    return Model(seeded(kind), inputs, None if loss is own_loss else loss, loss_over)


class Net(nn.Module):
    """Four layers and a piece of a class's own in the middle: `inside(hidden)`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.down = nn.Linear(16, WIDTH)
        self.begin()

    def begin(self) -> None:
        """What a class adds when it is built."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., WIDTH] -> [..., WIDTH]."""
        hidden = self.first(self.up(x).relu()).relu()
        return self.down(self.second(self.inside(hidden)).tanh())

    def inside(self, hidden: Tensor) -> Tensor:
        """hidden [..., 16] -> [..., 16]."""
        return hidden


def subjects() -> Iterator[Subject]:
    """All of them; every file of this package has been imported by then."""
    from benchmarks.zoo.odd import (  # noqa: F401  # each fills ODD as it is imported
        autograd,
        control,
        forms,
        layers,
        shapes,
        state,
        views,
    )

    yield from ODD.values()
