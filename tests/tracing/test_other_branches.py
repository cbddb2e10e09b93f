"""Branches that a model takes by values of its rows: other rows may take another one.

planning runs the model on the first two rows, and again on the next two
Python reads the same of both          one branch, which each micro-batch is held to
it reads something else                the call in which it does runs as it is, or the lines

So does what random numbers of torch decide: planning draws others, and the least and the most.
"""

import copy

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    square,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import differences, staged_step, trace_model


def others():
    return {name: rows[2:] for name, rows in inputs(4).items()}


class FixedPoint(Net):
    """Iterates until little changes: so many times as the rows want."""

    def inside(self, hidden):
        state = torch.zeros_like(hidden)
        for _ in range(30):
            new = torch.tanh(self.middle(state) + hidden)
            if (new - state).abs().max() < 1e-4:
                break
            state = new
        return state


class BySign(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        return hidden * 2 if hidden.sum().item() > self.border else hidden

    border = 0.0


class Warmed(nn.Module):
    """As the ranges of I-BERT: the first call finds a range, later ones move it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.zeros(1))

    def forward(self, hidden):
        found = hidden.detach().abs().max().reshape(1)
        if self.most.item() == 0:
            self.most.add_(found)
        else:
            self.most.mul_(0.9).add_(0.1 * found)
        return hidden / self.most.clone()


class Assigned(Warmed):
    def forward(self, hidden):
        found = hidden.detach().abs().max().reshape(1)
        self.most = self.most + found if self.most.item() == 0 else 0.9 * self.most + 0.1 * found
        return hidden / self.most


class Ranged(Net):
    kind = Warmed

    def begin(self):
        self.ranges = nn.ModuleList(self.kind() for _ in range(2))

    def inside(self, hidden):
        first, second = self.ranges
        return second(self.middle(first(hidden)))


class RangedByValue(Ranged):
    kind = Assigned


class Deep(Net):
    """A branch in a module of a list, which runs as it is; what is around is traced."""

    def begin(self):
        self.parts = nn.ModuleList(FixedPoint() for _ in range(2))
        self.ends = nn.Linear(4, 8)

    def inside(self, hidden):
        for part in self.parts:
            hidden = hidden + self.ends(part(hidden[:, :6]))
        return hidden


def border():
    """A number between what the first two rows give and the next two."""
    model = built(BySign)
    with torch.no_grad():
        sums = [model.middle(model.up(x).relu()).sum() for x in inputs(4)["x"].split(2)]
    return float(sum(sums) / 2)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", [FixedPoint, BySign, Deep])
def test_a_branch_that_changes_with_the_rows_runs_as_it_is(kind, monkeypatch):
    """Bug: the run ended with "Python read False from a tensor here when the model was traced"."""
    monkeypatch.setattr(BySign, "border", border())
    trace = trace_model(built(kind), inputs, square, others=others)
    assert len(trace.regions) == (2 if kind is Deep else 1)
    assert unlike_whole_or_cut(built(kind), traced=trace, cuts=["down/linear/0"]) == []
    assert planned(built(kind)).regions


@pytest.mark.parametrize(
    "kind, calls",
    [
        (Ranged, ["ranges.0.forward", "ranges.1.forward"]),
        pytest.param(RangedByValue, [".inside"], marks=pytest.mark.long),
    ],
)
def test_a_branch_that_changes_with_a_buffer_runs_as_it_is(kind, calls):
    """Bug: what a run without weights had written into the buffer was forgotten, and zero read.

    Buffers that are assigned are written around their module: the call around it runs as it is.
    """
    trace = trace_model(built(kind), inputs, square, others=others)
    assert [f"{region.module}.{region.method}" for region in trace.regions] == calls
    assert unlike(built(kind), traced=trace) == []


class ByComparison(BySign):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        return hidden * 2 if hidden.sum() > self.border else hidden


def test_a_branch_that_all_rows_take_is_traced():
    """But one by a number, which is compared with that of the first step to the last bit, is not:
    it is another one after each update, whatever rows make of it."""

    def traced(kind):
        return trace_model(built(kind), inputs, square, others=lambda: inputs(2))

    assert traced(ByComparison).regions == ()
    (region,) = traced(BySign).regions
    assert "computed of trained weights" in region.why


class AtTheTop(Net):
    """In the model's own forward, where a few lines run as they are."""

    def forward(self, x):
        hidden = self.middle(self.up(x).relu())
        if x[0, 0] > 0:
            hidden = hidden * 2
        return self.down(hidden)


class LoopAtTheTop(Net):
    """A number that a loop follows from."""

    def forward(self, x):
        hidden = self.up(x).relu()
        for _ in range(int(hidden.sum().item()) % 3 + 1):
            hidden = self.middle(hidden).tanh()
        return self.down(hidden)


class CountsHits(Net):
    """As modules of Lightning are often written: forward is a call, and a number is kept."""

    def begin(self):
        self.hits = 0

    def forward(self, x):
        return self.training_step(x)

    def training_step(self, x):
        hidden = self.middle(self.up(x).relu())
        self.hits += (hidden.argmax(-1) == 3).sum().item()
        return self.down(hidden)


@pytest.mark.parametrize(
    "kind, lines",
    [
        (AtTheTop, "forward_lines_3_to_4()"),
        pytest.param(LoopAtTheTop, "forward_lines_3_to_4()", marks=pytest.mark.long),
        pytest.param(CountsHits, "training_step_lines_3_to_3()", marks=pytest.mark.long),
    ],
)
def test_of_a_branch_of_the_whole_model_a_few_lines_run_as_they_are(kind, lines):
    """Bug: the run ended in a later micro-batch; or all of `training_step` was one piece, and no
    pipeline could cut it."""
    rows = inputs(4)["x"]
    assert (rows[0, 0] > 0) != (rows[2, 0] > 0)
    trace = trace_model(built(kind), inputs, square, others=others)
    assert [region.name for region in trace.regions] == [lines]
    assert unlike(built(kind), cuts=["relu/0"], traced=trace) == []
    assert planned(built(kind), pp=2).regions


class FewRowsOfThree(Net):
    """Rows go to an expert, most of the model, by a number that few of them have; here none has."""

    def begin(self):
        self.middle = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))

    def forward(self, x):
        return self.down(self.inside(self.up(x).relu()))

    def inside(self, hidden):
        made = torch.zeros_like(hidden)
        for number in range(2):
            (rows,) = torch.where(hidden.argmax(-1) == 3 * number + 8)
            made.index_add_(0, rows, self.middle(hidden[rows]))
        return made


def test_a_line_that_gives_no_rows_here_may_give_some_elsewhere():
    """Bug: `torch.where(...)` alone ran as it is, and what follows was planned for 0 rows."""
    found = trace_model(built(FewRowsOfThree), inputs, square, others=others)
    assert [region.name for region in found.regions] == ["inside()"]
    assert unlike(built(FewRowsOfThree), cuts=["relu/0"], traced=found) == []


class InOneLine(Net):
    def forward(self, x):
        return self.down(self.middle(self.up(x).relu()) * (2 if x[0, 0] > 0 else 1))


def test_a_model_of_one_line_runs_as_it_is():
    """No pipeline can cut it then, and each micro-batch takes its own branch."""
    model = built(InOneLine)
    trace = trace_model(model, inputs, square, others=others)
    assert [region.name for region in trace.regions] == ["forward_lines_2_to_2()"]
    assert unlike(model, traced=trace) == []


class Deletes(Net):
    """No lines are taken out of a function that forgets a name."""

    def forward(self, x):
        hidden, first = self.middle(self.up(x).relu()), x[0, 0]
        del x
        return self.down(hidden * 2 if first > 0 else hidden)


def test_of_a_branch_that_no_lines_hold_the_first_is_planned():
    """The model's own forward stays a graph that can be cut: its micro-batches are held to it."""
    said = []
    trace = trace_model(built(Deletes), inputs, square, others=others, say=said.append)
    assert trace.regions == ()
    assert any("a micro-batch of such rows is refused in the run" in line for line in said)
    with pytest.raises(ModelError, match="in this micro-batch"):
        unlike(built(Deletes), traced=trace)


class Dropped(nn.Module):
    """A block that is left out now and then: stochastic depth, as most write it."""

    def __init__(self, share=0.5):
        super().__init__()
        self.layer, self.share = nn.Linear(8, 8), share

    def forward(self, hidden):
        if self.training and torch.rand(1).item() < self.share:
            return hidden
        return hidden + self.layer(hidden).tanh()


class StochasticDepth(Net):
    share = 0.5

    def begin(self):
        self.middle = nn.Sequential(Dropped(self.share), Dropped(self.share))


def ways(model, rows):
    """Of each way through two blocks its loss, and the blocks that are run."""
    found = {}
    for run in ((), (0,), (1,), (0, 1)):
        for number, block in enumerate(model.middle):
            block.share = -1.0 if number in run else 2.0
        found[square(model(rows["x"]), rows).item()] = run
    return found


def test_a_block_that_random_numbers_leave_out_runs_as_it_is():
    """Bug: refused, "Python reads 0.92 from a tensor in a first call of the model and 0.75 in a
    second one"; each micro-batch now takes the way that its own numbers say, forward and back."""
    model, batch = built(StochasticDepth), inputs(16)
    traced = trace_model(model, inputs, square)
    assert {region.name for region in traced.regions} == {"middle.0", "middle.1"}
    step = [
        staged_step(copy.deepcopy(model), traced, batch, cuts, 8, seeded=True)
        for cuts in ((), ["relu/1"])
    ]
    assert differences(*step) == []
    taken, left = set(), copy.deepcopy(model)
    for k, loss in enumerate(step[0].losses):
        rows = {key: tensor[2 * k : 2 * k + 2] for key, tensor in batch.items()}
        known = ways(left, rows)
        nearest = min(known, key=lambda one: abs(one - loss.item()))
        assert abs(nearest - loss.item()) < 1e-6
        taken.add(known[nearest])
    assert len(taken) > 2
    assert planned(built(StochasticDepth)).stages


class SeldomDropped(StochasticDepth):
    share = 0.003


class DropsInItsLoop(Net):
    """LayerDrop, as wav2vec has it: the loop over the layers goes on to the next one."""

    def begin(self):
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def inside(self, hidden):
        for layer in self.middle:
            drawn = torch.rand([])
            if self.training and drawn < 0.01:
                continue
            hidden = hidden + layer(hidden).tanh()
        return hidden


def test_a_number_that_is_seldom_drawn_is_known_while_planning():
    """Bug: a run would have ended at the first micro-batch that draws less than 0.003."""
    assert len(trace_model(built(SeldomDropped), inputs, square).regions) == 2
    (region,) = trace_model(built(DropsInItsLoop), inputs, square).regions
    assert region.method.startswith("inside") and region.random


class DropsOfAList(Net):
    """CaiT draws a number for each of its layers at once, before the loop."""

    def begin(self):
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def inside(self, hidden):
        dropped = torch.zeros(3).uniform_(0.0, 1.0) < 0.1
        for layer in (layer for layer, drop in zip(self.middle, dropped, strict=True) if not drop):
            hidden = hidden + layer(hidden).tanh()
        return hidden


class DropsInPlace(Net):
    """Draws into a tensor of its own, and seldom less than it asks for."""

    def inside(self, hidden):
        if torch.empty(1).uniform_() < 0.003 or torch.empty(1).bernoulli_(0.999) == 0:
            return hidden
        return self.middle(hidden)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [DropsOfAList, DropsInPlace])
def test_what_is_drawn_in_place_is_known_while_planning(kind):
    """Bug: a run ended at the first micro-batch that left out a layer."""
    with torch.random.fork_rng():
        torch.manual_seed(7)  # no layer is left out in the first run
        (region,) = trace_model(built(kind), inputs, square).regions
    assert region.method.startswith("inside") and region.random


class ReadsADraw(Net):
    """As LayerDrop does, of one layer."""

    def inside(self, hidden):
        drawn = torch.rand(1).item()
        return self.middle(hidden) if drawn > 0.3 else hidden


class Crops(Net):
    """A window of its rows, at a place that is drawn."""

    def inside(self, hidden):
        at = torch.randint(4, (1,)).item()
        return self.middle(hidden).roll(at, 1) * hidden[:, at : at + 1]


@pytest.mark.parametrize("kind", chosen([ReadsADraw, Crops], now=(ReadsADraw,)))
def test_what_is_drawn_and_what_it_decides_run_as_one(kind):
    """The line that draws gives a number, which differs from one call to the next."""
    (region,) = trace_model(built(kind), inputs, square).regions
    assert region.method.startswith("inside") and region.random
    assert planned(built(kind)).stages
