"""Models with unusual inputs, outputs, or names and sharing of parameters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from autopipe import SumCount
from benchmarks.zoo.odd.common import (
    WIDTH,
    WORDS,
    Net,
    odd,
    own_loss,
    square,
    tokens,
    vectors,
)
from benchmarks.zoo.subject import Batch, squares


@odd()
class KeywordNames(Net):
    """Parameters under names that are keywords of Python."""

    def begin(self) -> None:
        self.register_parameter("lambda", nn.Parameter(torch.ones(16)))
        self.add_module("class", nn.Linear(16, 16))
        self.register_buffer("is", torch.full((16,), 0.5))

    def inside(self, hidden: Tensor) -> Tensor:
        layer = self.get_submodule("class")
        return layer(hidden * getattr(self, "lambda")) + getattr(self, "is")


@odd()
class StrangeNames(Net):
    """Modules under numbers, blanks and hyphens."""

    def begin(self) -> None:
        self.layers = nn.ModuleDict({"a-b": nn.Linear(16, 16), "0": nn.Linear(16, 16)})
        self.add_module("with blank", nn.Linear(16, 16))

    def inside(self, hidden: Tensor) -> Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden).relu()
        return getattr(self, "with blank")(hidden)


@odd()
class ParameterLists(Net):
    """ParameterList and ParameterDict."""

    def begin(self) -> None:
        self.list = nn.ParameterList(torch.randn(16, 16) * 0.2 for _ in range(3))
        self.dict = nn.ParameterDict({"bias": torch.zeros(16), "scale": torch.ones(16)})

    def inside(self, hidden: Tensor) -> Tensor:
        for weight in self.list:
            hidden = (hidden @ weight).tanh()
        return hidden * self.dict["scale"] + self.dict["bias"]


@odd()
class SharedLayer(Net):
    """One layer three times."""

    def inside(self, hidden: Tensor) -> Tensor:
        return self.first(self.first(hidden).relu()).relu()


@odd()
class SharedWeight(Net):
    """One weight in two layers, and transposed in a third place."""

    def begin(self) -> None:
        self.second.weight = self.first.weight

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden @ self.first.weight


@odd()
class UnusedParameters(Net):
    """Layers that nothing calls."""

    def begin(self) -> None:
        self.never = nn.Linear(16, 16)


@odd()
class NoParametersAtTheEnd(Net):
    """Ends in a long piece without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        for k in range(6):
            found = found.sin() + 0.1 * k * found
        return found


class Answer(NamedTuple):
    """Two tensors under names."""

    logits: Tensor
    hidden: Tensor


@odd(vectors, squares)
class NamedTuples(Net):
    """Gives a named tuple."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return Answer(found, found * 2)


@odd(vectors, lambda outputs, batch: square(outputs["out"][0], batch) + outputs["extra"]["l2"])
class Nested(Net):
    """Gives a dict of lists and dicts, with None and a number in it."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"out": [found, None], "extra": {"l2": found.square().mean(), "k": 3}}


@dataclass
class Given:
    """An output of a user's own."""

    found: Tensor
    penalty: Tensor


@odd(vectors, lambda outputs, batch: square(outputs.found, batch) + outputs.penalty)
class DataclassOutput(Net):
    """Gives a dataclass."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return Given(found, 0.1 * found.abs().mean())


@odd(vectors, own_loss)
class OwnLoss(Net):
    """Its output is its loss."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return ((super().forward(x) - y) ** 2).mean()


def sum_and_count(outputs: Any, batch: Any) -> SumCount:
    """As a loss over tokens that count differs from row to row."""
    return SumCount(((outputs - batch["y"]) ** 2).sum(), (batch["y"] > -9).sum())


@odd(vectors, sum_and_count, "rows")
class SumAndCount(Net):
    """A loss of a sum and a count."""


def by_keywords(rows: int) -> Batch:
    """Two inputs, a mask and a number."""
    batch = vectors(rows)
    return {**batch, "other": batch["y"] * 2, "mask": batch["x"] > 0, "scale": 0.5}


@odd(by_keywords, square)
class KeywordOnly(Net):
    """Takes all by keyword, a bool tensor and a number among it."""

    def forward(  # type: ignore[override]
        self, *, x: Tensor, other: Tensor, mask: Tensor, scale: float = 1.0
    ) -> Tensor:
        return super().forward(torch.where(mask, x, other) * scale)


def nested_batch(rows: int) -> Batch:
    """A batch with a dict and a list in it."""
    batch = vectors(rows)
    return {"x": {"left": batch["x"], "right": [batch["y"] * 0.5]}, "y": batch["y"]}


@odd(nested_batch, square)
class NestedBatch(Net):
    """Takes a dict with a list in it."""

    def forward(self, x: Any) -> Tensor:
        return super().forward(x["left"] + x["right"][0])


@odd(vectors, square)
class ManyKeywords(Net):
    """Takes **kwargs beside x."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x) * options.get("scale", 1.0)


@odd()
class Scripted(Net):
    """A submodule that is scripted."""

    def begin(self) -> None:
        self.first = torch.jit.script(self.first)


@odd()
class TracedByJit(Net):
    """A submodule that torch.jit has traced."""

    def begin(self) -> None:
        self.first = torch.jit.trace(self.first, torch.zeros(2, 16))


class _ToScript(nn.Module):
    """A batch norm whose code counts batches, and a branch on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, 16] -> the same."""
        if hidden.size(0) > 1000:
            hidden = hidden / 2
        return hidden + self.norm(self.layer(hidden)).relu()


class _AroundScript(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scripted, self.out = torch.jit.script(_ToScript()), nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, 16] -> the same."""
        made: Tensor = self.out(self.scripted(hidden))
        return made


@odd()
class ScriptedInEachBlock(Net):
    """A scripted module in each of four blocks."""

    def begin(self) -> None:
        self.blocks = nn.Sequential(*(_AroundScript() for _ in range(4)))

    def inside(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


@odd()
class ScriptedFunction(Net):
    """A function that is scripted."""

    def inside(self, hidden: Tensor) -> Tensor:
        return scripted(hidden)


def gelu_by_hand(x: Tensor) -> Tensor:
    """As GPT-2 had it."""
    return 0.5 * x * (1.0 + torch.tanh(0.79788 * (x + 0.044715 * x * x * x)))


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted = torch.jit.script(gelu_by_hand)


@odd()
class Functional(Net):
    """Calls a layer by functional_call with weights of its own making."""

    def begin(self) -> None:
        self.delta = nn.Parameter(torch.zeros(16, 16))

    def inside(self, hidden: Tensor) -> Tensor:
        weights = {"weight": self.first.weight + self.delta, "bias": self.first.bias}
        return functional_call(self.first, weights, (hidden,))


@odd()
class HyperNetwork(Net):
    """Makes a layer's weight from its input."""

    def begin(self) -> None:
        self.maker = nn.Linear(16, 256)

    def inside(self, hidden: Tensor) -> Tensor:
        weights = self.maker(hidden).view(-1, 16, 16) * 0.1
        return torch.bmm(weights, hidden[:, :, None]).squeeze(-1) + hidden


@odd()
class LowRank(Net):
    """A frozen layer with a trained correction of low rank."""

    def begin(self) -> None:
        self.first.requires_grad_(False)
        self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        nn.init.zeros_(self.b.weight)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.first(hidden) + self.b(self.a(hidden))


@odd(tokens)
class TiedOutput(nn.Module):
    """Words in and out by one weight; a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.mix = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.out = nn.Linear(16, WORDS, bias=False)
        self.out.weight = self.words.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        """[b, LENGTH, WORDS]"""
        return self.out(self.mix(self.words(x)).tanh()) / self.temperature


@odd()
class Compiled(Net):
    """A submodule under torch.compile."""

    def begin(self) -> None:
        self.first = torch.compile(self.first, backend="eager")


@odd()
class Conjugate(Net):
    """Complex numbers."""

    def begin(self) -> None:
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.cfloat))

    def inside(self, hidden: Tensor) -> Tensor:
        turned = torch.view_as_complex(hidden.unflatten(-1, (8, 2))) * self.phase
        return torch.view_as_real(turned.conj().resolve_conj()).flatten(-2)


@odd(vectors, lambda outputs, batch: F.mse_loss(outputs[0], batch["y"]) + outputs[1])
class AuxiliaryLoss(Net):
    """Gives its output and a loss of its own beside it."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x)
        return self.down(self.first(hidden).tanh()), 0.01 * hidden.square().mean()


@odd(vectors, square)
class InputsOfAnyRank(Net):
    """Flattens what it is given and restores it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, WIDTH)).reshape(x.shape)


@odd()
class ListedTwice(Net):
    """Weights in a plain list, which forward reads, and in a ParameterList for the optimizer."""

    def begin(self) -> None:
        self.weights = [nn.Parameter(torch.randn(16, 16) / 8) for _ in range(3)]
        self.listed = nn.ParameterList(self.weights)

    def inside(self, hidden: Tensor) -> Tensor:
        for weight in self.weights:
            hidden = hidden + (hidden @ weight).tanh()
        return hidden


def likelihood(outputs: Any, batch: Any) -> Tensor:
    """As policies are trained: what is made likely, and the entropy."""
    return -outputs.log_prob(batch["y"]).sum(-1).mean() - 0.01 * outputs.entropy().mean()


@odd(vectors, likelihood)
class DistributionOutput(Net):
    """Its output is an object of torch.distributions, as an actor's is."""

    def begin(self) -> None:
        self.spread = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        mean = super().forward(x)
        return torch.distributions.Normal(mean, self.spread.exp().expand_as(mean))


@odd()
class CompiledWhole(Net):
    """A layer that torch.compile is to take whole, and a function that it decorates."""

    def begin(self) -> None:
        self.second = torch.compile(self.second, backend="eager", fullgraph=True)
        self.gate = torch.compile(lambda h: h * h.sigmoid(), backend="eager", fullgraph=True)

    def inside(self, hidden: Tensor) -> Tensor:
        return self.gate(hidden)
