"""A model that is tried: how it is built, its batches and its loss.

Subject     a name to choose it by, known before anything is built
Model       what `Subject.make` gives: a builder, batches, a loss
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Batch = dict[str, Any]
Loss = Callable[[Any, Any], Any]
Draw = Callable[[torch.Generator], Tensor]

MOST_ROWS = 16
"""Rows that a batch can be made of: those of two micro-batches, and what planning looks at."""


@dataclass(frozen=True)
class Model:
    """A model as its user has it.

    Attributes:
        build: the same weights at every call, in training mode.
        inputs: a batch of so many rows; the first rows do not depend on how many follow.
        loss: of outputs and batch; None: the output itself, or its `.loss`.
        loss_over: as `autopipe plan --loss-over` has it; a sum and a count are over the batch.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    loss: Loss | None = None
    loss_over: str = "micro-batch"

    def eager(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of one micro-batch as plain PyTorch computes it; of (sum, count) the sum."""
        outputs = model(**taken(model, batch))
        if self.loss is not None:
            outputs = self.loss(outputs, batch)
        elif not isinstance(outputs, Tensor):
            outputs = outputs.loss
        found = outputs[0] if isinstance(outputs, tuple) else outputs
        assert isinstance(found, Tensor)
        return found


@dataclass(frozen=True)
class Subject:
    """What is tried: `group/family/task`, and what makes it."""

    name: str
    make: Callable[[], Model]

    @property
    def group(self) -> str:
        """Where it comes from: transformers, timm, torchvision or odd."""
        return self.name.partition("/")[0]

    @property
    def family(self) -> str:
        """`transformers/bert`, and of a model of pictures the file that it stands in."""
        return self.name.rpartition("/")[0].partition(".")[0]

    @property
    def task(self) -> str:
        """What it is for."""
        return self.name.rpartition("/")[2]


def taken(model: nn.Module, batch: Batch) -> Batch:
    """The entries of a batch that a model's forward names."""
    names = inspect.signature(model.forward).parameters
    return {key: value for key, value in batch.items() if key in names}


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A builder that gives the same weights at every call, in training, without dropout.

    Whatever draws random numbers but dropout stays: `trial` says how that is compared.
    """

    def built() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build().train()
        for module in model.modules():
            for name in ("p", "drop_prob", "drop_rate", "dropout"):
                value = getattr(module, name, None)
                if "drop" in f"{type(module).__name__}{name}".lower() and type(value) is float:
                    setattr(module, name, 0.0)
        return model

    return built


def squares(outputs: Any, batch: Any = None) -> Tensor:
    """A loss for any output: of each tensor of floats in it the mean square distance from a wave.

    From 0 it would be nearly constant behind a layer norm, and its gradients roundings.
    """
    tree = dict(outputs) if isinstance(outputs, Mapping) else outputs
    floats = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    wanted = [leaf for leaf in floats if leaf.is_floating_point() and leaf.requires_grad]
    total = sum((leaf.float() - _wave(leaf)).square().mean() for leaf in wanted)
    assert isinstance(total, Tensor), "the model's output has no tensor that can be trained"
    return total


def _wave(leaf: Tensor) -> Tensor:
    width = leaf.shape[-1] if leaf.dim() else 1
    return torch.arange(width, dtype=torch.float32, device=leaf.device).sin()


def entropy(outputs: Any, batch: Any) -> Tensor:
    """Of logits [b, classes] and `labels` [b]."""
    return nn.functional.cross_entropy(outputs, batch["labels"])


def rows_of(draw: Draw, seed: int) -> Tensor:
    """[MOST_ROWS, ...], row i drawn from its own generator."""
    seeds = range(1000 * seed, 1000 * seed + MOST_ROWS)
    return torch.stack([draw(torch.Generator().manual_seed(number)) for number in seeds])


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return rows_of(lambda generator: torch.randn(shape, generator=generator), seed)


def integers(*shape: int, low: int = 5, below: int, seed: int) -> Tensor:
    """Whole numbers in [low, below)."""
    return rows_of(lambda g: torch.randint(low, below, shape, generator=g), seed)
