"""Small models that do odd things, and what eager and their graphs make of three micro-batches."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import CaptureError
from autopipe.opaque.scripted import plain
from tests.support.inprocess import machine
from tests.support.staged import Step, differences, staged_step, trace_model

ROWS, MICRO_BATCHES = 2, 3


class Net(nn.Module):
    """Three layers; a test's own code stands in the middle."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.middle = nn.Linear(8, 8)
        self.down = nn.Linear(8, 4)
        self.begin()

    def begin(self):
        pass

    def forward(self, x):
        return self.down(self.inside(self.up(x).relu()).relu())

    def inside(self, hidden):
        return self.middle(hidden)


class Averaged(Net):
    """`assign(self, value)` gives the buffer `average` a new value."""

    def begin(self):
        self.register_buffer("average", torch.zeros(8))

    def inside(self, hidden):
        hidden = self.middle(hidden)
        mean = hidden.detach().mean(0)
        before = hidden * self.average
        self.assign(0.9 * self.average + 0.1 * mean)
        return hidden + before + self.average


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden):
        self.calls = self.calls + 1
        return self.layer(hidden) / self.calls


class OfAPart(Net):
    """Twice in one forward: the second call sees what the first has assigned."""

    def begin(self):
        self.head = Head()

    def inside(self, hidden):
        return self.head(self.head(hidden))


class Filter(nn.Module):
    """As Hyena has it: `kernel()` calls a block before the module itself is called, as another."""

    def __init__(self):
        super().__init__()
        self.made = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.bias = nn.Parameter(torch.ones(8))

    def kernel(self, x):
        return self.made(x.cos())

    def forward(self, x, kernel):
        return (x * kernel + self.bias).tanh() * self.bias


class Filters(Net):
    def begin(self):
        self.filters = nn.ModuleList(Filter() for _ in range(3))

    def inside(self, hidden):
        for one in self.filters:
            hidden = one(hidden + 1, one.kernel(hidden))
        return hidden


def inputs(rows):
    """The first rows do not depend on how many follow."""
    drawn = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))[:rows]
    return {"x": drawn[:, :6].clone(), "y": drawn[:, 6:].clone()}


def square(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean()


class Scaled:
    """A loss that is relative to a mean of what it has been, in a tensor that no module has."""

    def __init__(self):
        self.mean = torch.ones(())

    def __call__(self, outputs, batch):
        found = outputs.square().mean()
        with torch.no_grad():
            self.mean.lerp_(found, 0.5)
        return found / self.mean


class Leaves(Net):
    """A method leaves a number of its rows, with which other code computes."""

    def inside(self, hidden):
        return self.bent(hidden) * self.found()

    def bent(self, hidden):
        bent = torch.vmap(torch.sin)(self.middle(hidden))
        self.leave(1 + int((bent > 0).sum()))
        return bent


def built(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().train()


def planned(model, loss=square, said=None, **options):
    """The plan for two devices; `said` gets the lines of progress.

    Of what a planner may choose there are stages and cuts alone, unless told otherwise: tests of
    odd models look at what comes before.
    """
    say = (said if said is not None else []).append
    options = {"dp": 1, "tp": 1, "micro_batches": 4, **options}
    return autopipe.plan(
        model, inputs, loss=loss, cluster=machine(2), batch_size=8, say=say, **options
    )


def refusal(model, loss=square, **options):
    """The words in which planning refuses a model."""
    with pytest.raises(CaptureError) as error:
        planned(model, loss, **options)
    return str(error.value)


def eager(model, loss=square):
    """Loss, gradients and buffers that plain torch makes of the micro-batches."""
    batch, losses = inputs(ROWS * MICRO_BATCHES), []
    for k in range(MICRO_BATCHES):
        rows = {key: t[k * ROWS : (k + 1) * ROWS].clone() for key, t in batch.items()}
        losses.append(loss(model(rows["x"]), rows))
        (losses[-1] / MICRO_BATCHES).backward()
    return Step.of(losses, model)


def regions_of(kind):
    """The names of the calls of a model that run as they are."""
    return [region.name for region in traced(kind).regions]


@cache
def traced(kind):
    """The trace of a model of this kind, for tests that look at it and then run it (`unlike`).

    Of no model that writes a plain tensor in place: that is in the graph, and a run changes it.
    """
    return trace_model(built(kind), inputs, square)


def unlike(model, loss=square, cuts=(), **options):
    """Names of what a model's graph computes otherwise than the model, to rounding.

    The loss may hold `model` itself, as it does where a user builds the model in a script.

    Args:
        options: of the trace; or, if there is one of such a model, `traced`.
    """
    return _unlike(model, loss, [cuts], options)


def unlike_whole_or_cut(model, loss=square, *, cuts, **options):
    """The same of one stage and of those between `cuts`, which one trace serves."""
    return _unlike(model, loss, [(), cuts], options)


def _unlike(model, loss, ways, options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trace = options.get("traced") or trace_model(model, inputs, loss, **options)
        own = copy.deepcopy(plain(model))  # before eager has changed its buffers
        drawn, batch = torch.get_rng_state(), inputs(ROWS * MICRO_BATCHES)
        found = []
        for cuts in ways:
            torch.set_rng_state(drawn)
            found.append(staged_step(own, trace, batch, cuts, MICRO_BATCHES))
        expected = eager(model, loss)
        return [name for step in found for name in differences(step, expected, tolerance=1e-5)]
