"""What a call that runs as it is finds before it, leaves behind, and has in backward."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from tests.support.long import chosen
from tests.support.odd_models import (
    MICRO_BATCHES,
    ROWS,
    Net,
    built,
    eager,
    inputs,
    regions_of,
    square,
    traced,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import (
    Step,
    differences,
    lowered,
    micro_batches,
    trace_model,
)


class InTheModelItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return torch.vmap(torch.sin)(self.layer(x))  # here


class Leaves(Net):
    """The size of what `choose` gives depends on values, and so does everything around it."""

    def inside(self, hidden):
        self.middle(hidden)
        return self.choose(hidden)

    def choose(self, hidden):
        return hidden[hidden[:, 0] > 0.1].sum(0) + hidden


class SideChannel(Net):
    """One call leaves a tensor in an attribute for the next."""

    def inside(self, hidden):
        made = self.first(hidden)
        return made + self.left

    def first(self, hidden):
        self.left = self.middle(hidden)
        return torch.vmap(torch.sin)(hidden)


class LeavesASum(Net):
    """A mixture that leaves a loss of its own, which the model's loss reads."""

    def inside(self, hidden):
        return self.route(self.middle(hidden))

    def route(self, hidden):
        self.left = hidden[hidden[:, 0] > 0.1].sum()
        return hidden


class IsGivenAside(Net):
    """A call reads a tensor that other code has left in an attribute for it."""

    def inside(self, hidden):
        self.left = self.middle(hidden)
        return self.second(hidden)

    def second(self, hidden):
        return torch.vmap(torch.sin)(hidden) + self.left


def test_what_a_call_leaves_in_an_attribute_is_a_result_of_it_where_others_read_it():
    assert regions_of(SideChannel) == ["first()"]
    assert (
        unlike_whole_or_cut(built(SideChannel), traced=traced(SideChannel), cuts=["relu/1"]) == []
    )


def test_a_loss_reads_it_too():
    """Bug: it was refused, as a tensor that is read by other code."""
    model = built(LeavesASum)

    def loss(outputs, batch):
        return square(outputs, batch) + 0.1 * model.left

    trace = trace_model(model, inputs, loss)
    assert unlike(model, loss, traced=trace) == []
    assert trace.regions[0].left == ("left",)


def test_what_crosses_otherwise_than_as_a_tensor_widens_the_call():
    assert regions_of(IsGivenAside) == ["inside()"]


def test_a_gradient_in_the_models_own_forward_is_a_line_that_runs_as_it_is():
    """Bug: it was refused; then all of the model ran as it is, and no pipeline could cut it.
    Physics-informed models and those of forces take gradients there."""
    model = built(InTheModelItself)
    trace = trace_model(model, inputs, square)
    assert [region.name for region in trace.regions] == ["forward_lines_2_to_2()"]
    assert unlike(model, traced=trace) == []


class Again(torch.autograd.Function):
    """A checkpoint as diffusion models have it: backward runs a method once more."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(made, (x, *ctx.parameters), gradient, allow_unused=True)


class Checkpointed(Net):
    def inside(self, hidden):
        return Again.apply(self.normed, hidden, *self.middle.parameters())

    def normed(self, hidden):
        return hidden + self.middle(hidden).tanh()


class Normed(nn.Linear):
    """Its backward hook reads what forward has left in it."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_full_backward_hook(lambda own, given, _: (given[0] * own.scale,))

    def forward(self, x):
        self.scale = x.detach().abs().mean()
        return super().forward(x)


class HookReadsWhatIsLeft(Net):
    def begin(self):
        self.middle = Normed()


@dataclass
class Form:
    scale: int


class Moody(nn.Module):
    """Computes by what stands in its attributes."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.mood, self.size = None, (0, 0)
        self.form = Form(1)

    def forward(self, hidden):
        rows = (hidden[:, 0] > -100).nonzero().flatten()
        made = self.norm(self.layer(hidden[rows]))
        made = made.tanh() if self.mood == "calm" else made
        return hidden.index_copy(0, rows, made * self.size[0] / self.form.scale)


class SetsAttributes(Net):
    def begin(self):
        self.part = Moody()

    def inside(self, hidden):
        self.part.mood, self.part.size, self.part.form = "calm", (2, 3), Form(3)
        hidden = self.part(hidden)
        self.part.mood, self.part.size = None, (3, 2)
        return self.part(hidden)


class Evaluates(Net):
    def begin(self):
        self.part = Moody()
        self.part.size = 1, 1

    def inside(self, hidden):
        made = self.part(hidden)
        self.part.eval()
        made = made + self.part(hidden)
        self.part.train()
        return made


@pytest.mark.parametrize("kind", chosen([SetsAttributes, Evaluates], now=(SetsAttributes,)))
def test_a_call_finds_what_forward_has_set_before_it(kind):
    """Bug: each had what the first model had, and running statistics were no written buffers."""
    first, second = traced(kind).regions
    assert first.finds != second.finds
    assert unlike_whole_or_cut(built(kind), traced=traced(kind), cuts=["relu/1"]) == []


class InTurn(Net):
    """A buffer says which head runs; while it is measured, the first one."""

    def begin(self):
        self.register_buffer("turn", torch.tensor(0))
        self.head0, self.head1, self.head2 = (nn.Linear(8, 8) for _ in range(3))

    def inside(self, hidden):
        hidden = getattr(self, f"head{self.turn.item()}")(hidden)
        self.turn.add_(1).remainder_(3)
        return torch.vmap(torch.sin)(hidden)


def test_a_method_may_look_its_modules_up_by_name():
    """Bug: a traceback; only what had been read while it was measured had values."""
    assert unlike_whole_or_cut(built(InTurn), cuts=["relu/1"]) == []


class ThroughAList(InTurn):
    def begin(self):
        super().begin()
        self.heads = [self.head0, self.head1, self.head2]

    def inside(self, hidden):
        hidden = self.heads[self.turn.item()](hidden)
        self.turn.add_(1).remainder_(3)
        return torch.vmap(torch.sin)(hidden)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_it_reads_first_in_a_later_micro_batch_is_an_error():
    with pytest.raises(ModelError, match="reads parameters in this micro-batch that it has not"):
        unlike(built(ThroughAList))


class SetsAnother(Net):
    """Another value with each number of rows."""

    def begin(self):
        self.part = Moody()

    def inside(self, hidden):
        self.part.size = 1 / len(hidden), 0
        return self.part(hidden)


def test_what_differs_from_one_micro_batch_to_the_next_widens_the_call():
    assert regions_of(SetsAnother) == ["inside()"]


class NormedTwice(Net):
    """A batch norm in the part that runs as it is, and in the graph: a critic with a penalty."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        return self.norm(self.middle(hidden)) + self.slope(hidden)

    def slope(self, hidden):
        made = self.norm(hidden).tanh()
        (slope,) = torch.autograd.grad(made.square().sum(), hidden, create_graph=True)
        return slope


class Numbered(Net):
    """Counts in Python, for a log."""

    def begin(self):
        self.part = Numbers()

    def inside(self, hidden):
        return self.part(hidden)


class Numbers(nn.Module):
    seen = []

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, hidden):
        self.calls += 1
        self.seen.append(self.calls)
        return hidden + torch.vmap(torch.sin)(self.layer(hidden))


def test_a_backward_does_not_take_a_count_back():
    """F0 F1 B0 F2 ... Bug: a forward counted on from where the last backward had been."""
    model = built(Numbered)
    trace = trace_model(model, inputs, square)
    (only,) = lowered(trace, model, (), ROWS)
    parts = micro_batches(trace, inputs(ROWS * 5), 5)
    Numbers.seen.clear()
    earlier = None
    for leaves in parts:
        loss = only.module(*(leaves[path] for path in only.stage.inputs))[0]
        if earlier is not None:
            earlier.backward()
        earlier = loss
    assert Numbers.seen == [1, 2, 3, 4, 5]


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", [Checkpointed, HookReadsWhatIsLeft, NormedTwice])
def test_backward_finds_what_its_own_forward_had(kind):
    """All forwards first. Bug: the tensors of the last micro-batch stood in the module, those that
    a checkpoint was given were others, and their gradients were none."""
    model = built(kind)
    trace = trace_model(model, inputs, square)
    assert trace.regions
    own, losses = copy.deepcopy(model), []
    for leaves in micro_batches(trace, inputs(ROWS * MICRO_BATCHES), MICRO_BATCHES):
        if not losses:
            (only,) = lowered(trace, own, (), ROWS)
        losses.append(only.module(*(leaves[path] for path in only.stage.inputs))[0])
    for loss in losses:
        (loss / MICRO_BATCHES).backward()
    assert differences(Step.of(losses, own), eager(model), tolerance=1e-6) == []


class OfTheBatch(nn.Module):
    """Has no parameters, and is given none of what depends on them."""

    def forward(self, x):
        return x[x[:, 0] > -9].mean(0)


class ReadsTheBatchAlone(Net):
    def begin(self):
        self.part = OfTheBatch()

    def forward(self, x):
        return super().forward(x + self.part(x))


def test_a_call_that_reads_the_batch_alone():
    """Bug: its tensors had values where the rest had none, and the call stood in for itself."""
    (region,) = traced(ReadsTheBatchAlone).regions
    assert region.module == "part"
    assert unlike(built(ReadsTheBatchAlone), traced=traced(ReadsTheBatchAlone)) == []
