"""Complex values carry gradients: rotary positions, spectral layers."""

import torch
from torch import nn

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import gradient_values
from autopipe.ir.graph import Ref
from autopipe.sharding.local_graph import shardable
from tests.support import simulated
from tests.support.odd_models import Net, built, inputs, square
from tests.support.staged import micro_batches, trace_model


class Turned(Net):
    """Turns pairs of numbers by trained angles, as complex numbers."""

    def begin(self):
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def inside(self, hidden):
        turned = torch.view_as_complex(self.middle(hidden).unflatten(-1, (4, 2))) * self.phase
        return torch.view_as_real(turned).flatten(-2)


def test_gradients_behind_complex_values_are_summed_over_ranks():
    """Bug: they were taken for values without a gradient, and what lies upstream was wrong."""
    model = built(Turned)
    trace = trace_model(model, inputs, square)
    carrying = gradient_values(trace.graph)
    made = [n for n in trace.graph.nodes if n.outputs[0] and n.outputs[0].dtype.is_complex]
    assert made and all(Ref(node.name) in carrying for node in made)

    (leaves,) = micro_batches(trace, inputs(2), 1)
    loss, expected = simulated.one_process(trace, model, leaves, 2)
    flow = shardable(trace.graph)
    whole = simulated.shard(flow, find_blocks(flow.graph), simulated.axis(2), 512, sequence=False)
    losses, gradients = simulated.step(trace, model, leaves, 2, whole)
    assert all(torch.allclose(loss, other) for other in losses)
    for name, gradient in expected.items():
        assert torch.allclose(gradients[name], gradient, rtol=1e-5, atol=1e-6), name
