"""What a region is planned with: bytes kept for backward, operations, random numbers."""

import pytest
import torch
from torch import nn

from autopipe.ir.dataflow import is_random
from autopipe.ir.graph import BATCH, REGION_OP
from autopipe.ir.op_costs import costs
from autopipe.stages.dry_run import rehearse
from autopipe.stages.saved_storages import SavedStorages
from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, square
from tests.support.region_models import Apart, InnerGradient, SomeRows, TensorHook
from tests.support.staged import differences, lowered, split, staged_step, trace_model


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


def test_its_operations_are_counted():
    """TensorHook multiplies b rows by an 8 x 8 matrix."""
    graph = trace_model(built(TensorHook), inputs, square).graph
    (position,) = [p for p, node in enumerate(graph.nodes) if node.op == REGION_OP]
    assert costs(graph)[position].forward_flops == 2 * 8 * 8 * BATCH


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
