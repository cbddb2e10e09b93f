"""A plan is for the longest rows; the model is looked at with each shorter length asked for."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import ModelError
from tests.support.inprocess import machine

pytestmark = pytest.mark.usefixtures("traces_remembered")

LONGEST, WIDTH = 16, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, ids):
        return self.head(self.mixed(self.embedding(ids)))

    def mixed(self, x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


class Baked(Net):
    """Reshapes with a number."""

    def mixed(self, x):
        return x.view(x.shape[0], LONGEST, WIDTH).cumsum(1)


def inputs(rows, length=LONGEST):
    ids = torch.arange(rows * length).reshape(rows, length) % 32
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def planned(model=Net, inputs=inputs, **words):
    cluster = machine(1)
    return autopipe.plan(model, inputs, loss=loss, cluster=cluster, batch_size=4, **words)


def test_figures_are_those_of_the_longest_rows():
    plan = planned(lengths=(8, LONGEST, 8))
    assert plan.lengths == (8, LONGEST)
    alone = planned()
    assert alone.lengths == ()
    assert (plan.fingerprint, plan.prediction) == (alone.fingerprint, alone.prediction)


def test_a_model_with_its_length_built_in_is_refused_with_its_line():
    with pytest.raises(ModelError) as error:
        planned(Baked, lengths=(8, LONGEST))
    assert "rows of 8 tokens, where the plan is for 16" in str(error.value)
    assert "x.view(x.shape[0], LONGEST, WIDTH)" in str(error.value)
    assert planned(Baked).lengths == ()


@pytest.mark.parametrize("lengths", [(8, 32), (8,), (0, LONGEST)])
def test_the_longest_is_that_of_the_inputs(lengths):
    with pytest.raises(ModelError, match=f"inputs\\(\\) gives rows of {LONGEST} tokens"):
        planned(lengths=lengths)


def test_rows_without_tokens_have_no_length():
    def images(rows):
        return {"input": torch.randn(rows, WIDTH), "labels": torch.arange(rows) % 3}

    with pytest.raises(ModelError, match="no tensor of whole numbers"):
        planned(lambda: nn.Linear(WIDTH, 3), images, lengths=(4, 8))
