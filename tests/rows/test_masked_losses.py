"""Losses in which a mask or a threshold chooses what counts, more of it than the example shows."""

import pytest
import torch
from torch.nn import functional as F

from autopipe import SumCount
from autopipe.errors import ModelError
from tests.support.grouped_losses import OTHERWISE, WIDTH, checked, inputs


def hard(outputs, batch):
    """The mean of what costs more than 5, if anything does."""
    each = F.cross_entropy(outputs, batch["label"], reduction="none")
    many = (each > 5).sum()
    return torch.where(many > 0, (each * (each > 5)).sum() / many.clamp(min=1), each.mean())


BEYOND = {
    "hard": hard,
    "high": lambda o, b: o.square().mean() + (o.mean() - 3).relu() ** 2,
    "low": lambda o, b: o.square().mean() + (-3 - o.mean()).relu() ** 2,
    "collapsed": lambda o, b: o.square().mean() + (0.02 - o.var(0).mean()).relu(),
}


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("loss", BEYOND.values(), ids=BEYOND)
def test_what_compares_rows_beyond_a_threshold(loss):
    """Bug: made-up numbers were all about as large as 1, and a trained model's are not."""
    with pytest.raises(ModelError, match="it compares rows with each other|rows weigh unequally"):
        checked(loss)


def counting_all(rows):
    """An example of which a mask and labels count all, as many are; a run's own batches do not."""
    return {
        "x": torch.randn(rows, WIDTH),
        "mask": torch.ones(rows, WIDTH, dtype=torch.bool),
        "labels": torch.arange(rows * WIDTH).reshape(rows, WIDTH) % WIDTH,
    }


MASKED = {
    "chosen": lambda o, b: (o - b["x"]).square()[b["mask"]].mean(),
    "nanmean": lambda o, b: o.masked_fill(~b["mask"], torch.nan).nanmean(),
    "labels": lambda o, b: o[b["labels"] != -100].square().mean(),
    # Bug: only labels that are integers were left out, not distances or what was not measured.
    "known": lambda o, b: (o - b["x"]).square()[~b["x"].isnan()].mean(),
    "near": lambda o, b: (o - b["x"].abs())[b["x"].abs() > 0].abs().mean(),
}


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("loss", MASKED.values(), ids=MASKED)
def test_a_mask_of_the_example_may_count_all_and_that_of_a_batch_less(loss):
    """Bug: micro-batches of unequally many chosen tokens weighed alike, without a word."""
    with pytest.raises(ModelError, match="rows weigh unequally") as error:
        checked(loss, inputs=counting_all)
    assert "and a batch of which masks leave some out" in error.value.message
    assert error.value.hint == f"return autopipe.SumCount(total, count); {OTHERWISE}"


def test_what_is_right_with_any_mask_is_taken_as_it_is():
    def each_row(outputs, batch):
        share = batch["mask"] / batch["mask"].sum(1, keepdim=True)
        return ((outputs - batch["x"]).square() * share).sum(1).mean()

    def counted(outputs, batch):
        return SumCount(outputs[batch["mask"]].sum(), batch["mask"].sum())

    def divided(outputs, batch):
        return (outputs.square() * batch["mask"]).sum() / batch["mask"].sum()

    for loss in (each_row, counted, divided):
        assert checked(loss, inputs=counting_all) == []


def test_a_term_beside_a_mean_over_labels_is_tried_with_other_masks():
    """Bug: the mean over labels was counted in a run, and nothing looked at the term beside it."""

    def labels(outputs, batch):
        logits = (outputs[:, :, None] * torch.arange(1.0, 1 + WIDTH)).transpose(1, 2)
        return F.cross_entropy(logits, batch["labels"])

    beside = {
        "chosen": lambda o, b: labels(o, b) + o.square()[b["mask"]].mean(),
        "counted": lambda o, b: labels(o, b) + (o * b["mask"]).sum() / b["mask"].sum(),
    }
    with pytest.raises(ModelError, match="masks leave some out"):
        checked(beside["chosen"], inputs=counting_all)
    assert checked(beside["counted"], inputs=counting_all) == [], "each step counts them"


def test_masks_of_two_halves_may_count_alike_by_chance():
    """Bug: the example was looked at in one place, where they did."""

    def lengths(rows):
        ends = torch.tensor([6, 2, 3, 5, 1, 6, 6, 6])[:rows]
        return counting_all(rows) | {"mask": torch.arange(WIDTH) < ends[:, None]}

    with pytest.raises(ModelError, match="rows weigh unequally"):
        checked(MASKED["chosen"], inputs=lengths)


def test_lengths_of_an_example_may_be_equal():
    """Bug: a mean over the longest row's tokens, which is another in each micro-batch."""

    def padded(outputs, batch):
        there = torch.arange(WIDTH) < batch["length"][:, None]
        return (outputs.square() * there).sum() / (batch["length"].max() * len(outputs))

    def equal(rows):
        return inputs(rows) | {"length": torch.full((rows,), WIDTH)}

    with pytest.raises(ModelError, match="and a batch of lower numbers"):
        checked(padded, inputs=equal)


@pytest.mark.parametrize("weights", [[0.9, 0.1] * 4, [0.1] * 4 + [0.9] + [0.1] * 3])
def test_rows_beyond_a_threshold_may_be_equally_many_by_chance_or_none(weights):
    """Bug: so they were in all halves that were looked at; and a half's mean over none of its rows
    was passed over."""

    def inputs(rows):
        return counting_all(rows) | {"weight": torch.tensor(weights[:rows])}

    with pytest.raises(ModelError, match="rows weigh unequally"):
        checked(
            lambda o, b: o.masked_fill(b["weight"][:, None] < 0.5, torch.nan).nanmean(),
            inputs=inputs,
        )
