"""`torch.cond` on values is one op of the graph; it runs the side that each micro-batch takes."""

import inspect

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from autopipe.ir.fingerprint import fingerprint
from autopipe.ir.opaque_ops import COND_OP
from autopipe.stages.dry_run import rehearse
from autopipe.stages.saved_storages import SavedStorages
from tests.support.long import chosen
from tests.support.odd_models import (
    MICRO_BATCHES,
    ROWS,
    Net,
    built,
    inputs,
    square,
    unlike_whole_or_cut,
)
from tests.support.staged import lowered, split, staged_step, trace_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.cond


def apart(hidden):
    """Whether a micro-batch is one of those that go the first way: of the first three, two are."""
    return hidden.sum() > 2.4


class OfTheModel(Net):
    """In the model's own forward: reads two layers, a tensor of the code around, and sizes."""

    def begin(self):
        self.other = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        around = hidden * 2
        made = torch.cond(
            apart(hidden),
            lambda h: self.middle(h).sin() + around,
            lambda h: (self.other(h) + self.middle.bias).cos().view(h.shape[0], -1),
            (hidden,),
        )
        return self.down(made)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + torch.cond(hidden.mean() > 0.15, self.left, self.right, (hidden,))

    def left(self, hidden):
        return self.second(self.first(hidden).relu())

    def right(self, hidden):
        return self.first(hidden).tanh()


class InEachBlock(Net):
    def begin(self):
        self.middle = nn.Sequential(*(Block() for _ in range(2)))


class Trees(Net):
    """Takes and gives dicts; of some results no gradient goes back on one side."""

    def inside(self, hidden):
        def first(given):
            signs = given["h"].sign()
            return {"made": given["h"] * 2, "rest": (signs, signs.detach() * 3)}

        def second(given):
            ones = torch.ones_like(given["h"])
            return {"made": self.middle(given["h"]), "rest": (ones, ones.cos())}

        made = torch.cond(apart(hidden), first, second, ({"h": hidden},))
        return made["made"] * made["rest"][0] + made["rest"][1]


class OnASize(Net):
    """It is Python's `if` then, and no op."""

    def inside(self, hidden):
        hidden = torch.cond(hidden.shape[-1] > 4, self.middle, torch.sin, (hidden,))
        return torch.cond(True, torch.sin, torch.cos, (hidden,))


class InAPartThatRunsAsItIs(Net):
    def inside(self, hidden):
        made = torch.zeros_like(hidden)
        made[hidden[:, 0] > 0.1] = 1.0
        chosen = hidden[hidden[:, 0] > 0.1].sum()
        return made + torch.cond(chosen > 1, self.middle, torch.sin, (hidden,))


class ByNames(Net):
    def inside(self, hidden):
        return torch.cond(
            pred=apart(hidden), true_fn=self.middle, false_fn=torch.sin, operands=(hidden,)
        )


class WithoutOperands(Net):
    def inside(self, hidden):
        return torch.cond(apart(hidden), lambda: self.middle(hidden), lambda: hidden.sin())


class InPairs(Net):
    """Two calls that differ in a size alone, and two in the order of what they give."""

    def inside(self, hidden):
        either = apart(hidden)
        hidden = torch.cond(either, torch.sin, lambda h: h / h.shape[0], (hidden,))
        hidden = torch.cond(either, torch.sin, lambda h: h / (3 * h.shape[0]), (hidden,))
        first, second = torch.cond(either, self.both, self.both, (hidden,))
        third, fourth = torch.cond(either, self.swapped, self.swapped, (hidden,))
        return first + 2 * second + 3 * third + 4 * fourth

    def both(self, hidden):
        return hidden.sin(), hidden.cos()

    def swapped(self, hidden):
        return self.both(hidden)[::-1]


WORK = [OfTheModel, InEachBlock, Trees, OnASize, InAPartThatRunsAsItIs, ByNames, WithoutOperands]
WORK += [InPairs]


@pytest.mark.parametrize(
    "kind",
    chosen(WORK, now=(Trees,)),
    ids=lambda kind: kind.__name__,
)
def test_it_computes_what_eager_computes(kind):
    """Loss, every gradient and every buffer of three micro-batches, in one stage and in two."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/0"]) == []


def test_micro_batches_go_different_ways():
    model, batch = built(OfTheModel), inputs(ROWS * MICRO_BATCHES)
    chunks = model.up(batch["x"]).relu().split(ROWS)
    assert [bool(apart(chunk)) for chunk in chunks] == [True, False, True]


def test_gradients_are_those_of_torchs_own_in_every_bit():
    """What only the other side reads has a gradient of zeros, as of torch.cond itself."""
    model = built(OfTheModel)
    trace = trace_model(model, inputs, square)
    rows = inputs(ROWS)
    found = staged_step(model, trace, rows, (), 1)
    square(model(rows["x"]), rows).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad), name
    assert not found.gradients["other.weight"].any()


def test_it_reads_what_either_side_reads_and_no_more():
    graph = trace_model(built(OfTheModel), inputs, square).graph
    (node,) = (node for node in graph.nodes if node.op == COND_OP)
    assert " ".join(map(str, node.values())) == (
        "gt/0 relu/0 [middle.weight] [middle.bias] mul/0 [other.weight] [other.bias]"
    )


def test_each_call_has_a_text_of_its_own():
    """Bug: of two that called the same in torch, the second ran in the place of the first."""
    graph = trace_model(built(InPairs), inputs, square).graph
    texts = [node.args[-1] for node in graph.nodes if node.op == COND_OP]
    assert len({*texts}) == len(texts) == 4


def test_a_rank_traces_the_same_graph():
    model = built(InEachBlock)
    first = trace_model(model, inputs, square)
    again = trace_model(model, inputs, square, reads=first.reads)
    assert fingerprint(first.graph) == fingerprint(again.graph)


def test_bytes_kept_for_backward_are_what_it_is_given():
    model = built(OfTheModel)
    traced = trace_model(model, inputs, square)
    graph, (stage,) = traced.graph, split(traced, ())
    (module,) = lowered(traced, model, (), 2)
    leaves = inputs(2)
    own = (*model.parameters(), *leaves.values(), *graph.constants.values())
    kept = SavedStorages(own)
    with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
        made = module.module(*(leaves[path] for path in stage.inputs))
    assert made[0].requires_grad and kept.now == rehearse(graph, [stage], (), 2).saved[0]


def test_its_backward_computes_as_its_forward_did_under_autocast():
    """Bug: the side that runs again in backward got bf16 and weights of fp32."""
    model, alike = built(InEachBlock), built(InEachBlock)
    traced = trace_model(model, inputs, square)
    (module,) = lowered(traced, model, (), 2)
    (stage,), leaves = split(traced, ()), inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        (loss, *_) = module.module(*(leaves[path] for path in stage.inputs))
        expected = square(alike(leaves["x"]), leaves)
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for own, other in zip(model.parameters(), alike.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


# What is refused, each with the line marked `# here`.


class Draws(Net):
    def inside(self, hidden):
        return torch.cond(apart(hidden), lambda h: h + torch.rand(8), torch.cos, (hidden,))  # here


class Writes(Net):
    def inside(self, hidden):
        return torch.cond(apart(hidden), lambda h: h.mul_(2), torch.cos, (hidden,))  # here


class Within(Net):
    def inside(self, hidden):
        def first(h):
            return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))  # here

        return torch.cond(apart(hidden), first, torch.cos, (hidden,))


class OtherShape(Net):
    def inside(self, hidden):
        return torch.cond(apart(hidden), torch.sum, torch.cos, (hidden,))  # here


class Looks(Net):
    def inside(self, hidden):
        def first(h):
            return h * h.sum().item()  # here

        return torch.cond(apart(hidden), first, torch.cos, (hidden,))


REFUSED = {
    Draws: "one of its functions draws random numbers",
    Writes: "one of its functions writes a tensor in place",
    Within: "one of its functions calls torch.cond",
    OtherShape: "its two functions give tensors of other shapes or dtypes",
    Looks: "one of its functions calls item",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_one_op_cannot_do_is_refused_with_its_line(kind):
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CaptureError) as error:
        trace_model(built(kind), inputs, square)
    at = f"{__file__}:{line}: torch.cond cannot be one op of a graph: "
    assert str(error.value).startswith(at + REFUSED[kind])
    assert "\nhint: compute both sides and choose by torch.where" in str(error.value)
