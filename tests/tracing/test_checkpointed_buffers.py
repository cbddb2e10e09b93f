"""A checkpoint of the user's that writes buffers: eager writes them twice, a plan once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopipe.errors import CaptureError
from tests.support.odd_models import Net, built, inputs, planned, square, unlike
from tests.support.staged import trace_model


class NormInside(Net):
    """As DenseNet has it where it is to save memory."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        return checkpoint(lambda h: self.norm(self.middle(h)), hidden, use_reentrant=False)


def test_statistics_of_a_norm_in_a_checkpoint_move_once():
    """Bug: a small model was refused, with a hint that led nowhere; of a large one nobody said."""
    planned(built(NormInside), said=(said := []))
    told = "the checkpoint writes norm.running_mean twice in one process, and once in a plan"
    assert [line for line in said if line.endswith(told)]
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert unlike(built(NormInside)) == [f"norm.{name}" for name in statistics]


class CountInside(Net):
    def begin(self):
        self.register_buffer("calls", torch.zeros(()))

    def inside(self, hidden):
        def run(h):
            self.calls.add_(1)
            return self.middle(h).tanh()

        return checkpoint(run, hidden, use_reentrant=False) / (1 + self.calls)


def test_a_buffer_that_a_checkpoint_writes_may_not_reach_the_loss():
    """Bug: a large model counted half of its calls."""
    with pytest.raises(CaptureError, match="a checkpoint writes the buffer 'calls'; torch runs it"):
        trace_model(built(CountInside), inputs, square)
