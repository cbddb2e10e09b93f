"""What no trace can look into runs as it is, in as small a call as can be, and is one op."""

import copy
import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from autopipe.frontend import batch as batches
from autopipe.frontend.construct import fake_copy
from autopipe.ir.dataflow import analyse, is_random
from autopipe.ir.fingerprint import fingerprint
from autopipe.ir.graph import BATCH, REGION_OP
from autopipe.ir.op_costs import costs
from autopipe.opaque.results import as_measured
from autopipe.stages.dry_run import rehearse
from autopipe.stages.saved_storages import SavedStorages
from autopipe.tracing.trace import trace
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    regions_of,
    square,
    traced,
    unlike_whole_or_cut,
)
from tests.support.staged import (
    differences,
    lowered,
    split,
    staged_step,
    trace_model,
)


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


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize(
    "kind",
    chosen(WORK, now=(SomeRows, Buffers)),
    ids=lambda kind: kind.__name__,
)
def test_it_computes_what_eager_computes(kind):
    """Loss, every gradient and every buffer of three micro-batches, in one stage and in two."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


CALLS = {
    SomeRows: ["inside()"],
    MarkedRows: [],  # torch.where says what it writes
    Nearest: [],
    Widened: ["unequal"],
    ModuleHook: ["middle"],
    CalledFromOutside: ["part", "part.rows"],
    Twice: ["half()", "half()#1"],
    Layers: [f"middle.{n}.chosen()" for n in range(3)],
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("kind", chosen(CALLS, now=(Twice,)), ids=lambda kind: kind.__name__)
def test_it_is_the_smallest_call_that_takes_and_gives_tensors_of_static_sizes(kind):
    assert regions_of(kind) == CALLS[kind]


def test_it_reads_the_experts_that_got_no_row_too():
    traced = trace_model(built(Experts), inputs, square)
    (region,) = traced.regions
    assert {name for name in region.states if name.startswith("experts")} == {
        f"experts.{n}.{leaf}" for n in range(6) for leaf in ("weight", "bias")
    }


def test_models_that_export_whole_have_none():
    assert regions_of(Net) == []


class Codes(nn.Module):
    """Nearest codes, which follow what is near them; the loss and usage stay in attributes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))
        self.seen = torch.zeros(4)

    def forward(self, hidden):
        near = torch.cdist(hidden.detach(), self.codes).argmin(1)
        one = nn.functional.one_hot(near, 4).to(hidden.dtype)
        found = self.codes[near]
        with torch.no_grad():
            self.codes.lerp_(one.T @ hidden / (one.sum(0)[:, None] + 1), 0.1)
        self.away, self.usage = (hidden - found).square().mean(), one.mean(0)
        return hidden + (found - hidden).detach()


class Quantized(Net):
    def begin(self):
        self.first, self.second = Codes(), Codes()

    def inside(self, hidden):
        hidden = self.second(self.middle(self.first(hidden)))
        return hidden + self.first.away + self.second.away + 0 * self.second.usage.sum()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Experts, Quantized])
def test_a_rank_traces_the_same_graph_from_the_record_alone(kind):
    """It has no weights then: `real` is None. Bug: what a trace had left in attributes, and plain
    tensors within one, could not be copied for a call all of whose states are written."""
    model = built(kind)
    traced = trace_model(model, inputs, square)
    batch = inputs(2)
    specs = batches.describe(batch, inputs(3), 2, 3)
    how = {"reads": traced.reads, "regions": traced.regions}
    again = trace(fake_copy(model), batch, specs, square, **how)
    assert fingerprint(again.graph) == fingerprint(traced.graph)


class ByItsLargest(Net):
    """What Python has read is kept for no gradient: two tanh's results go at once.

    Bug: the planned bytes had them.
    """

    def inside(self, hidden):
        hidden = self.middle(hidden)
        return hidden * min(float(hidden.tanh()[hidden > 0].tanh().sum()), 0.5)


@pytest.mark.parametrize(
    "kind",
    chosen(
        [SomeRows, InnerGradient, TensorHook, Apart, ByItsLargest], now=(SomeRows, ByItsLargest)
    ),
)
def test_bytes_kept_for_backward_are_those_that_were_measured(kind):
    """The dry run has no values. Where bytes depend on them it has the most of a few runs."""
    model = built(kind)
    traced = trace_model(model, inputs, square)
    graph, (stage,) = traced.graph, split(traced, ())
    predicted = rehearse(graph, [stage], (), 2).saved[0]
    (module,) = lowered(traced, model, (), 2)
    leaves = inputs(2)
    own = (*model.parameters(), *model.buffers(), *leaves.values(), *graph.constants.values())
    kept = SavedStorages(own)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        made = module.module(*(leaves[path] for path in stage.inputs))
    assert made[0].requires_grad, "what was kept for it is still there"
    found = kept.now
    assert found <= predicted if kind is SomeRows else found == predicted


class WrittenAfterwards(Net):
    """Bug: refused, for autograd took the loop's result without values for a view of another."""

    def forward(self, x):
        hidden = self.up(x)
        found = hidden.clone()
        found[hidden > 0] = hidden[hidden > 0].tanh()
        scale = hidden.sum(1) + 1
        while scale.abs().max() > 1:
            scale = scale * 0.5
        scale.view(scale.shape).mul_(0.8)
        return self.down(found * scale[:, None])


def test_a_result_may_be_written_through_a_view():
    regions = planned(built(WrittenAfterwards)).regions
    assert [region.results[0].shape for region in regions] == [("b", 8), ("b",)]


def test_its_operations_are_counted():
    """TensorHook multiplies b rows by an 8 x 8 matrix."""
    graph = trace_model(built(TensorHook), inputs, square).graph
    (position,) = [p for p, node in enumerate(graph.nodes) if node.op == REGION_OP]
    assert costs(graph)[position].forward_flops == 2 * 8 * 8 * BATCH


@dataclass
class Encoded:
    hidden: torch.Tensor
    mask: torch.Tensor | None = None


class Encoder(nn.Module):
    """Rows are padded to one length: the lines stand in the module's own forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden):
        chosen = [row[row > 0] for row in hidden]
        filled = torch.stack([nn.functional.pad(row, (0, 8 - len(row))) for row in chosen])
        return Encoded(self.layer(filled), torch.ones(len(hidden), 8, dtype=torch.bool))


class PassesAnObject(Net):
    """Reads a tensor that the encoder gives, as transformers' masks do."""

    def begin(self):
        self.middle = Encoder()

    def inside(self, hidden):
        encoded = self.middle(hidden)
        return encoded.hidden if encoded.mask.all() else encoded.hidden * encoded.mask


def test_a_part_may_give_an_object_of_fields():
    """Bug: encoders of transformers that give a BaseModelOutput could not run as they are.

    And a branch on what such a part gives was traced by numbers that were in fresh memory.
    """
    assert regions_of(PassesAnObject) == ["middle"]
    assert (
        unlike_whole_or_cut(built(PassesAnObject), traced=traced(PassesAnObject), cuts=["relu/1"])
        == []
    )


class GivesANumber(Net):
    """Cuts rows at the last place that any of them has, and says where."""

    def inside(self, hidden):
        hidden, count = self.cut(self.middle(hidden))
        return hidden * count

    def cut(self, hidden):
        chosen = hidden[hidden.sum(1) > -1e9]
        return hidden + chosen.sum(), int((hidden.abs() < 1e9).sum() > 0)


def test_a_number_that_is_another_one_than_planned_is_shown():
    """Bug: "gives [(2, 8)] in this micro-batch, and [(2, 8)] when it was planned"."""
    (region,) = trace_model(built(GivesANumber), inputs, square).regions
    assert region.method == "cut"
    with pytest.raises(ModelError, match="gives 0 beside its tensors .* and 1 when it was planned"):
        as_measured(region, (torch.zeros(2, 8), 0), [], 2)


class Noisy(Net):
    def inside(self, hidden):
        return torch.vmap(torch.sin)(self.noise(self.middle(hidden)))

    def noise(self, hidden):
        kept = hidden[torch.rand(len(hidden)) > 2]  # none
        return nn.functional.dropout(hidden, 0.5) + kept.sum()


def test_random_numbers_follow_the_seeds_of_the_run():
    """They are the same in any number of stages, and others in each micro-batch."""
    model = built(Noisy)
    traced = trace_model(model, inputs, square)
    assert [is_random(node) for node in traced.graph.nodes if node.op == REGION_OP] == [True]
    step = [
        staged_step(model, traced, inputs(6), cuts, 3, seeded=True) for cuts in ((), ["relu/1"])
    ]
    assert differences(*step) == []
    same = {key: tensor[:2].repeat(2, 1) for key, tensor in inputs(2).items()}
    losses = staged_step(model, traced, same, (), 2, seeded=True).losses
    assert not torch.equal(*losses)


def counted(rows):
    """Batches whose first two rows count four entries each, and the next two fewer."""
    counts = torch.tensor([4, 4, 3, 1, 2, 4, 1, 3]).repeat(8)[:rows]
    return {**inputs(rows), "counts": counts}


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, counts):
        hidden = self.up(x).relu()
        picked = hidden[torch.arange(8) < counts[:, None]]
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        means = [picked[a:b].mean() for a, b in itertools.pairwise(ends.tolist())]
        return self.down(hidden * torch.stack(means)[:, None])


def test_sizes_that_the_first_two_rows_have_alike_are_held_to_the_next_two():
    """Bug: the line that picks was a part by itself, as it gives eight entries for the rows that
    were looked at; a run ended at the first micro-batch of others."""
    plan = autopipe.plan(
        built(Bags), counted, loss=square, cluster=machine(2), batch_size=8, loss_over="micro-batch"
    )
    (region,) = plan.regions
    assert [result.shape for result in region.results] in ([("b", 4)], [("b",)], [("b", 8)])


class Sizes(Net):
    """Gives a tensor of other sizes from the third row on."""

    def inside(self, hidden):
        return self.odd(self.middle(hidden))[:, :8]

    def odd(self, hidden):
        made = hidden[hidden[:, 0] > -100]  # all of them
        return made if len(hidden) != 5 else torch.cat([made, made], 1)


def test_a_result_of_another_size_than_planned_is_an_error_of_that_micro_batch():
    model = built(Sizes)
    traced = trace_model(model, inputs, square)
    (module,) = lowered(traced, model, (), 5)
    leaves = inputs(5)
    line = Sizes.odd.__code__.co_firstlineno + 1
    said = rf"test_regions\.py:{line}: odd\(\), which runs as it is, gives .*when it was pl"
    with pytest.raises(ModelError, match=said):
        module.module(*(leaves[path] for path in split(traced, ())[0].inputs))


def test_two_models_with_calls_of_one_name_keep_apart():
    """Their graphs say the same; each runs the code that it was traced from."""

    class Other(Net):
        def inside(self, hidden):
            return torch.vmap(lambda row: 2 * (self.middle.weight @ row) + row.norm())(hidden)

    models = [built(Mapped), built(Other)]
    traces = [trace_model(model, inputs, square) for model in models]
    losses = [
        staged_step(copy.deepcopy(model), traced, inputs(2), (), 1).losses[0]
        for model, traced in zip(models, traces, strict=True)
    ]
    expected = [square(model(inputs(2)["x"]), inputs(2)) for model in models]
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert not torch.equal(*losses)


def test_it_is_not_run_again_in_another_stage_nor_in_backward():
    traced = trace_model(built(Mapped), inputs, square)
    (position,) = [p for p, node in enumerate(traced.graph.nodes) if node.op == REGION_OP]
    assert not analyse(traced.graph).local[position]


def test_a_loss_over_the_whole_batch_runs_it_twice():
    """Bug: the graph of the first pass had no regions, and planning ended in a KeyError."""

    def together(outputs, batch):
        return square(outputs, batch) + outputs.mean(0).square().sum()

    plan = planned(built(SomeRows), together, loss_over="batch", pp=2, micro_batches=2)
    assert plan.loss_over == "batch" and plan.regions
