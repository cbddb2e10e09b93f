"""Calls that compute with sparse tensors run as they are; the tensors stay within the model."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from autopipe.ir.graph import REGION_OP
from autopipe.ir.tensors import bytes_of
from autopipe.opaque.calls import sparse
from autopipe.opaque.calls.trees import Own, from_text, parts_of, to_text, whole_of
from tests.support.inprocess import machine
from tests.support.odd_models import Net, built, inputs, planned, square, traced, unlike
from tests.support.staged import trace_model

RING = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])


def ring():
    """Each of eight nodes has one neighbour."""
    return torch.sparse_coo_tensor(RING, torch.arange(8.0), (8, 8)).coalesce()


class Made(Net):
    """In forward, of a trained value for each edge."""

    def begin(self):
        self.register_buffer("edges", RING)
        self.strength = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def inside(self, hidden):
        adjacency = torch.sparse_coo_tensor(self.edges, self.strength, (8, 8))
        return self.middle(torch.sparse.mm(adjacency, hidden.t()).t())


class OfABuffer(Net):
    def begin(self):
        self.register_buffer("adjacency", ring(), persistent=False)

    def inside(self, hidden):
        return self.middle(torch.sparse.mm(self.adjacency, hidden.t()).t())


class OfAnAttribute(Net):
    def begin(self):
        self.adjacency = ring()

    def inside(self, hidden):
        return self.middle((self.adjacency @ hidden.t()).t())


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden, adjacency):
        return torch.sparse.mm(adjacency, self.layer(hidden).t()).t()


class Given(Net):
    """As graph networks have it: each layer is given the adjacency of the model."""

    def begin(self):
        self.register_buffer("adjacency", ring(), persistent=False)
        self.first, self.second = Conv(), Conv()

    def forward(self, x):
        hidden = self.first(self.up(x), self.adjacency).relu()
        return self.down(self.second(hidden, self.adjacency))


class Between(Net):
    def inside(self, hidden):
        return self.middle(hidden.relu().to_sparse().to_dense())


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize("kind", [Made, OfABuffer, OfAnAttribute, Given, Between])
def test_a_call_that_computes_with_sparse_tensors_runs_as_it_is(kind):
    """Bug: "the model raises NotImplementedError: Cannot access storage of SparseTensorImpl"."""
    said = []
    planned(built(kind), said=said)
    assert any("runs as it is" in line and "of layout sparse_coo" in line for line in said)
    assert unlike(built(kind), cuts=["down/linear/0"]) == []


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_so_it_is_with_other_layouts(layout):
    def model():
        found = OfABuffer()
        found.adjacency = getattr(found.adjacency, f"to_sparse_{layout}")()
        return found

    planned(model)
    planned(built(model))


def test_each_layer_of_a_graph_network_is_a_part_of_its_own():
    """Bug: a sparse argument would have made one part of the whole model, which is not split."""
    graph = trace_model(built(Given), inputs, square).graph
    parts = [graph.regions[str(n.args[-1])].region for n in graph.nodes if n.op == REGION_OP]
    assert [part.module for part in parts] == ["first", "second"]
    assert all('{"own": "adjacency"}' in part.given for part in parts)
    assert not any("adjacency" in part.states for part in parts), "nobody sends or splits it"


def test_a_sparse_tensor_is_told_by_its_name_in_the_model():
    model = built(OfABuffer)
    told = to_text(parts_of([model.adjacency, 2.0], [], sparse.owned(model)))
    assert from_text(told) == [Own("adjacency"), 2.0]
    assert whole_of(from_text(told), [], model)[0] is model.adjacency


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_bytes_of_a_sparse_tensor_worked_by_hand(layout):
    """Eight values of 4 bytes; coordinates 2 x 8 of 8 bytes, or 9 bounds and 8 places."""
    tensor = ring() if layout == "coo" else getattr(ring(), f"to_sparse_{layout}")()
    assert bytes_of(tensor) == 8 * 4 + (2 * 8 if layout == "coo" else 9 + 8) * 8


class Saved(Net):
    def begin(self):
        self.register_buffer("adjacency", ring())


def test_a_sparse_buffer_of_a_checkpoint_is_refused_with_the_edit():
    with pytest.raises(ModelError) as error:
        planned(built(Saved))
    assert str(error.value) == (
        "the buffer 'adjacency' is of layout sparse_coo, and checkpoints have dense tensors alone\n"
        "hint: keep it out of them: register_buffer('adjacency', ..., persistent=False)"
    )


def test_a_sparse_batch_is_refused_with_the_edit():
    """Bug: "one dim must grow in proportion to the rows and the others stay"."""

    def sparse_rows(rows):
        return {**inputs(rows), "adjacency": torch.eye(rows).to_sparse()}

    with pytest.raises(ModelError, match=r"inputs\(\d\)\['adjacency'\] is of layout sparse_coo"):
        autopipe.plan(built(Net), sparse_rows, loss=square, cluster=machine(2))


class Handed(Net):
    """The model's own code makes a sparse tensor and hands it on."""

    def begin(self):
        self.conv = Conv()

    def forward(self, x):
        return self.down(self.conv(self.up(x), torch.eye(8).to_sparse()))


def test_lines_of_the_models_own_forward_that_make_a_sparse_tensor_run_as_they_are():
    """They were refused, with the hint to move them to a method."""
    (region,) = traced(Handed).regions
    assert region.method.startswith("forward_line")
    assert unlike(built(Handed), traced=traced(Handed)) == []


class Jagged(Net):
    """Rows of unequal length as one nested tensor, in a method's own lines."""

    def inside(self, hidden):
        lengths = 1 + (hidden.sum(1) > 0).long() * 3
        picked = hidden.view(len(hidden), 4, 2)[torch.arange(4) < lengths[:, None]]
        ends = nn.functional.pad(lengths.cumsum(0), (1, 0))
        nested = torch.nested.nested_tensor_from_jagged(picked.repeat(1, 4), ends)
        made = self.middle(nested).relu()
        return made.to_padded_tensor(0.0, (len(hidden), 4, 8)).sum(1)


def test_nested_tensors_live_within_lines_that_run_as_they_are():
    """Bug: "the model raises RuntimeError: to_dense does not support layout Jagged ... does
    model(**inputs(2)) go well by itself?" It does: planning had looked at the tensor."""
    (region,) = traced(Jagged).regions
    assert region.method.startswith("inside")
    assert unlike(built(Jagged), traced=traced(Jagged)) == []
