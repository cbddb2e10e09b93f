"""A graph computes what the model does, or the model is refused with its line: odd models, tried.

Each of these was once trained on wrong gradients without a word, or refused with a sentence that
led nowhere.
"""

import inspect
import random
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopipe.errors import CaptureError, ModelError
from autopipe.stages.lower import lower
from autopipe.tracing.source import bare
from tests.support.odd_models import (
    MICRO_BATCHES,
    ROWS,
    Net,
    built,
    eager,
    inputs,
    square,
    unlike,
)
from tests.support.staged import differences, split, staged_step, trace_model

# What works.


def test_a_loss_that_reads_the_models_parameters_trains_them():
    """Bug: the graph has a copy of the model with fake parameters, the loss holds the model itself.

    Its parameters came into the graph as constants: gradients without the penalty's part (49 % too
    small), and a penalty that stayed what it was when the model was traced.
    """
    model = built(Net)

    def penalised(outputs, batch):
        return square(outputs, batch) + 0.1 * sum(p.norm() for p in model.parameters())

    assert unlike(model, penalised) == []


class Centred(Net):
    def begin(self):
        self.centres = nn.Parameter(torch.ones(4))

    def loss(self, outputs, batch):
        return ((outputs - batch["y"] - self.centres) ** 2).mean()


def test_a_loss_that_is_a_method_of_the_model_trains_what_only_it_reads():
    """Bug: the centres, which forward does not read, had no gradient at all."""
    model = built(Centred)
    assert unlike(model, model.loss) == []


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


@pytest.mark.parametrize("kind", [AssignedTwice, RegisteredAgain, Written, OfAPart])
def test_a_buffer_that_is_assigned_keeps_its_value_from_one_micro_batch_to_the_next(kind):
    """Bug: `self.average = ...` gives the name another tensor, which is in no graph.

    The buffer stayed as it was built: loss, gradients and the buffer itself were wrong from the
    second micro-batch on.
    """
    assert unlike(built(kind)) == []
    assert unlike(built(kind), cuts=["relu/1"]) == []


def test_a_rank_finds_the_assigned_buffers_as_the_plan_did():
    """A rank replays the reads of the plan, and does not run the model before it exports it."""
    first, second = (
        trace_model(built(OfAPart), inputs, square, reads=reads) for reads in (None, ())
    )
    assert str(first.graph) == str(second.graph)
    assert "copy_" in str(first.graph)


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
    assert trace.unsteady == ("table",) and "table" not in trace.graph.states


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


class Unused(Net):
    """Draws, as models with layerdrop do, and never uses the number."""

    def inside(self, hidden):
        return self.middle(hidden) if random.random() < 2 else hidden


def test_a_random_number_that_changes_nothing_is_no_obstacle():
    before = random.getstate()
    assert unlike(built(Unused)) == []
    model = built(Net)
    trace_model(model, inputs, square)
    assert before != random.getstate(), "eager has drawn"


def test_a_loss_that_is_a_module_brings_its_buffers():
    """Bug: they were taken for buffers of the model: "Sequential has no attribute `loss`"."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, outputs, batch):
            return (self.weights * (outputs - batch["y"]) ** 2).mean()

    assert unlike(built(Net), Weighted()) == []


def test_a_loss_that_assigns_its_buffer_keeps_the_value():
    """Bug: it was 1 in each micro-batch; only what the model assigns was seen."""

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, outputs, batch):
            loss = square(outputs, batch)
            self.mean = 0.5 * self.mean + 0.5 * loss.detach()
            return loss / self.mean

    for cuts in ([], ["relu/1"]):
        trace = trace_model(model := built(Net), inputs, Normalised())
        batch = inputs(ROWS * MICRO_BATCHES)
        found = staged_step(model, trace, batch, cuts, MICRO_BATCHES)
        assert differences(found, eager(model, Normalised()), tolerance=1e-5) == []


def test_a_loss_keeps_what_requires_a_gradient():
    """Bug: the first look ran without gradients, where nothing requires one: "gives an int"."""

    def loss(outputs, batch):
        return sum(t.square().mean() for t in (outputs, batch["y"]) if t.requires_grad)

    assert unlike(built(Net), loss) == []


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


class LeavesALoss(Net):
    """Leaves a loss of its own in an attribute, as mixtures of experts do."""

    def begin(self):
        self.extra = None

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.extra = hidden.square().mean()
        return hidden


def test_a_loss_finds_what_forward_has_left_in_an_attribute():
    """Bug: it found nothing, or what an earlier run had left; a copy of the model is traced."""
    model = built(LeavesALoss)
    assert unlike(model, lambda outputs, batch: square(outputs, batch) + 0.1 * model.extra) == []
    assert model.extra.grad_fn is not None, "eager has run; a trace of a copy leaves no mark"


@dataclass
class Layered:
    """As configurations of transformers are whose layers differ."""

    heads: int = 4
    width: int = 8

    def __getattribute__(self, name):
        if name == "heads":
            raise ValueError("ask the configuration of one layer")
        return super().__getattribute__(name)


def test_no_attribute_of_an_object_is_read_that_the_model_does_not_read():
    """Bug: what forward has left was looked for by reading every field."""

    class Configured(LeavesALoss):
        def begin(self):
            super().begin()
            self.config = Layered()

    model = built(Configured)
    assert unlike(model, lambda outputs, batch: square(outputs, batch) + 0.1 * model.extra) == []


class HooksAround(Net):
    """An adapter that a hook adds, and a list in which another keeps what it sees."""

    def begin(self):
        self.adapter, self.seen = nn.Linear(8, 8), []
        self.middle.register_forward_hook(lambda layer, args, made: made + self.adapter(args[0]))
        self.adapter.register_forward_hook(lambda layer, args, made: self.seen.append(made))

    def inside(self, hidden):
        self.seen.clear()
        return self.middle(hidden) * self.seen[-1]


def test_a_copy_of_a_model_has_hooks_of_its_own():
    """Bug: a hook called the adapter of the model that was copied, under no name of the copy's: a
    rank that was given the model refused the plan of the function that builds it."""
    assert unlike(built(HooksAround)) == []
    names = [node.name for node in trace_model(built(HooksAround), inputs, square).graph.nodes]
    assert "adapter/linear/0" in names


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


class Cumulative(Net):
    def begin(self):
        self.middle = nn.BatchNorm1d(8, momentum=None)


class Aside(Net):
    """A branch that no result comes of; its statistics are kept all the same."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)
        self.other = nn.InstanceNorm1d(8, track_running_stats=True)

    def inside(self, hidden):
        self.norm(self.middle(hidden))
        self.other(hidden[:, :, None].expand(-1, -1, 3))
        return self.middle(hidden)


def test_running_statistics_are_written_by_a_branch_that_nothing_reads():
    """Bug: only ops whose schemas declare a write were kept, and `batch_norm` declares none.

    Backbones of which one feature map is trained were refused: "another one by its graph".
    """
    assert unlike(built(Aside)) == []
    assert unlike(built(Aside), cuts=["relu/1"]) == []


class RoutedIn(Net):
    """As switch and nllb have it: the router is put to a dtype, which it has already."""

    def inside(self, hidden):
        return self.middle.to(hidden.dtype)(hidden)


class RegistersInForward(Net):
    def inside(self, hidden):
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.full((8,), 0.5), persistent=False)
        return self.middle(hidden) * self.table


class ReadsData(Net):
    """As I-BERT has it: the range of its activations, without a gradient."""

    def inside(self, hidden):
        return self.middle(hidden) / hidden.data.abs().max()


class WritesData(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        hidden.data.mul_(2)
        return hidden


class Clamped(Net):
    """As flava clamps its temperature, and a Wasserstein GAN's critic its weights."""

    def inside(self, hidden):
        with torch.no_grad():
            self.middle.weight.clamp_(-0.1, 0.1)
        return self.middle(hidden)


class ClampedData(Net):
    """As gemma3n has it; a second time changes nothing, nor does another name of the weight."""

    def inside(self, hidden):
        seen = self.middle.weight.data.clamp_(-0.1, max=0.1)
        hidden = self.middle(hidden)
        self.middle.weight.data.clamp_(-0.1, 0.1)
        return self.middle(hidden) * seen.abs().max()


@pytest.mark.parametrize("kind", [Clamped, ClampedData])
def test_a_weight_that_forward_clamps_is_clamped_for_its_readers(kind):
    """It has its gradient; the runtime clamps the weight itself before the optimizer's step."""
    assert unlike(built(kind)) == []
    assert unlike(built(kind), cuts=["relu/1"]) == []
    graph = trace_model(built(kind), inputs, square).graph
    assert graph.states["middle.weight"].projection == ("aten.clamp_.default", (-0.1, 0.1))
    lines = [str(node).partition(" -> ")[0] for node in graph.nodes]
    if kind is Clamped:
        assert {
            "detach/0 = aten.detach.default([middle.weight])",
            "clamp/0 = aten.clamp.default(detach/0, -0.1, 0.1)",
            "sub/0 = aten.sub.Tensor([middle.weight], detach/0)",
            "add/0 = aten.add.Tensor(clamp/0, sub/0)",
            "middle/linear/0 = aten.linear.default(relu/0, add/0, [middle.bias])",
        } <= {*lines}


@pytest.mark.parametrize("kind", [Cumulative, RoutedIn, ReadsData, WritesData])
def test_what_python_does_in_forward_is_done_by_tensors_or_left_out(kind):
    """Bugs: all were refused; Python reads a count, the gradient of a parameter, x.data."""
    assert unlike(built(kind)) == []
    assert unlike(built(kind), cuts=["relu/1"]) == []


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


def test_a_buffer_that_is_none_until_the_first_call_is_none_again_for_the_next_trace():
    """Bug: it was gone, and the model raised an AttributeError in its second call."""
    graph = trace_model(built(NoneAtFirst), inputs, square).graph
    assert [node.short for node in graph.nodes].count("linspace") == 1
    assert [name for name, state in graph.states.items() if state.kind == "buffer"] == []


class MovedByData(Net):
    """As MoCo's keys follow its queries."""

    def begin(self):
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def inside(self, hidden):
        for own, other in zip(self.teacher.parameters(), self.middle.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
        return self.middle(hidden) - self.teacher(hidden)


def test_the_data_of_a_frozen_parameter_may_be_set():
    """Bug: it was refused as one that the optimizer trains."""
    assert unlike(built(MovedByData)) == []


class AsksForOthers(Net):
    def begin(self):
        self.norm = nn.SyncBatchNorm(8)

    def inside(self, hidden):
        hidden = self.norm(self.middle(hidden))
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(hidden)
        return hidden


def test_a_rank_traces_what_was_planned_where_no_process_group_was():
    """Bugs: a rank's graph had an all_reduce, and was refused as another model's; SyncBatchNorm."""

    def graph():
        return str(trace_model(built(AsksForOthers), inputs, square).graph)

    planned, store = graph(), torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert graph() == planned
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


class ChangesTheBatch(Net):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


def test_a_batch_that_the_model_changes_in_place_is_changed_for_the_loss_too():
    def loss(outputs, batch):
        batch["y"].mul_(2)
        return square(outputs, batch) + outputs.mean() * batch["x"].mean()

    assert unlike(built(ChangesTheBatch), loss) == []


# What is refused, each with the line marked `# here`.


class Outside:
    """A tensor that is no part of the model."""

    scale = torch.full((8,), 2.0, requires_grad=True)


class TensorHook(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: -0.5 * gradient)  # here
        return hidden


class HookEachTime(Net):
    def inside(self, hidden):
        self.middle.weight.register_hook(lambda gradient: 3 * gradient)  # here
        return self.middle(hidden)


class ParameterHook(Net):
    def begin(self):
        self.middle.weight.register_hook(lambda gradient: 3 * gradient)  # here


class AfterSumming(Net):
    def begin(self):
        self.middle.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))  # here


class Saved(Net):
    def inside(self, hidden):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t / 2, lambda t: t):  # here
            return self.middle(hidden)


class Frozen(Net):
    def inside(self, hidden):
        self.middle.weight.requires_grad_(False)  # here
        return self.middle(hidden)


class Assigned(Net):
    def inside(self, hidden):
        self.middle.weight.requires_grad = False  # here
        return self.middle(hidden)


class Replaced(Net):
    def inside(self, hidden):
        self.middle.weight.data = self.middle.weight.detach().clamp(-0.1, 0.1)  # here
        return self.middle(hidden)


class DataSet(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden)
        hidden.data = hidden.detach() * 2  # here
        return hidden


class ReadsGradient(Net):
    def inside(self, hidden):
        return self.middle(hidden) * (1 if self.up.weight.grad is None else 2)  # here


class Seeded(Net):
    def inside(self, hidden):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.middle(hidden) + torch.randn(8)  # here


class Generator(Net):
    def inside(self, hidden):
        own = torch.Generator().manual_seed(3)
        return self.middle(hidden) + torch.randn(8, generator=own)  # here


class PythonRandom(Net):
    def inside(self, hidden):
        return self.middle(hidden) if random.random() < 0.5 else hidden  # here


class NumpyRandom(Net):
    def inside(self, hidden):
        noise = np.random.rand(8).astype("float32")
        return self.middle(hidden) + torch.from_numpy(noise)  # here


class CountsAndReads(Net):
    def begin(self):
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def inside(self, hidden):
        self.step += 1
        return self.middle(hidden) * min(1.0, self.step.item() / 10)  # here


class DrawsAndReads(Net):
    """As LayerDrop does."""

    def inside(self, hidden):
        drawn = torch.rand(1).item()  # here
        return self.middle(hidden) if drawn > 0.3 else hidden


class InitialisesItself(Net):
    """As an ActNorm does."""

    def begin(self):
        self.register_buffer("known", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))

    def inside(self, hidden):
        if self.known.item() == 0:  # here
            self.mean.copy_(hidden.detach().mean(0))
            self.known.fill_(1)
        return self.middle(hidden - self.mean)


class ReplacedFrozen(Net):
    def begin(self):
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def inside(self, hidden):
        self.teacher.weight.data = torch.ones(2, 8)  # here
        return self.middle(hidden)


REFUSED = {
    CountsAndReads: "Python reads 1 from a tensor in a first call of the model and 2 in a second",
    DrawsAndReads: "Python reads 0.",
    InitialisesItself: "Python reads 0 from a tensor in a first call of the model and 1 in a",
    ReplacedFrozen: "forward sets the .data of a frozen parameter of (8, 8) torch.float32 to a",
    HookEachTime: "forward sets a hook on a parameter, one more in every micro-batch",
    ParameterHook: "the parameter 'middle.weight' has a hook on its gradient",
    AfterSumming: "the parameter 'middle.weight' has a hook on its gradient",
    Saved: "hooks on saved tensors are in no graph",
    Frozen: "forward sets requires_grad=False on a parameter of shape (8, 8)",
    Assigned: "forward sets requires_grad=False on a parameter of shape (8, 8)",
    Replaced: "forward sets the .data of a parameter, which the optimizer trains",
    ReadsGradient: "forward reads the gradient of a parameter",
    Seeded: "the model draws random numbers after a seed that it sets itself",
    Generator: "the model draws random numbers from a generator of its own",
    PythonRandom: "the model computes with random numbers that are not torch's",
    NumpyRandom: "the model computes with random numbers that are not torch's",
}


class EvaluatesFirst(Net):
    """Its backward reads the statistics that training has written by then: no version tells."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        norm = self.norm
        fixed = F.batch_norm(hidden, norm.running_mean, norm.running_var)
        return self.middle(norm(hidden) + fixed)


def test_a_norm_in_evaluation_before_one_in_training_is_refused():
    """Bug: under 1F1B its backward read what a later micro-batch had written, without a word."""
    with pytest.raises(CaptureError, match=r"a norm in evaluation reads \[norm.running_mean\], wh"):
        trace_model(built(EvaluatesFirst), inputs, square)


class HookBehind(Net):
    """A hook on the function that made a tensor, which is no hook of the tensor."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        if hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda gradients: tuple(3 * g for g in gradients))
        return hidden


def test_a_hook_on_what_made_a_tensor_runs_as_it_is():
    """Bug: it was dropped; only a model small enough to be compared with its graph was refused."""
    (region,) = trace_model(built(HookBehind), inputs, square).regions
    assert region.method == "inside" and "forward reads .grad_fn" in region.why
    assert unlike(built(HookBehind)) == []
    assert unlike(built(HookBehind), cuts=["relu/1"]) == []


class InnerGradient(Net):
    def inside(self, hidden):
        made = self.middle(hidden)
        (slope,) = torch.autograd.grad(made.square().sum(), hidden, create_graph=True)  # here
        return made + slope


class SparseTable(Net):
    """Neighbours in a graph, as many libraries keep them."""

    def begin(self):
        self.register_buffer("neighbours", torch.eye(8).to_sparse())

    def inside(self, hidden):
        return torch.sparse.mm(self.neighbours, hidden.T).T


def test_a_sparse_buffer_is_refused_by_its_name():
    """Bug: NotImplementedError, and a traceback."""
    with pytest.raises(
        ModelError, match="the buffer 'neighbours' is of layout sparse_coo"
    ) as error:
        bare(built(SparseTable))
    assert "hint: keep its indices and values as two buffers" in str(error.value)


class Loops(Net):
    def inside(self, hidden):
        def more(count, made):
            return count < 3

        def once(count, made):
            return count + 1, made.sin()

        given = torch.tensor(0), hidden
        return torch.ops.higher_order.while_loop(more, once, given, ())[1]  # here


REFUSED |= {Loops: "a loop inside the graph (while_loop and its like)"}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_no_graph_can_say_is_refused_with_its_line(kind):
    """Bugs: each of these was dropped; gradients were wrong up to 32 times, without a word."""
    model = built(kind)
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CaptureError) as error:
        trace_model(model, inputs, square)
    assert str(error.value).startswith(f"{__file__}:{line}: {REFUSED[kind]}")
    assert "\nhint: " in str(error.value), "and the smallest edit"
    if kind in (ReadsGradient, HookEachTime):
        with pytest.raises(CaptureError) as again:  # a rank replays; its file may have changed
            trace_model(built(kind), inputs, square, reads=())
        assert str(again.value) == str(error.value)


NEEDS_A_REGION = [TensorHook, InnerGradient, DataSet]


@pytest.mark.parametrize("kind", NEEDS_A_REGION, ids=lambda kind: kind.__name__)
def test_a_rank_refuses_what_its_plan_has_no_region_for(kind):
    """The plan was made of another version of the file; to plan again gives a region."""
    with pytest.raises(CaptureError, match="in(side| no graph)|no graph has it"):
        trace_model(built(kind), inputs, square, reads=())


class Weights(nn.Module):
    """A parameter, a buffer and a module under names that fx's own graphs of code have."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.full((8,), 1.5))
        self.register_buffer("meta", torch.full((8,), 0.5))
        self.graph = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, hidden):
        return self.graph(hidden * self.code) + self.meta


class WordsOfFx(Net):
    def begin(self):
        self.graph = nn.Sequential(Weights(), Weights())
        self.code = nn.Parameter(torch.full((8,), 0.5))

    def inside(self, hidden):
        return self.graph(hidden) * self.code


def test_names_that_graphs_of_code_have_themselves():
    """Bug: "Code has not been generated! Please report a bug to PyTorch"."""
    assert unlike(built(WordsOfFx)) == []
    assert unlike(built(WordsOfFx), cuts=["graph.1/mul/0"]) == []


class WordsOfPython(Net):
    """A parameter, a module and a buffer under names that are words of Python."""

    def begin(self):
        self.register_parameter("lambda", nn.Parameter(torch.full((8,), 1.5)))
        self.add_module("class", nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.register_buffer("is", torch.full((8,), 0.5))

    def inside(self, hidden):
        return self.get_submodule("class")(hidden * getattr(self, "lambda")) + getattr(self, "is")


def test_names_that_are_words_of_python():
    """Bug: stages read `self.lambda`, which is no Python."""
    assert unlike(built(WordsOfPython)) == []
    assert unlike(built(WordsOfPython), cuts=["relu/1"]) == []


class ThroughViews(Net):
    def inside(self, hidden):
        made = torch.zeros(hidden.shape[0], 2, 8)
        made[:, 0] = self.middle(hidden)
        made.view(-1, 16)[:, 8:] += hidden.sin()
        return made.sum(1)


def test_writes_through_views_of_a_new_tensor():
    assert unlike(built(ThroughViews)) == []


class WritesUnderNoGrad(Net):
    """Writes values in place under no_grad: what was computed before keeps its gradient, as if
    nothing had been written."""

    def inside(self, hidden):
        hidden = self.middle(hidden) + 0
        with torch.no_grad():
            self.write(hidden)
        return hidden + hidden.sin()


class Clamps(WritesUnderNoGrad):
    def write(self, hidden):
        hidden.clamp_(-0.1, 0.1)


class Masks(WritesUnderNoGrad):
    def write(self, hidden):
        hidden[hidden > 0.5] = 0.5


class ScalesAPart(WritesUnderNoGrad):
    def write(self, hidden):
        hidden[:, :2].mul_(3)


class Rounds(WritesUnderNoGrad):
    def write(self, hidden):
        hidden.copy_(hidden.round(decimals=1))


class ClampsInto(WritesUnderNoGrad):
    def write(self, hidden):
        torch.clamp(hidden, -0.1, 0.1, out=hidden)


class UsesWhatItWrote(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden) + 0
        with torch.no_grad():
            same = hidden.mul_(2).clamp_(-0.1, 0.1)
            with torch.enable_grad():
                more = self.middle(hidden)
        return same * more


UNDER_NO_GRAD = (Clamps, Masks, ScalesAPart, Rounds, ClampsInto, UsesWhatItWrote)


@pytest.mark.parametrize("kind", UNDER_NO_GRAD, ids=lambda kind: kind.__name__)
def test_a_write_under_no_grad_leaves_gradients_as_they_were(kind):
    """Bug: an op in place returns what it writes, and a trace gives later readers its result: they
    read one of an op under no_grad, and no gradient came back to what was written."""
    assert unlike(built(kind)) == []
    assert unlike(built(kind), cuts=["relu/1"]) == []


class ReshapesInPlace(Net):
    def inside(self, hidden):
        hidden = self.middle(hidden) + 0
        with torch.no_grad():
            hidden.unsqueeze_(0)
        return hidden.sum(0)


def test_another_shape_in_place_under_no_grad_is_refused():
    with pytest.raises(CaptureError, match="is given another shape in place, under torch.no_grad"):
        trace_model(built(ReshapesInPlace), inputs, square)


class Out(Net):
    """`out=` of a part of a new tensor, and of a buffer; nothing reads what the calls return."""

    def begin(self):
        self.register_buffer("average", torch.zeros(8))

    def inside(self, hidden):
        made = torch.zeros(hidden.shape[0], 2, 8)
        torch.mul(hidden.detach(), 2, out=made[:, 0])
        torch.add(0.9 * self.average, hidden.detach().mean(0), out=self.average)
        return self.middle(hidden) + made.sum(1) + self.average


def test_out_is_a_write_in_place():
    """Bug: only a first argument was taken for written: both calls were left out as unread."""
    assert unlike(built(Out)) == []
    assert unlike(built(Out), cuts=["relu/1"]) == []


def test_a_loss_with_a_parameter_is_refused():
    class Learnt(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, outputs, batch):
            return (self.scale * (outputs - batch["y"]) ** 2).mean()

    with pytest.raises(CaptureError, match="the loss has a parameter, 'scale', which is none of"):
        trace_model(built(Net), inputs, Learnt())


class Halved(Net):
    def inside(self, hidden):
        with torch.no_grad():
            self.middle.weight.mul_(0.5)
        return self.middle(hidden)


class HalvedData(Net):
    def inside(self, hidden):
        self.middle.weight.data.mul_(0.5)
        return self.middle(hidden)


class ClampedLate(Net):
    """In the first micro-batch the first product is of another weight than in the second."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.middle.weight.data.clamp_(-0.1, 0.1)
        return self.middle(hidden)


class ClampedTwice(Net):
    def inside(self, hidden):
        for most in (0.2, 0.1):
            self.middle.weight.data.clamp_(-most, most)
        return self.middle(hidden)


class ZeroesARow(Net):
    def inside(self, hidden):
        with torch.no_grad():
            self.middle.weight[0].zero_()
        return self.middle(hidden)


class Scaled(Net):
    def inside(self, hidden):
        return self.middle(hidden) * Outside.scale


class Grows(Averaged):
    def inside(self, hidden):
        self.average = torch.cat([self.average, self.average])
        return self.middle(hidden)


class FromOutside(OfAPart):
    def inside(self, hidden):
        hidden = self.head(hidden)
        self.head.calls = self.head.calls * 2
        return hidden


WRITES = "forward writes the parameter 'middle.weight', which the optimizer trains, in place"

OTHERS = {
    **dict.fromkeys((Halved, HalvedData, ClampedLate, ClampedTwice, ZeroesARow), WRITES),
    Scaled: "a tensor of shape (8,) that requires a gradient comes in here from outside",
    Grows: "the buffer 'average' is assigned a tensor torch.float32 of shape (16,), and was ",
    FromOutside: "the buffer 'head.calls' is assigned, and not in the forward of its own module",
}


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_what_a_graph_would_lose_is_refused_with_its_file(kind):
    """Bug: the halved weight had no gradient, as all that follows was computed without one."""
    model = built(kind)
    with pytest.raises(CaptureError) as error:
        trace_model(model, inputs, square)
    assert OTHERS[kind] in str(error.value)
    assert "odd_models.py:" in str(error.value) or __file__ in str(error.value)


def test_a_refusal_leaves_the_model_as_it_was():
    model = built(FromOutside)
    calls, hooks = model.head.calls, len(model.head._forward_hooks)
    with pytest.raises(CaptureError), warnings.catch_warnings():
        trace_model(model, inputs, square)
    assert model.head.calls is calls and model.head.calls == 0
    assert len(model.head._forward_hooks) == hooks


class Nested(Net):
    def inside(self, hidden):
        def outer(h):
            return checkpoint(self.middle, h.sin(), use_reentrant=False)

        return checkpoint(outer, self.middle(hidden), use_reentrant=False)


def test_a_checkpoint_in_another_one_keeps_gradients():
    """Bug: the trace had gradients switched off from the inner one on: no parameter had any."""
    assert unlike(built(Nested)) == []
    assert unlike(built(Nested), cuts=["relu/1"]) == []
