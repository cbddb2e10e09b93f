"""What a model keeps or moves by itself, beside a call of it that runs as it is."""

import torch
from torch import nn

from tests.support.odd_models import Net, built, regions_of, unlike


class ZeroPadded(Net):
    """As LoRA's merged projections have it: a mask that is made in the dtype of a weight."""

    def begin(self):
        self.part = nn.Parameter(torch.randn(6, 8))
        self.trained = self.middle.weight.new_zeros(8, dtype=torch.bool)
        self.trained[torch.tensor([0, 1, 2, 4, 5, 7])] = True
        self.scale = torch.full_like(self.middle.bias, 0.5)

    def inside(self, hidden):
        padded = hidden.new_zeros(8, 8)
        padded[self.trained] = self.part
        return hidden @ padded * self.scale


def test_a_call_reads_what_a_constructor_made_like_a_weight():
    """Bug: it had no values, as the weight, and the call failed in backward."""
    assert regions_of(ZeroPadded)
    assert unlike(built(ZeroPadded)) == []
