"""Micro-batches are weighted by their number of labels: three with 8, 6 and 2 of 8 labels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe import ModelError
from autopipe.batch.tree import flatten
from autopipe.rewriting.label_counts import LabelCounts, label_counts
from autopipe.runtime.step.microbatches import EVEN, LabelWeights, Microbatches
from autopipe.runtime.step.outputs import mean_loss
from tests.support.inprocess import machine
from tests.support.staged import trace_model
from tests.support.torch_versions import NOTES_LINES_OF_LOSSES

LABELS = 8


def inputs(rows: int) -> dict[str, Tensor]:
    """Row i has 8, 6, 2, 0 labels, and so on again."""
    kept = torch.arange(LABELS) < torch.tensor([8, 6, 2, 0]).repeat(rows)[:rows, None]
    return {"x": torch.ones(rows, LABELS, 3), "labels": kept.long() - 100 * (~kept).long()}


def mean(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def term(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return mean(outputs, batch) + outputs.square().mean()


def counts(loss=mean) -> LabelCounts | None:
    return label_counts(trace_model(nn.Linear(3, 4), inputs_of_linear, loss).graph)


def inputs_of_linear(rows: int) -> dict[str, Tensor]:
    batch = inputs(rows)
    return {"input": batch["x"], "labels": batch["labels"]}


@pytest.fixture(scope="module")
def parts() -> Microbatches:
    """Three rows, each a micro-batch."""
    plan = autopipe.plan(
        lambda: nn.Linear(3, 4), inputs_of_linear, loss=mean, cluster=machine(1), batch_size=3,
        micro_batches=3, dp=1, tp=1,
    )  # fmt: skip
    return Microbatches(plan, flatten(inputs_of_linear(3)), first=0, rows=1, count=3)


def test_the_picture(parts):
    found = counts()
    weights = LabelWeights(found, found).of(parts)
    assert weights.losses == weights.counts == [1, 0.75, 0.25]
    results = {k: (torch.tensor(loss),) for k, loss in enumerate((1.0, 2.0, 4.0))}
    loss, divisor = mean_loss(results, weights, False, 1, None)
    assert divisor == 2
    assert loss == (8 * 1 + 6 * 2 + 2 * 4) / 16


def test_a_micro_batch_without_labels_weighs_nothing(parts):
    """Its loss is nan, as torch's is; of nothing else so is the batch's."""
    found = counts()
    nothing = replace(parts, leaves=flatten(inputs_of_linear(4)), first=2, count=2)
    weights = LabelWeights(found, found).of(nothing)
    assert weights.losses == [0.25, 0]
    nan = torch.tensor(torch.nan)
    loss, divisor = mean_loss({0: (torch.tensor(3.0),), 1: (nan,)}, weights, False, 1, None)
    assert (loss, divisor) == (3, 0.25)
    weights = LabelWeights(found, found).of(replace(nothing, first=3, count=1))
    loss, divisor = mean_loss({0: (nan,)}, weights, False, 1, None)
    assert loss.isnan() and divisor == 0


def test_replicas_with_batches_of_their_own_count_in_the_planned_unit(parts):
    """One may have rows of 8 labels and another of 4: the planned 8 are the unit of both."""
    found = counts()
    assert found is not None
    longer = replace(found, labels=replace(found.labels, shape=(*found.labels.shape[:-1], 16)))
    for sharded, expected in ((False, [1, 0.75, 0.25]), (True, [0.5, 0.375, 0.125])):
        weights = LabelWeights(found, longer).of(replace(parts, sharded=sharded))
        assert weights.losses == expected


def test_only_the_last_stage_looks_at_labels(parts):
    found = counts()
    assert LabelWeights(found, found, weighs=False).of(parts).losses == []
    assert LabelWeights(None, None).of(parts) is EVEN


def test_a_term_of_the_loss_needs_even_labels(parts):
    """Nothing could weigh it alone, so every rank refuses the batch before it sends anything."""
    found = counts(term)
    for weighs in (True, False):
        with pytest.raises(ModelError) as error:
            LabelWeights(found, found, weighs=weighs).of(parts)
        line = f"{__file__}:{mean.__code__.co_firstlineno + 1}: " if NOTES_LINES_OF_LOSSES else ""
        assert error.value.message == (
            f"{line}this mean over labels is one of several terms of the loss. "
            "Micro-batch 0 has 8 labels, micro-batch 1 6: the mean of their losses is not the loss "
            "of the batch"
        )
        assert error.value.hint == (
            'loss_over = "batch" computes it over all rows of the batch, in two passes; '
            'loss_over = "micro-batch" takes the mean of each micro-batch\'s own loss'
        )
    even = replace(parts, leaves=flatten(inputs_of_linear(1)), count=1)
    assert LabelWeights(found, found).of(even) is EVEN
