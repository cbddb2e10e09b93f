"""What a rehearsal on tensors without memory says, beside what real tensors do."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.blocks import find_blocks
from autopipe.dataflow import analyse
from autopipe.graph import Ref
from autopipe.partition import legal_cuts
from autopipe.rehearsal import dense_strides, keeping, rehearse
from tests.inprocess import traced
from tests.staged import lowered, micro_batches, one_micro_batch, split, trace_model
from tests.zoo import ZOO

ROWS = 3


class Observed:
    """A real micro-batch through real stages: bytes kept by each, and every crossing tensor."""

    def __init__(self, found, model, cuts, batch):
        self.modules = lowered(found, model, cuts, ROWS)
        self.leaves = micro_batches(found, batch, 1)[0]
        self.saved, self.strides, self.gradients = [], {}, {}
        one_micro_batch(self.modules, self.leaves, 1.0, self.watch)

    def watch(self, stage, module, arrived, inputs):
        states = [*module.parameters(), *module.buffers()]
        with keeping(not_owned_by=(*states, *arrived, *inputs)) as kept:
            results = module(*arrived, *inputs)
        self.saved.append(sum(kept.values()))
        for ref, tensor in zip(stage.outgoing, results, strict=False):
            self.strides[ref] = dense_strides(tensor)
        for (ref, _), tensor in zip(stage.receives, arrived, strict=True):
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(
                    lambda leaf, ref=ref: self.gradients.update(
                        {(ref, stage.index): dense_strides(leaf.grad)}
                    )
                )
        return results


def rehearsed(found, cuts):
    return rehearse(found.graph, split(found, cuts), find_blocks(found.graph), ROWS)


def that_matter(strides, shapes):
    """The strides of dims with more than one entry; what the others have is anybody's choice."""
    return {
        key: [stride for stride, size in zip(found, shapes[key], strict=True) if size > 1]
        for key, found in strides.items()
    }


def gradient_strides(rehearsal):
    return {
        (ref, taker): strides
        for ref, boundary in rehearsal.boundaries.items()
        for taker, strides in boundary.gradients.items()
    }


@pytest.mark.parametrize(
    "name", ["gpt", "gpt2", "llama", "unet", "dropout", "t5", "lstm", "resnet"]
)
def test_bytes_and_layouts_are_those_of_real_tensors(name):
    case, found = ZOO[name], traced(name)[0]
    legal, chance = legal_cuts(analyse(found.graph)), random.Random(name)
    for stages in (1, 2, 4):
        cuts = sorted(chance.sample(legal, stages - 1))
        rehearsal = rehearsed(found, cuts)
        real = Observed(found, case.model(), cuts, case.inputs(ROWS))
        assert list(rehearsal.saved) == real.saved, cuts
        shapes = {ref: boundary.shape for ref, boundary in rehearsal.boundaries.items()}
        strides = {ref: boundary.strides for ref, boundary in rehearsal.boundaries.items()}
        assert that_matter(strides, shapes) == that_matter(real.strides, shapes), cuts
        backward = {key: shapes[key[0]] for key in real.gradients}
        predicted = gradient_strides(rehearsal)
        assert that_matter(predicted, backward) == that_matter(real.gradients, backward), cuts
    assert sum(rehearsal.saved) > 0


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x):
        return self.run(self, x).mean()


def found_of(run):
    return trace_model(Model(run), lambda b: {"x": torch.ones(b, 4)})


def test_the_bytes_of_a_stage_worked_by_hand():
    """tanh keeps its result for backward, the linear keeps it too: one storage, counted once.

    tanh(first(x))    [3, 4] fp32               48
    x                 belongs to the batch       0
    second(..)        nothing: mean of a linear  0
    """
    found = found_of(lambda m, x: m.second(torch.tanh(m.first(x))))
    assert rehearsed(found, []).saved == (3 * 4 * 4,)
    # The same storage, received: stage 1 has not made it and does not count it.
    assert rehearsed(found, ["second/linear/0"]).saved == (48, 0)


def test_a_transposed_tensor_crosses_in_its_own_layout_and_a_gappy_one_dense():
    def transposed(m, x):
        return m.second(m.first(x).t().contiguous().t())

    def gappy(m, x):
        return F.pad(m.first(x)[:, :2].relu()[:, :1], (0, 3)) * x

    found = found_of(transposed)
    cut = rehearsed(found, ["second/linear/0"]).boundaries[Ref("t/1")]
    assert (cut.shape, cut.strides, cut.bytes) == ((3, 4), (1, 3), 48)
    assert cut.gradients == {1: (1, 3)}, "autograd gives a leaf's gradient the leaf's layout"
    found = found_of(gappy)
    cut = rehearsed(found, ["pad/0"]).boundaries[Ref("slice/1")]
    assert (cut.shape, cut.strides) == ((3, 1), (1, 1))


def test_integers_and_what_needs_no_gradient_send_none_back():
    def run(m, x):
        y = m.first(x)
        with torch.no_grad():
            frozen = m.second(x)
        return y.gather(1, y.argsort(1)) + frozen

    boundaries = rehearsed(found_of(run), ["gather/0"]).boundaries
    assert {str(ref): dict(b.gradients) for ref, b in boundaries.items()} == {
        "first/linear/0": {1: (4, 1)},
        "argsort/0": {},
        "second/linear/0": {},
    }


def test_what_crosses_only_to_be_detached_sends_no_gradient_back():
    """Regression: zeros came back, and a parameter had a gradient of zeros instead of none: weight
    decay would have moved it."""

    def run(m, x):
        return m.second(x) * m.first(x).exp().detach()

    found = found_of(run)
    at_detach = rehearsed(found, ["detach/0"])
    assert {str(r): dict(b.gradients) for r, b in at_detach.boundaries.items()} == {
        "second/linear/0": {1: (4, 1)},
        "exp/0": {},
    }


def test_evaluation_keeps_nothing_and_returns_nothing():
    case = ZOO["gpt"]
    found = trace_model(case.model(), case.inputs, case.loss, training=False)
    stages = split(found, ["blocks.2.norm1/layer_norm/0"])
    rehearsal = rehearse(found.graph, stages, find_blocks(found.graph), 2, gradients=False)
    assert rehearsal.saved == (0, 0)
    assert [dict(b.gradients) for b in rehearsal.boundaries.values()] == [{}]


def test_a_storage_that_two_nodes_keep_is_kept_once_and_anothers_not_at_all():
    mine, weight = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    with keeping(not_owned_by=[weight]) as kept:
        x = mine * 2
        ((x * weight) + x.view(2, 4).reshape(8) * weight).sum()
    assert list(kept.values()) == [8 * 4]
