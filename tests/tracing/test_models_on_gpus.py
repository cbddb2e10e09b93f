"""Models that put their tensors on a GPU by its name: traced and checked where there may be none.

A rank puts them on its own device.
"""

import pytest
import torch

from tests.support.long import chosen
from tests.support.odd_models import MICRO_BATCHES, ROWS, Net, built, eager, inputs, square
from tests.support.staged import differences, staged_step, trace_model


class Named(Net):
    """Makes tensors on the GPU, and moves others there."""

    device = "cuda"

    def inside(self, hidden):
        at = torch.arange(8, device=self.device) * 0.1
        kept = torch.ones(8).to(f"{self.device}:0") + torch.zeros(8).to(torch.device(self.device))
        kept = kept.cuda() if self.device == "cuda" else kept
        return self.middle(hidden + at) * kept.to(torch.device(self.device, 0), torch.float32)


class Within(Net):
    """Makes tensors under a default device, and reads entries by several indices."""

    device = "cuda"

    def inside(self, hidden):
        with torch.device(self.device):
            hidden = hidden * torch.linspace(0, 1, hidden.shape[-1])
        rows = torch.arange(hidden.shape[0])
        return self.middle(hidden) + hidden[rows, rows * 0][:, None]


class AsItIs(Net):
    """Sorts with numpy, which no graph can: a region, whose own code runs."""

    device = "cuda"

    def inside(self, hidden):
        order = torch.from_numpy(hidden.detach().cpu().numpy().argsort(1)).to(self.device)
        return self.middle(hidden).gather(1, order)


@pytest.mark.parametrize(
    "kind",
    chosen([Named, Within, AsItIs], now=(Named, Within)),
)
def test_a_forward_that_names_a_gpu_is_traced_on_a_cpu(kind):
    """Bug: planning for GPUs on a host without one ended in "Torch not compiled with CUDA"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trace = trace_model(built(kind), inputs, square)
        batch = inputs(ROWS * MICRO_BATCHES)
        found = staged_step(built(kind), trace, batch, (), MICRO_BATCHES)
        expected = eager(built(type("OnCPU", (kind,), {"device": "cpu"})))
    assert differences(found, expected, tolerance=1e-5) == []
