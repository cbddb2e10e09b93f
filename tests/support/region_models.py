"""Models with a part that no trace can look into; each runs as a region of its graph.

The parts that cannot be captured are of four kinds: transforms of torch.func, hooks on gradients,
sizes that depend on values, and buffers that are written where one of those runs.
"""

import torch
from torch import nn

from tests.support.odd_models import Net


class Mapped(Net):
    def inside(self, hidden):
        return torch.vmap(lambda row: self.middle.weight @ row + row.norm())(hidden)


class Differentiated(Net):
    def inside(self, hidden):
        return hidden + torch.func.grad(lambda h: self.middle(h).tanh().sum())(hidden)


class UnderAnotherName(Net):
    """Calls itself otherwise than `self`, as some do."""

    def inside(m, hidden):  # noqa: N805 (as they write it)
        return hidden + m.mapped(hidden)

    def mapped(m, hidden):  # noqa: N805 (as they write it)
        return torch.vmap(lambda row: m.middle.weight @ row + row.norm())(hidden)


class InnerGradient(Net):
    def inside(self, hidden):
        made = self.middle(hidden)
        (slope,) = torch.autograd.grad(made.square().sum(), hidden, create_graph=True)
        return made + slope


class TensorHook(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -0.5 * gradient)
        return hidden


class ModuleHook(Net):
    def begin(self):
        self.middle.register_full_backward_hook(lambda m, i, o: (3 * i[0],))


class Doubling(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class CallOfItsOwn(Net):
    """A hook on gradients of a module whose class has a `__call__` of its own."""

    def begin(self):
        self.middle = Doubling(8, 8)
        self.middle.register_full_backward_hook(lambda m, i, o: (3 * i[0],))


class OldHook(Net):
    def begin(self):
        self.middle.register_backward_hook(lambda m, i, o: i)


class SomeRows(Net):
    """Of eight rows some; which of them depends on values."""

    def inside(self, hidden):
        chosen = hidden[:, 0] > 0.1
        made = torch.zeros_like(hidden)
        made[chosen] = self.middle(hidden[chosen])
        return made + hidden


class MarkedRows(Net):
    """As T5Gemma2 has it; the gradient of `mark` is a sum over the rows that are marked.

    Of torch's own op for it that sum has as many rows as are marked.
    """

    def begin(self):
        self.mark = nn.Parameter(torch.ones(8))

    def inside(self, hidden):
        made = self.middle(hidden)
        made[made[:, 0] > 0] = self.mark
        return made


class Experts(Net):
    """Some experts get no row of the first micro-batch, and some in a later one."""

    def begin(self):
        self.router = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def inside(self, hidden):
        weights = self.router(hidden).softmax(-1)
        made = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mask = weights.argmax(-1) == number
            if mask.any():
                made[mask] = expert(hidden[mask]) * weights[mask, number, None]
        return made


class Selecting(nn.Module):
    """A module whose result has a size that depends on values."""

    def forward(self, hidden):
        return hidden[hidden[:, 0] > 0.1]


class Unequal(nn.Module):
    def __init__(self):
        super().__init__()
        self.selecting = Selecting()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + self.layer(self.selecting(hidden)).sum(0)


class Widened(Net):
    """The call of `unequal` is the smallest one whose results have static sizes."""

    def begin(self):
        self.unequal = Unequal()

    def inside(self, hidden):
        return self.unequal(self.middle(hidden))


class Buffers(Net):
    """One buffer is written in place, one assigned."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))

    def inside(self, hidden):
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        made = torch.vmap(torch.sin)(self.norm(hidden))
        return made + self.mean


class Part(nn.Module):
    """A part that cannot be captured, with a part that cannot be either."""

    def __init__(self):
        super().__init__()
        self.rows = Rows()

    def forward(self, hidden):
        return self.rows(hidden) + torch.func.grad(lambda h: h.tanh().sum())(hidden)


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden):
        chosen = hidden[:, 0] > 0.1
        made = torch.zeros_like(hidden)
        made[chosen] = self.layer(hidden[chosen])
        return made


class CalledFromOutside(Net):
    """As T5Gemma 2 has it: the decoder calls the embedding that is within the encoder."""

    def begin(self):
        self.part = Part()

    def inside(self, hidden):
        return self.part(hidden) + self.part.rows(self.middle(hidden))


class Twice(Net):
    def inside(self, hidden):
        return self.half(self.half(hidden, 0.5), 0.25)

    def half(self, hidden, scale):
        return torch.vmap(lambda row: self.middle.weight @ row * scale)(hidden)


class Stays(nn.Module):
    """Layers alike, each with a call that runs as it is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden):
        return self.second(self.chosen(self.first(hidden).relu()))

    def chosen(self, hidden):
        made = torch.zeros_like(hidden)
        made[hidden > 0.2] = hidden[hidden > 0.2]
        return made


class Layers(Net):
    def begin(self):
        self.middle = nn.Sequential(Stays(), Stays(), Stays())


class Apart(Net):
    """A gradient is cut, and another one goes around the call."""

    def inside(self, hidden):
        return self.pair(hidden)[0] + self.pair(hidden)[1]["signs"]

    def pair(self, hidden):
        return torch.vmap(torch.tanh)(self.middle(hidden)), {"signs": hidden.detach().sign()}


class ByANumber(Net):
    """A tensor of one number is an index, and the end of a slice."""

    def inside(self, hidden):
        return hidden * self.row(hidden) + self.first(hidden)

    def row(self, hidden):
        return self.middle.weight[hidden[0].argmax()]

    def first(self, hidden):
        return hidden[:, : hidden[0].argmax()].sum(1, keepdim=True)


class Nearest(Net):
    """torch.cdist takes another kernel from 26 rows on, and is one op for any number of them."""

    def begin(self):
        self.register_buffer("codes", torch.randn(4, 8))

    def inside(self, hidden):
        return hidden + self.nearest(hidden)

    def nearest(self, hidden):
        return self.codes[torch.cdist(hidden, self.codes).argmin(-1)] - hidden.detach()


WORK = [
    Nearest,
    Mapped,
    UnderAnotherName,
    Differentiated,
    InnerGradient,
    TensorHook,
    ModuleHook,
    CallOfItsOwn,
    OldHook,
    SomeRows,
    Experts,
    ByANumber,
]
WORK += [MarkedRows, Experts, Widened, Buffers, CalledFromOutside, Twice, Layers, Apart]
