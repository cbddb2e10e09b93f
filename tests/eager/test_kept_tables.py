"""Tables that a model fills in its first call: taken where nothing of the rows is in them.

    first run      table = arange(8).cos();  h * table
    later runs                               h * table     the same calls on the rows

Of a model too large to be run while planning, no comparison with its graph tells the rest.
"""

import pytest
import torch
from torch import nn

from autopipe.planners.driver import against_eager
from tests.support.odd_models import Net, built, inputs, planned, refusal, square, unlike
from tests.support.staged import trace_model


def rotary(length, width):
    """Angles of positions, [length, width]."""
    rates = 1 / 100 ** (torch.arange(0, width, 2) / width)
    return torch.outer(torch.arange(float(length)), rates).repeat(1, 2)


class Kept(Net):
    """Keeps `table` from its first call on; a case says how it is made and used."""

    def begin(self):
        self.table = None

    def inside(self, hidden):
        if self.table is None:
            self.table = self.made(hidden)
        return self.middle(hidden) * self.table


class OfAnotherDtype(Kept):
    def made(self, hidden):
        with torch.no_grad():
            return rotary(1, hidden.shape[1]).cos().to(hidden)


class OfABuffer(Kept):
    def begin(self):
        super().begin()
        self.register_buffer("rates", 1 / 100 ** (torch.arange(8.0) / 8))

    def made(self, hidden):
        return self.rates.cos()


class ByLength(Net):
    def begin(self):
        self.tables = {}

    def inside(self, hidden):
        key = hidden.shape[1], hidden.dtype
        if key not in self.tables:
            self.tables[key] = rotary(1, hidden.shape[1]).sin()
        return self.middle(hidden) + self.tables[key]


class Grown(Net):
    """As remote code of language models has it: a buffer, and beside it its length."""

    def begin(self):
        self.grow(2)

    def grow(self, length):
        self.length = length
        self.register_buffer("table", rotary(1, length).cos(), persistent=False)

    def inside(self, hidden):
        if hidden.shape[1] > self.length:
            self.grow(hidden.shape[1])
        return self.middle(hidden) * self.table[:, : hidden.shape[1]]


class BySize(Net):
    """As PyTorch's own example of a language model has it: the first call alone asks for sizes."""

    def begin(self):
        self.mask = None

    def inside(self, hidden):
        if self.mask is None or self.mask.size(0) < 8:
            assert hidden.is_floating_point() and hidden.dim() == 2
            self.mask = torch.arange(1.0, 1 + hidden.size(1))[: hidden.stride(0)]
        return self.middle(hidden) * self.mask


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", [Grown, OfABuffer, ByLength, BySize, OfAnotherDtype])
def test_a_table_of_constants_changes_no_later_call(kind):
    """Bug: of models too large for the comparison it was refused, "computes something else"; that
    which grows (`Grown`) of every model, since its buffer was put back and its length was not."""
    trace = trace_model(built(kind), inputs, square)
    assert trace.unsteady == ()
    assert [name for name in unlike(built(kind), traced=trace) if name != "table"] == []


class OfTheRows(Kept):
    def made(self, hidden):
        return (hidden.detach() > -1e9).all(0).float()


class OfInputs(Net):
    """Of the rows themselves, which have values while the model is looked at: no fake tensor."""

    def begin(self):
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = (x.detach() > -1e9).all(0).float()
        return super().forward(x * self.mask)


class OfAWeight(Kept):
    def made(self, hidden):
        return self.up.weight.detach().norm()


class OfAMovingBuffer(Kept):
    def begin(self):
        super().begin()
        self.register_buffer("mean", torch.ones(8))

    def made(self, hidden):
        return self.mean * 2

    def inside(self, hidden):
        self.mean.mul_(0.9)
        return super().inside(hidden)


class OfTwoTables(Kept):
    """Uses one table in its first call and another in later ones: no call tells them apart."""

    def inside(self, hidden):
        first = self.table is None
        self.table, self.other = torch.ones(600, 8), torch.full((600, 8), 2.0)
        return self.middle(hidden) * (self.table if first else self.other).mean(0)


class TwiceAtFirst(Kept):
    def inside(self, hidden):
        hidden = hidden * 2 if self.table is None else hidden
        self.table = torch.ones(())
        return self.middle(hidden)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    "kind", [OfInputs, OfTheRows, OfAWeight, OfAMovingBuffer, TwiceAtFirst, OfTwoTables]
)
def test_what_the_first_call_keeps_of_rows_or_weights_changes_later_ones(kind):
    """A graph computes it anew of each micro-batch, and the model does not."""
    unsteady = trace_model(built(kind), inputs, square).unsteady
    assert {"table", "mask"} & {*unsteady}


def test_where_nothing_else_tells_that_is_refused(monkeypatch):
    monkeypatch.setattr(against_eager, "MOST_FLOPS", 0)
    planned(built(Grown), square)
    assert "keeps table, other from one call to the next" in refusal(built(OfTwoTables))


class Drawn(Kept):
    def made(self, hidden):
        return torch.rand(8)


def test_random_numbers_that_the_first_call_keeps_are_refused():
    """Bug: a lazily drawn projection was drawn anew in each micro-batch, without a word: eager and
    graph were compared on equal random numbers, where they agree."""
    assert "draws random numbers in a first call (rand) and keeps them" in refusal(built(Drawn))


class OtherLayer(Net):
    """As BigBird for short rows: a layer of another kind, whose own weights are thrown away."""

    def begin(self):
        self.replaced = False

    def inside(self, hidden):
        if not self.replaced:
            layer, self.replaced = nn.Linear(8, 8), True
            layer.weight, layer.bias = self.middle.weight, self.middle.bias
            self.middle = layer
        return self.middle(hidden)


def test_random_numbers_that_the_first_call_throws_away_are_not():
    """Bug: no head of BigBird was planned on rows of fewer tokens than its blocks have."""
    planned(built(OtherLayer))
    assert unlike(built(OtherLayer)) == []


class DrawnInPart(Drawn):
    """A part that runs as it is may keep what it draws, which no graph tells."""

    def inside(self, hidden):
        return super().inside(hidden)[hidden.sum(1) > -1e9]


def test_what_a_part_draws_once_is_refused():
    assert "keeps table from one call to the next" in refusal(built(DrawnInPart))


class KeptOfRealWeights(OfAnotherDtype):
    """Python reads a weight, so the model is looked at with its weights."""

    def inside(self, hidden):
        return super().inside(hidden) if self.up.weight.sum() < 1e9 else hidden


class RowsOfRealWeights(OfInputs):
    def inside(self, hidden):
        return super().inside(hidden) if self.up.weight.sum() < 1e9 else hidden


def test_models_that_are_looked_at_with_their_weights():
    """There no tensor is fake: what comes of rows and weights is followed from them."""
    assert trace_model(built(KeptOfRealWeights), inputs, square).unsteady == ()
    assert trace_model(built(RowsOfRealWeights), inputs, square).unsteady == ("mask",)
