"""What a model keeps from one call to the next: buffers that it assigns, caches of its first call.

Each of these was once trained on wrong gradients without a word, or refused with a sentence that
led nowhere.
"""

import warnings

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from autopipe.stages.lower import lower
from tests.support.long import chosen
from tests.support.odd_models import (
    ROWS,
    Averaged,
    Net,
    OfAPart,
    built,
    inputs,
    planned,
    square,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import split, trace_model


class AssignedTwice(Averaged):
    def assign(self, value):
        self.average = value
        self.average = self.average * 0.5


class RegisteredAgain(Averaged):
    def assign(self, value):
        self.register_buffer("average", value)


class Written(Averaged):
    def assign(self, value):
        self.average = self.average.clone()
        self.average.copy_(value)


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("kind", [AssignedTwice, RegisteredAgain, Written, OfAPart])
def test_a_buffer_that_is_assigned_keeps_its_value_from_one_micro_batch_to_the_next(kind):
    """Bug: `self.average = ...` gives the name another tensor, which is in no graph.

    The buffer stayed as it was built: loss, gradients and the buffer itself were wrong from the
    second micro-batch on.
    """
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


@pytest.mark.long
def test_a_rank_finds_the_assigned_buffers_as_the_plan_did():
    """A rank replays the reads of the plan, and does not run the model before it exports it."""
    first, second = (
        trace_model(built(OfAPart), inputs, square, reads=reads) for reads in (None, ())
    )
    assert str(first.graph) == str(second.graph)
    assert "copy_" in str(first.graph)


class RunningMean(nn.Module):
    """As reinforcement learning keeps the mean of what it sees: forward is not what updates it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))

    def update(self, x):
        count = self.count + len(x)
        self.mean = self.mean + (x.mean(0) - self.mean) * (len(x) / count).float()
        self.count = count

    def forward(self, x):
        self.count = self.count * 1.5
        return x - self.mean


class Updated(Net):
    def begin(self):
        self.seen = RunningMean()

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.seen.update(hidden.detach())
        return hidden - self.seen.mean


class UpdatedAndCalled(Updated):
    """The buffer is assigned in two calls, of which one is around the other."""

    def inside(self, hidden):
        return self.seen(super().inside(hidden))


class FromOutside(OfAPart):
    """No call of the module itself, nor of a method of it."""

    def inside(self, hidden):
        hidden = self.head(hidden)
        self.head.calls = self.head.calls * 2
        return hidden


class NormedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(8, 8), RunningMean()

    def forward(self, hidden):
        self.seen.update(hidden.detach())
        return self.layer(hidden - self.seen.mean).relu()


class InEqualLayers(Net):
    def begin(self):
        self.layers = nn.Sequential(*[NormedLayer() for _ in range(3)])

    def inside(self, hidden):
        return self.layers(hidden)


@pytest.mark.parametrize(
    "kind",
    chosen(
        [Updated, UpdatedAndCalled, FromOutside, InEqualLayers], now=(Updated, UpdatedAndCalled)
    ),
)
def test_a_method_of_a_module_may_assign_its_buffers(kind):
    """Bug: `self.seen.update(x)` was refused, with a line of torch's, as no call of its module."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


@pytest.mark.long
def test_a_rank_finds_them_as_the_plan_did():
    traces = (trace_model(built(Updated), inputs, square, reads=reads) for reads in (None, ()))
    first, second = (str(trace.graph) for trace in traces)
    assert first == second


class Cached(Net):
    def begin(self):
        self.cache = None

    def inside(self, hidden):
        if self.cache is None:
            self.cache = torch.arange(8.0).sin()
        return self.middle(hidden) + self.cache


def test_a_cache_that_the_first_call_fills_is_filled_in_every_trace():
    """Bug: the plan was traced in a second call and a rank in its first: "another model"."""
    model = built(Cached)
    assert unlike(model) == []
    first, second = (trace_model(model, inputs, square, reads=reads) for reads in (None, ()))
    assert str(first.graph) == str(second.graph)
    assert model.cache is not None, "eager ran; a trace of a copy leaves no mark"


class CachedBuffer(Net):
    """A table that is made anew where the length is another one, as ConViT has it."""

    def begin(self):
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def inside(self, hidden):
        if len(self.table) != hidden.shape[1]:
            self.table = torch.arange(float(hidden.shape[1])).sin()
        return self.middle(hidden) + self.table


def test_a_buffer_that_the_first_call_makes_anew_is_a_cache():
    """Bug: it was refused, as a buffer that gets another shape."""
    assert unlike(built(CachedBuffer)) == ["table"], "the model keeps it, a graph does not"
    trace = trace_model(built(CachedBuffer), inputs, square)
    assert trace.unsteady == () and "table" not in trace.graph.states


def test_a_cache_of_a_model_that_is_compared_is_no_lost_write():
    """Bug: ConViT was refused, "its buffer differs in its graph", once the cache was known to
    change no later call."""
    planned(built(CachedBuffer), square)


class Looks(Net):
    """Keeps a word for its first rows, as classifiers of transformers do for their labels."""

    def begin(self):
        self.kind = None

    def inside(self, hidden):
        if self.kind is None:
            self.kind = "floats" if hidden.dtype.is_floating_point and hidden.shape else "else"
        return self.middle(hidden)


def test_a_word_that_the_first_call_keeps_is_no_obstacle():
    """Bug: ViT-H, too large to be run twice, was refused: its first call had asked for a dtype."""
    assert unlike(built(Looks)) == []
    assert trace_model(built(Looks), inputs, square).unsteady == ()


def test_a_table_that_transformers_keeps_by_its_size_is_made_anew_in_a_trace():
    """Bug: DETR and Mask2Former were refused, "unhashable type: non-nested SymInt"."""
    from transformers.pytorch_utils import compile_compatible_method_lru_cache

    class Sized(Net):
        @compile_compatible_method_lru_cache(maxsize=4)
        def table(self, rows):
            return torch.ones(rows, 8)

        def inside(self, hidden):
            return self.middle(hidden) + self.table(hidden.shape[0])

    assert unlike(built(Sized)) == []


class NormedWeight(Net):
    def begin(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.middle = nn.utils.weight_norm(self.middle)


def test_old_weight_norm_keeps_a_result_between_calls():
    """Bug: a module that was built could not be copied, for `weight` is no leaf of the graph."""
    model = built(NormedWeight)
    trace = trace_model(model, inputs, square)
    own = built(NormedWeight)  # it cannot be copied
    named = {**trace.graph.constants, **dict(own.named_parameters())}
    stage, batch = split(trace, [])[0], inputs(ROWS)
    states = {name: named[name] for name in stage.states}
    module = lower(trace.graph, stage, [], states, [], ROWS, last=True).module
    module(batch["x"], batch["y"])[0].backward()
    square(model(batch["x"]), batch).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(own.get_parameter(name).grad, parameter.grad), name


class RegistersInForward(Net):
    def inside(self, hidden):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.full((8,), 0.5), persistent=False)
        return self.middle(hidden) * self.table


def test_a_buffer_that_the_first_call_registers_is_no_state_of_the_model():
    """Bug: the buffer stayed on the skeleton, and no model that is built has it: a KeyError."""
    model = built(RegistersInForward)
    trace = trace_model(model, inputs, square)
    assert [name for name, state in trace.graph.states.items() if state.kind == "buffer"] == []


class NoneAtFirst(Net):
    """A buffer that is None until the first call, as a causal mask often is."""

    def begin(self):
        self.register_buffer("scale", None, persistent=False)

    def inside(self, hidden):
        if self.scale is None:
            self.scale = torch.linspace(0.5, 2, hidden.shape[1])
        return self.middle(hidden) * self.scale


class AveragedFromTheFirst(Net):
    """Bug: the model could not be captured, as 'NoneType' had no attribute 'clone'."""

    def begin(self):
        self.register_buffer("mean", None)

    def inside(self, hidden):
        now = hidden.detach().mean(0)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return self.middle(hidden) - self.mean


def test_a_buffer_that_the_first_call_makes_and_later_ones_move_is_refused_by_its_name():
    with pytest.raises(CaptureError, match="the buffer 'mean' is None until the first call"):
        trace_model(built(AveragedFromTheFirst), inputs, square)
    model = built(AveragedFromTheFirst)
    model(inputs(2)["x"])  # as the hint says
    assert unlike(model) == []


def test_a_buffer_that_is_none_until_the_first_call_is_none_again_for_the_next_trace():
    """Bug: it was gone, and the model raised an AttributeError in its second call."""
    graph = trace_model(built(NoneAtFirst), inputs, square).graph
    assert [node.short for node in graph.nodes].count("linspace") == 1
    assert [name for name, state in graph.states.items() if state.kind == "buffer"] == []


class ForALog(Net):
    """What a script shows beside its steps."""

    def begin(self):
        self.last, self.means, self.calls, self.total = None, [], 0, torch.zeros(())
        self.known = {}

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.last = hidden.detach().mean()
        self.means.append(self.last)
        self.calls += 1
        self.total += self.last
        self.known.setdefault(hidden.shape[-1], "as each call has it")
        return hidden


def test_what_a_script_alone_reads_is_said():
    """Python runs once, as the model is traced; no later step sets it, or appends to it."""
    trace = trace_model(built(ForALog), inputs, square)
    assert trace.left == ("last", "means", "calls", "total")
    (line,) = trace.facts(gpus=False)
    assert line.startswith("the model leaves last, means, calls and 1 more in Python in each call")
    assert trace_model(built(Net), inputs, square).left == ()
