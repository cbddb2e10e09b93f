"""A batch that plain PyTorch cannot run is refused when it is planned, with torch's own words.

Tensors without memory look nothing up and cast nothing: only a run with values finds these.
"""

import re
from functools import partial

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from autopipe.frontend.refusals import on_every_rank
from autopipe.planners.driver import against_eager
from tests.support.inprocess import machine
from tests.support.odd_models import Net, built, planned


def test_a_model_that_plain_torch_cannot_run_on_these_rows_is_planned_with_a_line():
    class Fails(Net):
        def inside(self, hidden):
            if type(hidden) is torch.Tensor and not torch.compiler.is_compiling() and made:
                raise ArithmeticError
            return self.middle(hidden)

    model, said, made = built(Fails), [], []
    original = against_eager.with_weights

    def late(*args):
        made.append(None)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(against_eager, "with_weights", late)
        planned(model, said=said)
    raised = "the graph is not compared with the model, which raises ArithmeticError at "
    assert [line for line in said if line.startswith(raised) and "`raise ArithmeticError`" in line]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, words):
        return self.head(self.table(words)).square().mean()


def test_a_batch_that_the_model_cannot_run_is_refused():
    """Fake tensors look nothing up: a rank would have met it in its first step."""
    with pytest.raises(ModelError) as refused:
        autopipe.plan(
            Words,
            lambda rows: {"words": torch.full((rows, 3), 10)},
            cluster=machine(1),
            batch_size=4,
        )
    line = Words.forward.__code__.co_firstlineno + 1
    assert str(refused.value) == (
        f"{__file__}:{line} `return self.head(self.table(words)).square().mean()`: on a batch as "
        "`inputs` gives it, the model raises IndexError: index out of range in self\n"
        "hint: a token, a label, or a position in a long row is beyond the table it is looked up in"
    )


class Edges(nn.Module):
    """A graph whose nodes are the rows, and whose edges number them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, nodes, edges):
        hidden = self.layer(nodes)
        return (hidden + torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])).mean()


def test_edges_that_number_the_rows_of_a_batch_are_told_of():
    """Bug: the hint spoke of tokens, labels and positions alone."""
    with pytest.raises(ModelError, match="index 3 is out of bounds for dimension 0") as refused:
        autopipe.plan(
            Edges,
            lambda rows: {"nodes": torch.ones(rows, 4), "edges": torch.full((2, rows), rows - 1)},
            cluster=machine(1),
            batch_size=4,
        )
    assert "give each graph as a row, and number its nodes from 0" in refused.value.hint


class Bags(nn.Module):
    """A row has two words of a flat list; `begins` says where the words of each row begin."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(8, 4, mode="sum")

    def forward(self, begins, words):
        return self.bag(words, begins)


def test_rows_that_the_model_does_not_take_by_themselves_are_refused():
    """Bug: planned with a line, and the first rank's second micro-batch failed."""

    def bags(rows):
        return {"begins": 2 * torch.arange(rows), "words": torch.arange(2 * rows) % 8}

    plan = partial(
        autopipe.plan, Bags, bags, loss=lambda outputs, batch: outputs.mean(), batch_size=4
    )
    with pytest.raises(ModelError) as refused:
        plan(cluster=machine(1))
    assert (
        "on rows 2 and 3 of a batch by themselves the model raises RuntimeError: offsets[0] has "
        "to be 0"
    ) in refused.value.message
    assert "on rows 0 and 1 it does not" in refused.value.message
    assert "as the offsets of an EmbeddingBag do" in refused.value.hint
    said = []
    plan(cluster=machine(1), dp=1, micro_batches=1, say=said.append)
    assert said[0].startswith("the graph is not compared with the model, which raises")


def test_dtypes_that_do_not_go_together_are_refused():
    """Bug: planned with a line, as tensors without memory are multiplied whatever their dtypes."""
    with pytest.raises(ModelError) as refused:
        autopipe.plan(
            lambda: nn.Linear(4, 4),
            lambda rows: torch.ones(rows, 4, dtype=torch.int8),
            loss=lambda outputs, batch: outputs.mean(),
            cluster=machine(1),
            batch_size=4,
        )
    assert refused.value.message == (
        "on a batch as `inputs` gives it, the model raises RuntimeError: mat1 and mat2 must have "
        "the same dtype, but got Char and Float"
    )
    assert refused.value.hint.startswith("cast what `inputs` gives, or where the two meet")


def test_a_kernel_that_processors_lack_is_a_refusal_where_processors_run_the_model():
    lacking = NotImplementedError("\"avg_pool3d_out_frame\" not implemented for 'BFloat16'")
    assert on_every_rank(lacking) is None
    refused = on_every_rank(lacking, cpu=True)
    assert refused.hint == "--precision fp32, or a cluster of GPUs that have the kernel"


class WritesOver(Net):
    """Backward of the sigmoid needs its result, which is another one by then."""

    def inside(self, hidden):
        return hidden.sigmoid_().add_(hidden).mul_(0.5)


def test_a_tensor_that_backward_needs_is_written_over():
    """Bug: it was planned, its first steps, which are measured, were wrong, the third failed."""
    with pytest.raises(ModelError) as refused:
        planned(built(WritesOver))
    first, hint = str(refused.value).split("\n")
    assert first.startswith(
        "the model or its loss writes in place over a tensor that backward needs: one of the "
        "variables needed for gradient computation has been modified by an inplace operation"
    )
    assert first.endswith("is at version 3; expected version 1 instead.")
    assert hint.startswith("hint: make a new tensor there: x = x + y, and not x.add_(y)")


class ClampsItsData(Net):
    """Backward of the square needs what is clamped, and plain PyTorch does not notice."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        squared = hidden * hidden
        hidden.data.clamp_(-0.2, 0.2)
        return squared


@pytest.mark.parametrize("most", [against_eager.MOST_FLOPS, 0])
def test_data_that_backward_needs_is_written_over(monkeypatch, most):
    """Bug: a large model was planned, and each rank failed in its first backward; of a small one
    torch's error was told without a line."""
    monkeypatch.setattr(against_eager, "MOST_FLOPS", most)
    with pytest.raises(ModelError) as refused:
        planned(built(ClampsItsData))
    first, hint = str(refused.value).split("\n")
    assert re.match(r"\S+\.py:\d+: x.data is written in place, and the model or its loss wr", first)
    assert hint.startswith("hint: compute with a new tensor: x = x.clamp(-1, 1) in the place of ")
