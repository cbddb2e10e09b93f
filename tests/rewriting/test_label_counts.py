"""Which losses are a mean over labels, and how many labels each of four rows has."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe import ModelError
from autopipe.batch.tree import flatten
from autopipe.planfile.contents import Plan
from autopipe.rewriting.label_counts import LabelCounts, label_counts, leaving_out
from autopipe.runtime.step.microbatches import EVEN, LabelWeights, Microbatches
from tests.support.inprocess import machine
from tests.support.staged import trace_model

WORDS, WIDTH, LENGTH = 10, 4, 6

Loss = Callable[[Tensor, dict[str, Tensor]], Any]


class Model(nn.Module):
    """Logits [b, s, WORDS] of tokens [b, s]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def inputs(rows: int) -> dict[str, Tensor]:
    """Rows of 6, 4, 2, 0, 6, .. labels; their mask says the same."""
    words = torch.arange(rows * LENGTH).reshape(rows, LENGTH) % WORDS
    kept = torch.arange(LENGTH) < LENGTH - 2 * torch.arange(rows)[:, None] % 8
    return {
        "tokens": words,
        "labels": words.flip(1).masked_fill(~kept, -100),
        "kept": kept.float(),
    }


def of(loss: Loss) -> LabelCounts | None:
    return label_counts(trace_model(Model(), inputs, loss).graph)


def entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")


def shifted(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Each word is to tell the next one, as in transformers."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, WORDS), labels.view(-1), ignore_index=-100)


def without_some(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"].clone()
    labels[labels == 3] = -100
    return F.cross_entropy(logits.transpose(1, 2), labels)


def masked(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["kept"]
    return (entropies(logits, batch["labels"]) * kept).sum() / kept.sum()


def guarded(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["kept"]
    return 2 * (entropies(logits, batch["labels"]) * kept).sum() / (kept.sum().clamp(min=1) + 1e-3)


def summed(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum()


def in_chunks(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """torchtune's way: the sum grows in place, a part of the tokens at a time."""
    labels, total = batch["labels"], 0.0
    for part, of_part in zip(logits.chunk(3, dim=1), labels.chunk(3, dim=1), strict=True):
        total += F.cross_entropy(part.flatten(0, 1), of_part.flatten(), reduction="sum")
    return total / (labels != -100).sum()


def of_two_sums(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    kept = batch["kept"]
    total = (entropies(logits, batch["labels"]) * kept).sum()
    squares = F.mse_loss(logits * kept[..., None], torch.zeros_like(logits), reduction="sum")
    return (total - 0.1 * squares) / kept.sum()


ALL = [6, 4, 2, 0]
COUNTED: dict[str, tuple[Loss, list[int]]] = {
    "as it is": (lambda o, b: F.cross_entropy(o.transpose(1, 2), b["labels"]), ALL),
    "a multiple": (
        lambda o, b: 0.5 * F.cross_entropy(o.flatten(0, 1), b["labels"].flatten()) / 3 - 1,
        ALL,
    ),
    "of logarithms": (
        lambda o, b: F.nll_loss(o.log_softmax(2).transpose(1, 2), b["labels"]), ALL,
    ),
    "smooth": (
        lambda o, b: F.cross_entropy(o.transpose(1, 2), b["labels"], label_smoothing=0.1),
        ALL,
    ),
    "of classes that weigh": (
        lambda o, b: F.cross_entropy(o.transpose(1, 2), b["labels"], torch.arange(1.0, 1 + WORDS)),
        [21, 22, 15, 0],
    ),
    "shifted": (shifted, [5, 3, 1, 0]),
    "without some": (without_some, [5, 4, 2, 0]),
    "masked": (masked, ALL),
    "guarded": (guarded, ALL),
    "summed": (summed, ALL),
    "summed in chunks": (in_chunks, ALL),
    "of two sums": (of_two_sums, ALL),
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Says which rows of a batch are a micro-batch's: one each."""
    return autopipe.plan(
        Model, inputs, loss=masked, cluster=machine(1), batch_size=4, micro_batches=4, dp=1
    )


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(("loss", "expected"), COUNTED.values(), ids=COUNTED)
def test_labels_of_each_row_are_counted(loss: Loss, expected: list[int], plan: Plan) -> None:
    """Counts, and what the losses of single rows are divided by."""
    found = of(loss)
    assert found is not None and not found.terms
    parts = Microbatches(plan, flatten(inputs(4)), first=0, rows=1, count=4)
    weights, unit = LabelWeights(found, found).of(parts), LENGTH
    assert [unit * count for count in weights.counts] == pytest.approx(expected)
    divisors = [max(n, 1) + 1e-3 if loss is guarded else n for n in expected]
    assert [unit * weight for weight in weights.losses] == pytest.approx(divisors)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(("loss", "expected"), COUNTED.values(), ids=COUNTED)
def test_weighted_losses_are_that_of_the_batch(loss: Loss, expected: list[int]) -> None:
    """The equation of the module's docstring, of three rows that have labels."""
    found, model, batch = of(loss), Model(), inputs(3)
    assert found is not None
    with torch.no_grad():
        whole = float(loss(model(batch["tokens"]), batch))
        rows = [{name: leaf[k : k + 1] for name, leaf in batch.items()} for k in range(3)]
        each = [float(loss(model(row["tokens"]), row)) for row in rows]

    def divisor(count: int) -> float:
        return max(count, found.least) + found.more

    summed = sum(one * divisor(n) for one, n in zip(each, expected, strict=False))
    assert summed / divisor(sum(expected[:3])) == pytest.approx(whole, rel=1e-4)


def written_again(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The logarithm of the sum: what is divided is written after it was a sum."""
    total = entropies(logits, batch["labels"]).sum()
    same = total.view(1)
    total.log_()
    return same[0] / batch["kept"].sum()


NOT_COUNTED: dict[str, Loss] = {
    "over rows": lambda o, b: o.square().mean(),
    "a sum": lambda o, b: F.cross_entropy(o.transpose(1, 2), b["labels"], reduction="sum"),
    "of probabilities": lambda o, b: F.cross_entropy(
        o.transpose(1, 2), F.one_hot(b["tokens"], WORDS).transpose(1, 2).float()
    ),
    "of labels that the model makes": lambda o, b: F.cross_entropy(
        o.transpose(1, 2), o.argmax(2)
    ),
    "by a root": lambda o, b: o.sum() / b["kept"].sum().sqrt(),
    "a sum and a mean": lambda o, b: (
        (entropies(o, b["labels"]) * b["kept"]).sum() + o.square().mean()
    ) / b["kept"].sum(),
    "a product of sums": lambda o, b: o.sum() * entropies(o, b["labels"]).sum() / b["kept"].sum(),
    "written again": written_again,
    "a mean of means": lambda o, b: (
        (entropies(o, b["labels"]) * b["kept"]).sum(1) / (b["kept"].sum(1) + 1)
    ).mean(),
}  # fmt: skip


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("loss", NOT_COUNTED.values(), ids=NOT_COUNTED)
def test_any_other_loss_is_no_mean_over_labels(loss: Loss) -> None:
    assert of(loss) is None


def test_terms_of_a_loss_are_told_apart(plan: Plan) -> None:
    """Each mean of several counts for itself; what the loss does not read is none."""

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        turned, later = logits.transpose(1, 2), F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        ahead = F.cross_entropy(turned, later)
        return F.cross_entropy(turned, batch["labels"]) + 0.1 * ahead + logits.square().mean()

    found = of(loss)
    assert found is not None and found.terms and len(found.graph.outputs) == 2
    assert {node.short for node in found.graph.nodes} <= {"pad", "slice", "ne", "sum"}
    one_row = Microbatches(plan, flatten(inputs(1)), first=0, rows=1, count=1)
    assert LabelWeights(found, found).of(one_row) == EVEN
    with pytest.raises(ModelError, match="Micro-batch 0 has 5 labels, micro-batch 1 3"):
        LabelWeights(found, found).of(replace(one_row, leaves=flatten(inputs(2)), count=2))


def test_a_sum_over_a_mask_divided_by_its_own_is_a_term_like_any_other(plan: Plan) -> None:
    """Bug: beside another term it was not counted, and micro-batches weighed alike in it."""

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        each = entropies(logits, batch["labels"]) * batch["kept"]
        return logits.square().mean() + each.sum() / batch["kept"].sum().clamp(min=1)

    found = of(loss)
    assert found is not None and found.terms and len(found.graph.outputs) == 1
    two = Microbatches(plan, flatten(inputs(2)), first=0, rows=1, count=2)
    with pytest.raises(ModelError, match="Micro-batch 0 has 6 labels, micro-batch 1 4") as refused:
        LabelWeights(found, found).of(two)
    assert 'loss_over = "batch"' in str(refused.value.hint)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8, 40])
def test_no_two_halves_of_a_batch_leave_out_equally_many(rows: int) -> None:
    """Bug: of labels of four rows often one in each half, or all of one half."""
    for holed in leaving_out({"labels": torch.full((rows,), 7)}, ["labels"]):
        left = int((holed["labels"] != 7).sum())
        assert left % 2 == 1 and (left < rows / 2 or rows < 3)
