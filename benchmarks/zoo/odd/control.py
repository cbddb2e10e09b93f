"""Models whose Python reads values, or whose shapes depend on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.odd.common import CLASSES, Net, odd, pictures, sequences, square, vectors


@odd()
class Branch(Net):
    """A branch on a sum that always goes one way."""

    def inside(self, hidden: Tensor) -> Tensor:
        if hidden.sum() > -1e9:
            return hidden * 2
        return hidden


@odd()
class FiniteCheck(Net):
    """Clamps where something is infinite, as DETR does."""

    def inside(self, hidden: Tensor) -> Tensor:
        if not torch.isfinite(hidden).all():
            hidden = hidden.clamp(-1e4, 1e4)
        return hidden


@odd()
class Assertion(Net):
    """Asserts about values."""

    def inside(self, hidden: Tensor) -> Tensor:
        assert not hidden.isnan().any()
        return hidden


@odd()
class LoopUntil(Net):
    """A loop as long as a number from a buffer says."""

    def begin(self) -> None:
        self.register_buffer("times", torch.tensor(3))

    def inside(self, hidden: Tensor) -> Tensor:
        for _ in range(int(self.times)):
            hidden = self.first(hidden).tanh()
        return hidden


@odd()
class Condition(Net):
    """torch.cond."""

    def inside(self, hidden: Tensor) -> Tensor:
        return torch.cond(hidden.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (hidden,))


class _Either(nn.Module):
    """Two layers, of which one side of a condition runs both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., 16] -> the same."""

        def first(h: Tensor) -> Tensor:
            return self.right(self.left(h).relu())

        made: Tensor = torch.cond(hidden.mean() > 0.3, first, self.right, (hidden,))
        return hidden + made


@odd()
class ConditionInEachBlock(Net):
    """torch.cond with parameters, in each of four blocks."""

    def begin(self) -> None:
        self.blocks = nn.Sequential(*(_Either() for _ in range(4)))

    def inside(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


@odd()
class Vmapped(Net):
    """torch.vmap over the rows."""

    def inside(self, hidden: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.first.weight @ row + row.norm())(hidden)


@odd()
class Ensemble(Net):
    """Models stacked by torch.func and run by vmap."""

    def begin(self) -> None:
        self.weights = nn.Parameter(torch.randn(3, 16, 16) * 0.2)

    def inside(self, hidden: Tensor) -> Tensor:
        found = torch.vmap(lambda w, h: (h @ w).tanh(), in_dims=(0, None))(self.weights, hidden)
        return found.mean(0)


class Experts(Net):
    """Four experts and a router."""

    def begin(self) -> None:
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))


@odd()
class ExpertsByMask(Experts):
    """A mixture that selects rows by a mask and adds them with index_add."""

    def inside(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.router(hidden).softmax(-1).topk(2)
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            found.index_add_(0, rows, expert(hidden[rows]) * weights[rows, place, None])
        return found


@odd()
class ExpertsIfAny(Experts):
    """A mixture that skips experts nobody has chosen."""

    def inside(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden).softmax(-1)
        chosen = weights.argmax(-1)
        found = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                found[mask] = expert(hidden[mask]) * weights[mask, number, None]
        return found


@odd()
class ExpertsDense(Experts):
    """A mixture that computes all and weighs."""

    def inside(self, hidden: Tensor) -> Tensor:
        weights = self.router(hidden).softmax(-1)
        every = torch.stack([expert(hidden) for expert in self.experts], -1)
        return (every * weights[..., None, :]).sum(-1)


@odd(sequences)
class ExpertsSorted(Experts):
    """A mixture that sorts words by expert and splits by counts, as grouped matmuls want it."""

    def inside(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=4).tolist()
        parts = [e(p) for e, p in zip(self.experts, flat[order].split(counts), strict=True)]
        found = torch.empty_like(flat).index_copy(0, order, torch.cat(parts))
        return (found * weights[:, None]).view_as(hidden)


@odd(sequences)
class ExpertsWithCapacity(Experts):
    """A mixture with a capacity, by one-hot products, whose router is put to a dtype, as switch."""

    def inside(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        weights = self.router.to(flat.dtype)(flat).softmax(-1)
        chosen = nn.functional.one_hot(weights.argmax(-1), 4)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = (place < 4) & (chosen > 0)
        found = sum(
            e(flat) * (kept[:, k] * weights[:, k])[:, None] for k, e in enumerate(self.experts)
        )
        return found.view_as(hidden)


@odd()
class Selected(Net):
    """Rows that a mask selects, all of them in truth."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden[hidden[:, 0] > -1e9]


@odd()
class ByRows(Net):
    """Another way for one row than for more."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden.squeeze() if hidden.shape[0] == 1 else hidden * 0.5


@odd(sequences)
class ReadsLengths(Net):
    """Reads the longest row from a mask and cuts there."""

    def inside(self, hidden: Tensor) -> Tensor:
        mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        longest = int(mask.sum(1).max())
        return hidden[:, :longest]


@odd()
class Autocast(Net):
    """A part in bf16."""

    def inside(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, torch.bfloat16):
            found = self.first(hidden)
        return found.float()


@odd()
class Doubles(Net):
    """A part in fp64."""

    def inside(self, hidden: Tensor) -> Tensor:
        return (hidden.double() @ self.first.weight.double()).to(hidden.dtype)


@odd()
class Cumulative(Net):
    """A scan over the columns, in place."""

    def inside(self, hidden: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        state = hidden[:, 0]
        for k in range(hidden.shape[1]):
            state = 0.9 * state + hidden[:, k]
            found[:, k] = state
        return found


@odd()
class FixedPoint(Net):
    """Iterates at most ten times, until it changes little."""

    def inside(self, hidden: Tensor) -> Tensor:
        state = torch.zeros_like(hidden)
        for _ in range(10):
            new = torch.tanh(0.1 * self.first(state) + hidden)
            if (new - state).abs().max() < 1e-12:
                break
            state = new
        return state


@odd()
class SortedRows(Net):
    """Sorts, gathers, scatters."""

    def inside(self, hidden: Tensor) -> Tensor:
        values, order = hidden.sort(-1)
        return torch.zeros_like(hidden).scatter_add(-1, order, values * 0.5) + hidden


class _Routed(nn.Module):
    """Experts by a mask, and a loss of their balance in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.balance: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [b, 16] -> the same."""
        shares = self.router(hidden).softmax(-1)
        weight, chosen = shares.max(-1)
        self.balance = shares.square().sum(-1).mean()
        made = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            made = made.index_add(0, rows, weight[rows, None] * expert(hidden[rows]))
        return made


def with_balance(outputs: Any, batch: Any) -> Tensor:
    """What the model gives beside its output is the mean of its mixtures' losses."""
    found, balance = outputs
    return square(found, batch) + 0.01 * balance


@odd(vectors, with_balance)
class LeavesLoss(Net):
    """Mixtures that leave a loss in an attribute, where the model reads it."""

    def begin(self) -> None:
        self.mixtures = nn.ModuleList(_Routed() for _ in range(2))

    def inside(self, hidden: Tensor) -> Tensor:
        for mixture in self.mixtures:
            hidden = hidden + mixture(hidden)
        return hidden

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return found, sum(mixture.balance for mixture in self.mixtures)


@odd()
class NamesOfGraphs(Net):
    """Names that a graph of code has itself: `graph`, `code` and `meta`."""

    def begin(self) -> None:
        self.graph = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.code = nn.Parameter(torch.ones(16))
        self.register_buffer("meta", torch.full((16,), 0.5))

    def inside(self, hidden: Tensor) -> Tensor:
        return self.graph(hidden * self.code) + self.meta


@odd()
class AdapterByHook(Net):
    """An adapter that a hook of a frozen layer adds, as those are that change no code."""

    def begin(self) -> None:
        self.first.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False))
        self.first.register_forward_hook(lambda layer, args, made: made + self.adapter(args[0]))


@odd()
class CountsHits(Net):
    """As modules of Lightning: forward is a call of another method, which keeps a number."""

    def begin(self) -> None:
        self.hits = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.training_step(x)

    def training_step(self, x: Tensor) -> Tensor:
        """x [..., WIDTH] -> [..., WIDTH]."""
        hidden = self.first(self.up(x).relu())
        self.hits += int((hidden.argmax(-1) == 3).sum().item())
        return self.down(self.second(hidden).tanh())


@odd()
class LoopByValue(Net):
    """The model's own forward calls a layer as often as its values say."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        for _ in range(int(hidden.sum().item()) % 3 + 1):
            hidden = self.first(hidden).tanh()
        return self.down(self.second(hidden).tanh())


class _Dropped(nn.Module):
    """A block that a random number leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., 16] -> the same."""
        if self.training and torch.rand(1).item() < 0.5:
            return hidden
        return hidden + self.layer(hidden).tanh()


@odd()
class StochasticDepth(Net):
    """Stochastic depth, as it is written where nobody thinks of graphs."""

    def begin(self) -> None:
        self.blocks = nn.Sequential(*(_Dropped() for _ in range(4)))

    def inside(self, hidden: Tensor) -> Tensor:
        return self.blocks(hidden)


@odd()
class LayersLeftOut(Net):
    """LayerDrop: the loop over the layers goes on to the next one."""

    def begin(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def inside(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if self.training and drawn < 0.4:
                continue
            hidden = hidden + layer(hidden).tanh()
        return hidden


@odd(sequences)
class ScheduledSampling(Net):
    """A decoder that is fed what it should have said, or what it has said, by a drawn number."""

    def begin(self) -> None:
        self.cell = nn.GRUCell(16, 16)

    def inside(self, hidden: Tensor) -> Tensor:
        state, found = torch.zeros_like(hidden[:, 0]), [hidden[:, 0]]
        for k in range(hidden.shape[1]):
            told = hidden[:, k] if torch.rand(1).item() < 0.5 else found[-1]
            state = self.cell(told, state)
            found.append(state)
        return torch.stack(found[1:], 1)


@odd(pictures)
class CropsAtRandom(nn.Module):
    """A window at a place that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """[b, CLASSES]"""
        row, column = (int(torch.randint(0, 5, ())) for _ in range(2))
        x = x[:, :, row : row + 12, column : column + 12]
        return self.out(self.conv(x).relu().mean((2, 3)))
