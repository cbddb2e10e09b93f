"""A model whose second call is another one is refused, wherever it keeps what makes it so.

Planning compares a small model with its graph in two micro-batches. A large one it does not, so
here that comparison is left out.
"""

import functools
import inspect
import random
import time
from ctypes import c_int
from functools import partial

import pytest
import torch

from autopipe.eager.second_run import of_other_rows, other_reads
from autopipe.ir.fingerprint import fingerprint
from autopipe.planfile.parts import Read
from autopipe.planners.driver import against_eager
from autopipe.runtime.start import trace_planned
from tests.support.odd_models import Net, built, inputs, planned, refusal, square, unlike
from tests.support.staged import trace_model


class Clock(Net):
    def inside(self, hidden):
        return self.middle(hidden) * time.perf_counter()  # here


class Bytes(Net):
    def begin(self):
        self.calls = c_int(0)

    def inside(self, hidden):
        self.calls.value += 1
        return self.middle(hidden) * self.calls.value  # here


class ChoosesALayer(Bytes):
    """Its calls differ by the weights alone, which are of equal shapes."""

    def begin(self):
        super().begin()
        self.other = torch.nn.Linear(8, 8)

    def inside(self, hidden):
        self.calls.value += 1
        return (self.middle, self.other)[self.calls.value % 2](hidden)  # here


UNSEEN = (Clock, Bytes, ChoosesALayer)


@pytest.fixture
def large(monkeypatch):
    """Models are planned as large ones are: not compared with their graphs."""
    monkeypatch.setattr(against_eager, "MOST_BYTES", 0)


@pytest.mark.parametrize("kind", UNSEEN, ids=lambda kind: kind.__name__)
def test_what_is_kept_outside_of_attributes_is_refused_with_its_line(kind, large):
    """Bug: nothing was seen to change, so there was no second run: constants of the graph."""
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    said = refusal(partial(built, kind))
    assert said.startswith(f"{__file__}:{line}: the model computes something else here in a second")


class RemovesItsHook(Net):
    def begin(self):
        def once(layer, args, made):
            handle.remove()
            return made * 0.5

        handle = self.middle.register_forward_hook(once)


class AddsAHook(Net):
    def inside(self, hidden):
        self.middle.register_forward_hook(lambda layer, args, made: made * 0.5)
        return self.middle(hidden)


class SwapsLayers(Net):
    def begin(self):
        self.other = torch.nn.Linear(8, 8)

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.middle, self.other = self.other, self.middle
        return hidden


class SwapsParameters(SwapsLayers):
    def inside(self, hidden):
        layers = self.middle, self.other
        first, second = (layer.weight for layer in layers)
        hidden = self.middle(hidden)
        self.middle.weight, self.other.weight = second, first
        return hidden


class Grows(SwapsLayers):
    def begin(self):
        self.all = torch.nn.ModuleList([self.middle])

    def inside(self, hidden):
        for layer in self.all:
            hidden = layer(hidden)
        self.all.append(self.middle)
        return hidden


SWAPPED = {
    SwapsLayers: "keeps middle, other",
    SwapsParameters: "keeps middle.weight, other.weight",
    Grows: "keeps all.1",
}


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", SWAPPED)
def test_layers_and_parameters_that_each_call_swaps_are_refused(kind, large):
    """Bug: a large model ran through the layers of a first call in all of them; the calls of a
    second differ by weights of equal shapes."""
    model = built(kind)
    before = dict(model.named_parameters())
    assert f"the model {SWAPPED[kind]} from one call to the next" in refusal(model)
    assert dict(model.named_parameters()) == before


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [RemovesItsHook, AddsAHook])
def test_hooks_that_each_call_changes_are_refused(kind, large):
    """Bug: all micro-batches ran as the first."""
    assert "the model keeps middle.forward_hooks from one call to the" in refusal(built(kind))


class Warm:
    """A loss that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, batch):
        self.calls += 1
        return square(outputs, batch) * min(1.0, self.calls / 4)


def closing():
    calls = [0]

    def loss(outputs, batch):
        calls[0] += 1
        return square(outputs, batch) / calls[0]

    return loss


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (Warm(), "Warm.calls"),
        (closing(), "closing.<locals>.loss"),
        (partial(closing()), "closing.<locals>.loss"),
    ],
)
def test_a_loss_that_counts_its_calls_is_refused(loss, name, large):
    """Bug: only what a model keeps was looked at, and a loss that is a module."""
    assert f"the model keeps {name} from one call to the next" in refusal(built(Net), loss)


@functools.cache
def table(width):
    return torch.arange(float(width)).sin()


class Remembers(Net):
    def inside(self, hidden):
        return self.middle(hidden) + table(hidden.shape[1])


def test_a_cache_that_a_first_call_fills_is_no_obstacle(large):
    """A second call makes fewer calls of torch, and the same ones."""
    table.cache_clear()
    planned(built(Remembers))


class FillsEmpty(Net):
    """Makes memory of a size, in which any values may be, and writes some of them."""

    def inside(self, hidden):
        order = torch.empty(64)
        order[::2] = torch.arange(32.0)
        return self.middle(hidden) + order[:16:2]


def test_what_memory_held_before_is_no_difference(large):
    torch.full((64,), random.random())  # the next tensor of this size may lie there
    planned(built(FillsEmpty))


class Plain(Net):
    """A tensor that is no buffer, written in place: a graph writes it too."""

    def begin(self):
        self.calls = torch.zeros(())

    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) / self.calls


def test_a_plain_tensor_that_is_written_in_place_is_put_back():
    """Bug: looking at the model counted its calls, and the first micro-batch was the third."""
    assert unlike(built(Plain)) == []
    assert unlike(built(Plain), cuts=["relu/1"]) == []


@functools.lru_cache
def angles(count):
    return torch.arange(float(count)).cos()


class Tables(Net):
    """Tables of positions, made in a first call; a count beside them, for a log."""

    def begin(self):
        self.calls = 0

    @functools.cache  # noqa: B019
    def table(self, count):
        return torch.arange(float(count)).sin()

    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) + self.table(8) + angles(8)


def test_a_table_that_a_cached_function_keeps_is_made_in_the_graph(large):
    """Bug: a constant of the plan's graph, which a rank computed: it refused the plan."""
    model = built(Tables)
    plan = planned(model)
    assert angles.cache_info().currsize == Tables.table.cache_info().currsize == 0
    trace = trace_model(built(Tables), inputs, square)
    assert unlike(built(Tables), traced=trace) == []
    angles.cache_clear()  # plain PyTorch has called it
    graphs = [trace_planned(built(Tables), inputs, square, plan).trace.graph for _ in range(2)]
    assert len(set(map(fingerprint, [*graphs, trace.graph]))) == 1 and not graphs[0].constants


@functools.lru_cache
def rows_of_a_file():
    return object()


def test_what_forward_does_not_call_is_kept():
    """Bug: every cached function of the model's file was cleared, and ranks planned anew."""
    before = rows_of_a_file()
    planned(built(Tables))
    assert rows_of_a_file() is before


@functools.lru_cache
def noise(count):
    return torch.rand(count)


class Noise(Net):
    def inside(self, hidden):
        return self.middle(hidden) * noise(8)


def test_random_numbers_that_one_keeps_are_refused():
    assert "draws random numbers in a first call" in refusal(Noise)


def test_an_infinity_is_told_as_python_writes_it():
    """Bug: it was told as the text that a plan has of it, in quotes."""
    lowest, one = Read("item", "-Infinity", "net.py:7"), Read("item", 1.0, "net.py:7")
    assert of_other_rows(lowest, one).message == (
        "net.py:7: Python reads -inf from a tensor here of the first two rows, and 1.0 of the next "
        "two"
    )
    error = other_reads([one], lambda: [lowest])
    assert error is not None
    assert "reads 1.0 from a tensor in a first call of the model and -inf in" in error.message
