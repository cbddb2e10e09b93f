"""What a region gives: objects of fields, numbers, views, and sizes that are held to the plan."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from autopipe.opaque.results import as_measured
from tests.support.inprocess import machine
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    regions_of,
    square,
    traced,
    unlike_whole_or_cut,
)
from tests.support.staged import lowered, split, trace_model


class WrittenAfterwards(Net):
    """Bug: refused, for autograd took the loop's result without values for a view of another."""

    def forward(self, x):
        hidden = self.up(x)
        found = hidden.clone()
        found[hidden > 0] = hidden[hidden > 0].tanh()
        scale = hidden.sum(1) + 1
        while scale.abs().max() > 1:
            scale = scale * 0.5
        scale.view(scale.shape).mul_(0.8)
        return self.down(found * scale[:, None])


def test_a_result_may_be_written_through_a_view():
    regions = planned(built(WrittenAfterwards)).regions
    assert [region.results[0].shape for region in regions] == [("b", 8), ("b",)]


@dataclass
class Encoded:
    hidden: torch.Tensor
    mask: torch.Tensor | None = None


class Encoder(nn.Module):
    """Rows are padded to one length: the lines stand in the module's own forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, hidden):
        chosen = [row[row > 0] for row in hidden]
        filled = torch.stack([nn.functional.pad(row, (0, 8 - len(row))) for row in chosen])
        return Encoded(self.layer(filled), torch.ones(len(hidden), 8, dtype=torch.bool))


class PassesAnObject(Net):
    """Reads a tensor that the encoder gives, as transformers' masks do."""

    def begin(self):
        self.middle = Encoder()

    def inside(self, hidden):
        encoded = self.middle(hidden)
        return encoded.hidden if encoded.mask.all() else encoded.hidden * encoded.mask


def test_a_part_may_give_an_object_of_fields():
    """Bug: encoders of transformers that give a BaseModelOutput could not run as they are.

    And a branch on what such a part gives was traced by numbers that were in fresh memory.
    """
    assert regions_of(PassesAnObject) == ["middle"]
    assert (
        unlike_whole_or_cut(built(PassesAnObject), traced=traced(PassesAnObject), cuts=["relu/1"])
        == []
    )


class GivesANumber(Net):
    """Cuts rows at the last place that any of them has, and says where."""

    def inside(self, hidden):
        hidden, count = self.cut(self.middle(hidden))
        return hidden * count

    def cut(self, hidden):
        chosen = hidden[hidden.sum(1) > -1e9]
        return hidden + chosen.sum(), int((hidden.abs() < 1e9).sum() > 0)


def test_a_number_that_is_another_one_than_planned_is_shown():
    """Bug: "gives [(2, 8)] in this micro-batch, and [(2, 8)] when it was planned"."""
    (region,) = trace_model(built(GivesANumber), inputs, square).regions
    assert region.method == "cut"
    with pytest.raises(ModelError, match="gives 0 beside its tensors .* and 1 when it was planned"):
        as_measured(region, (torch.zeros(2, 8), 0), [], 2)


def counted(rows):
    """Batches whose first two rows count four entries each, and the next two fewer."""
    counts = torch.tensor([4, 4, 3, 1, 2, 4, 1, 3]).repeat(8)[:rows]
    return {**inputs(rows), "counts": counts}


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x, counts):
        hidden = self.up(x).relu()
        picked = hidden[torch.arange(8) < counts[:, None]]
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        means = [picked[a:b].mean() for a, b in itertools.pairwise(ends.tolist())]
        return self.down(hidden * torch.stack(means)[:, None])


def test_sizes_that_the_first_two_rows_have_alike_are_held_to_the_next_two():
    """Bug: the line that picks was a part by itself, as it gives eight entries for the rows that
    were looked at; a run ended at the first micro-batch of others."""
    plan = autopipe.plan(
        built(Bags), counted, loss=square, cluster=machine(2), batch_size=8, loss_over="micro-batch"
    )
    (region,) = plan.regions
    assert [result.shape for result in region.results] in ([("b", 4)], [("b",)], [("b", 8)])


class Sizes(Net):
    """Gives a tensor of other sizes from the third row on."""

    def inside(self, hidden):
        return self.odd(self.middle(hidden))[:, :8]

    def odd(self, hidden):
        made = hidden[hidden[:, 0] > -100]  # all of them
        return made if len(hidden) != 5 else torch.cat([made, made], 1)


def test_a_result_of_another_size_than_planned_is_an_error_of_that_micro_batch():
    model = built(Sizes)
    traced = trace_model(model, inputs, square)
    (module,) = lowered(traced, model, (), 5)
    leaves = inputs(5)
    line = Sizes.odd.__code__.co_firstlineno + 1
    said = rf"test_region_results\.py:{line}: odd\(\), which runs as it is, gives .*when it was pl"
    with pytest.raises(ModelError, match=said):
        module.module(*(leaves[path] for path in split(traced, ())[0].inputs))
