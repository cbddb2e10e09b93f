"""`as_strided` counts elements in memory: a part of a graph that gets a tensor from elsewhere gets
them in the order of its dims."""

import pytest
import torch

from tests.support.long import sampled
from tests.support.odd_models import Net, built, inputs, refusal, square, unlike
from tests.support.staged import trace_model


class Windows(Net):
    """Windows of 4 that begin at every second element of 8, as Longformer makes its chunks."""

    offset = ()

    def inside(self, hidden):
        turned = self.middle(hidden).view(-1, 2, 4).transpose(1, 2).tanh()
        windows = turned.as_strided((len(hidden), 2, 4), (8, 2, 1), *self.offset)
        return windows.flatten(1)


class FromTheSecond(Windows):
    offset = (2,)


class OfAPart(Net):
    def inside(self, hidden):
        return self.middle(hidden)[:, ::2].as_strided(hidden.shape, (8, 1))


class TooFar(Net):
    def inside(self, hidden):
        return self.middle(hidden).as_strided((len(hidden), 8), (9, 1))


class InPlace(Net):
    def inside(self, hidden):
        return self.middle(hidden).clone().as_strided_((len(hidden), 8), (8, 1))


class Scattered(Net):
    """Bug: refused as an AttributeError, for the op takes its sizes from the third argument on."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        return torch.as_strided_scatter(hidden, hidden[:, :4], (len(hidden), 4), (8, 1))


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize("kind", [Windows, FromTheSecond])
@pytest.mark.parametrize("cut", ["permute/0", "contiguous/0", "as_strided/0"])
def test_a_stage_gets_the_elements_in_the_order_of_the_dims(kind, cut):
    """The zoo has what got them otherwise: conversions between tensor-parallel placements.

    Bug: with a part of the heads on each rank, a Longformer's gradients were off by 0.3 %.
    """
    assert unlike(built(kind), cuts=[cut]) == []


def test_what_lies_beside_a_tensor_is_refused():
    kinds = {
        OfAPart: "as_strided",
        TooFar: "as_strided",
        InPlace: "as_strided_",
        Scattered: "as_strided_scatter",
    }
    for kind, op in sampled([*kinds.items()], of=2):
        said = refusal(built(kind))
        assert f": {op}() reads or writes memory beside the tensor" in said and ".py:" in said


def test_nothing_is_copied_where_it_lies_as_it_did():
    graph = trace_model(built(Windows), inputs, square).graph
    made = {node.short: node for node in graph.nodes}
    assert made["permute"].args[1] == (0, 2, 1) and "slice" not in made
    with torch.no_grad():
        lies = torch.zeros(2, 2, 4).transpose(1, 2)
        assert lies.permute(0, 2, 1).contiguous().data_ptr() == lies.data_ptr()
