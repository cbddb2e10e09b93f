"""Rows that a model puts together and takes apart again: two views of each, a student's crops."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.ir.graph import at_batch
from autopipe.util import dims
from autopipe.util.dims import number_at
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, planned, square, traced, unlike
from tests.support.staged import trace_model


class Views(nn.Module):
    """Two views of each row go through the layers as one batch; `apart(z, n)` takes them apart."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x):
        one, other = self.apart(self.layers(torch.cat([x, x.flip(1)])), len(x))
        return one - 2 * other


WAYS = {
    "z.chunk(2)": lambda self, z, n: z.chunk(2),
    "torch.chunk(z, chunks=2, dim=0)": lambda self, z, n: torch.chunk(z, chunks=2, dim=0),
    "z.split(n)": lambda self, z, n: z.split(n),
    "torch.split(z, n, 0)": lambda self, z, n: torch.split(z, n, 0),
    "torch.split(z, z.shape[0] // 2)": lambda self, z, n: torch.split(z, z.shape[0] // 2),
    "z.split([n, n])": lambda self, z, n: z.split([n, n]),
    "z[:n], z[n:]": lambda self, z, n: (z[:n], z[n:]),
}


@pytest.mark.parametrize(
    "way",
    chosen(
        WAYS,
        now=("torch.chunk(z, chunks=2, dim=0)", "z[:n], z[n:]"),
    ),
)
def test_rows_are_taken_apart(way):
    """Bug: for `chunk` and `split` torch rounds 2 b / 2, and the number of rows was fixed by it."""
    kind = type("Views", (Views,), {"apart": WAYS[way]})
    assert unlike(built(kind), cuts=(2,)) == []


class Rows(nn.Module):
    """`inside` is given 4 x 2 numbers of each row, and gives as many."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.other = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        hidden = self.up(x).unflatten(1, (4, 2))
        return self.down(self.inside(hidden).flatten(1))


FIXED_BY_TORCH = {
    "torch.take_along_dim(h, order, 1)": lambda self, h: torch.take_along_dim(
        h, h.detach()[..., :1].argsort(1), 1
    ),
    "h.take_along_dim(one_for_all, dim=-2)": lambda self, h: h.take_along_dim(
        torch.tensor([3, 1, 0, 2])[None, :, None], dim=-2
    ),
    "torch.kron(h, w)": lambda self, h: torch.kron(h[:, :2, :1], self.other),
    "torch.kron(w, h)": lambda self, h: torch.kron(self.other, h[:, :2, :1]),
}


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("inside", FIXED_BY_TORCH)
def test_what_torch_makes_for_one_number_of_rows_is_made_for_any(inside):
    """Bug: the model was told to take its rows from x.shape[0], which it never wrote down."""
    kind = type("Rows", (Rows,), {"inside": FIXED_BY_TORCH[inside]})
    assert unlike(built(kind), cuts=(1,)) == []


class OfTwo(nn.Module):
    """Both views come with the batch: 2 b is the sum of the rows of two tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, one, other):
        return torch.chunk(self.layers(torch.cat([one, other])), 2)


def test_views_that_come_with_the_batch():
    plan = autopipe.plan(
        OfTwo,
        lambda rows: {"one": torch.ones(rows, 6), "other": torch.zeros(rows, 6)},
        loss=lambda views, batch: (views[0] - views[1]).square().mean(),
        cluster=machine(2),
        batch_size=8,
        pp=2,
    )
    assert len(plan.stages) == 2 and not plan.regions


class Thirds(Views):
    """What does not divide for every number of rows stays torch's own: of 2 b rows 3 parts."""

    def apart(self, z, n):
        return z.chunk(3)[:2]


@pytest.mark.long
def test_what_does_not_divide_is_refused_with_its_line():
    with pytest.raises(autopipe.errors.CaptureError, match="the number of rows is fixed here"):
        unlike(built(Thirds))


class Shapes(nn.Module):
    """Shapes are read as plain integers, as einx reads them."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.layer = norm, nn.Linear(8, 8)

    def forward(self, hidden):
        rows, width = (int(size) for size in hidden.shape)
        halves = self.layer(self.norm(hidden)).reshape(rows, 2, width // 2)
        return hidden + halves.flip(1).reshape(rows, width)


class OneNormForAll(nn.Module):
    """Two layers have the same norm, so that export calls a copy of each module."""

    def __init__(self):
        super().__init__()
        norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.Sequential(Shapes(norm), Shapes(norm))

    def forward(self, x):
        return self.down(self.layers(self.up(x)))


def test_calls_around_a_line_are_found_beside_a_module_in_two_places():
    """Bug: refused, for no call of a module was seen around the line that fixes the rows."""
    first, second = traced(OneNormForAll).regions
    assert (first.name, second.name) == ("layers.0", "layers.1")
    assert unlike(built(OneNormForAll), traced=traced(OneNormForAll), cuts=(1,)) == []


class EveryThird(nn.Module):
    """Of all numbers of a batch together every third is another: (8 b + 2) // 3 of them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.up(x)
        h.view(-1)[::3] = 0.3
        return self.down(h.tanh())


def test_a_size_may_be_a_share_of_the_rows_that_is_rounded():
    """Bug: a NameError, for no formula could be compiled that has torch's own `//`."""
    graph = traced(EveryThird).graph
    sizes = {dim for n in graph.nodes for spec in n.outputs if spec for dim in spec.shape}
    (third,) = {size for size in sizes if str(size).startswith("floor")}
    assert [at_batch(third, rows) for rows in (1, 2, 3, 5)] == [3, 6, 8, 14]
    assert dims.parse(str(third)) == third
    assert planned(built(EveryThird)).batch.rows == 8
    assert unlike(built(EveryThird), traced=traced(EveryThird), cuts=(7,)) == []


NUMBERS = {
    "1 / b": lambda b: 1 / b,
    "b ** -0.5": lambda b: b**-0.5,
    "2.0 ** b": lambda b: 2.0**b,
    "b > 2": lambda b: b > 2,
    "b % 3": lambda b: b % 3,
    "-b // 3": lambda b: -b // 3,
    "round(0.3 * b)": lambda b: round(0.3 * b),
}


class TimesANumber(Net):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def inside(self, hidden):
        return self.middle(hidden) * self.number(hidden.shape[0]) + hidden


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_python_computes_from_the_rows_is_what_it_is(number):
    """Bug: it was cut to a whole one, as a size is. A model too large to be compared with its graph
    would have been multiplied by 0 without a word; `b > 2` was a NameError."""
    graph = trace_model(built(lambda: TimesANumber(number)), inputs, square).graph
    (factor,) = [node.args[1] for node in graph.nodes if node.short == "mul"]
    assert [number_at(factor, rows) for rows in (2, 3, 7)] == [number(rows) for rows in (2, 3, 7)]
    assert unlike(built(lambda: TimesANumber(number)), cuts=("relu/1",)) == []
