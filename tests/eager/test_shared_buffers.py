"""Buffers that share memory: under two names they are one tensor, as views they are two.

And such as get another size in the memory that they have.
"""

import pytest
import torch

from autopipe.errors import ModelError
from tests.support.odd_models import Net, built, planned, refusal, unlike


class TwoNames(Net):
    """`change(self, mean)` may write or assign `average`, which is also `second`."""

    def begin(self):
        self.register_buffer("average", torch.arange(8.0))
        self.register_buffer("second", self.average)

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.change(hidden.detach().mean(0))
        return hidden * self.second


class Written(TwoNames):
    def change(self, mean):
        self.average.mul_(0.9).add_(mean)


class BothAssigned(TwoNames):
    def change(self, mean):
        self.average = self.second = 0.9 * self.average + mean


class OneAssigned(TwoNames):
    def change(self, mean):
        self.average = 0.9 * self.average + mean


class AssignedApart(TwoNames):
    def change(self, mean):
        self.average, self.second = 0.9 * self.average + mean, 0.5 * self.second


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("kind", [Written, BothAssigned])
def test_a_buffer_of_two_names_may_be_written(kind, size):
    """Bug: "its buffer 'second' is another one by its graph", which has it under its first name."""
    planned(built(kind))
    assert unlike(built(kind), cuts=["relu/1"]) == []


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("kind", [OneAssigned, AssignedApart])
def test_a_buffer_of_two_names_is_refused_where_they_become_two_tensors(kind, size):
    """Bug: without a word for a large model, in which both names went on as one tensor."""
    assert (
        "the buffer 'average' is assigned, and 'second', which was the same tensor before, is "
        "another one then\nhint: write it in place"
    ) in refusal(built(kind))


class Row(Net):
    def begin(self):
        self.register_buffer("table", torch.arange(16.0).view(2, 8))
        self.register_buffer("row", self.table[1])

    def inside(self, hidden):
        return self.middle(hidden) * self.row + self.table.sum(0)


class WrittenRow(Row):
    def inside(self, hidden):
        self.table.mul_(0.9)
        return super().inside(hidden)


@pytest.mark.long
def test_a_view_of_a_buffer_is_one_of_its_own_while_nothing_writes_them(size):
    planned(built(Row))
    assert unlike(built(Row)) == []


def test_a_view_of_a_buffer_that_is_written_is_refused_by_name(size):
    """Bug: "its loss is 1.52049, and 1.52538 by its graph"; of a large model, not a word."""
    assert (
        "forward writes the buffer 'table', and 'row' is in the same memory; ranks have them as "
        "two tensors\nhint: read 'row' from 'table' in forward"
    ) in refusal(built(WrittenRow))


class Halves(Net):
    """Two views of one tensor that have no element in common."""

    def begin(self):
        both = torch.arange(16.0)
        self.register_buffer("even", both[::2])
        self.register_buffer("odd", both[1::2])

    def inside(self, hidden):
        self.even.mul_(0.9)
        return self.middle(hidden) * self.even + self.odd


def test_views_that_have_no_element_in_common_may_be_written():
    planned(built(Halves))
    assert unlike(built(Halves)) == []


class OfAWeight(Net):
    def begin(self):
        self.register_buffer("row", self.middle.weight.data[1])

    def inside(self, hidden):
        return self.middle(hidden) * self.row


@pytest.mark.parametrize("given", [OfAWeight, built(OfAWeight)], ids=["a function", "a model"])
def test_a_view_of_a_trained_parameter_is_refused_by_name(given, size):
    """Bug: it stayed as it was built, without a word for a large model."""
    with pytest.raises(ModelError) as error:
        planned(given)
    assert str(error.value) == (
        "the buffer 'row' is in the memory of the parameter 'middle.weight', and changes as that "
        "is trained; ranks have them as two tensors\n"
        "hint: read it from the parameter in forward, by .detach(); or register a copy: "
        ".detach().clone()"
    )


class Anchored(Net):
    """Its anchor follows the weight."""

    def begin(self):
        self.anchors = [self.middle.weight.detach()]

    def inside(self, hidden):
        return self.middle(hidden) @ self.anchors[0]


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize("given", [Anchored, built(Anchored)], ids=["a function", "a model"])
def test_so_is_one_in_an_attribute_that_forward_reads(given, size):
    """Bug: of a large model it stayed as it was built, if the model was given and not built."""
    assert "keeps parameters, or what it has made of them, in anchors" in refusal(given)


class AnchoredForLater(Anchored):
    def inside(self, hidden):
        return self.middle(hidden)


@pytest.mark.long
def test_one_that_forward_does_not_read_is_no_obstacle(size):
    planned(built(AnchoredForLater))


class Observes(Net):
    """As observers of torch.ao: the first call gives a buffer its size."""

    def begin(self):
        self.register_buffer("low", torch.zeros(0))

    def inside(self, hidden):
        hidden, known = self.middle(hidden), self.low.numel() > 0
        least = hidden.detach().amin(0)
        least = torch.minimum(least, self.low) if known else least
        self.low.resize_(8).copy_(least)
        return hidden - self.low.clone()


class Observed(Observes):
    """The model as it should be handed over."""

    def begin(self):
        super().begin()
        with torch.no_grad():
            self.inside(torch.ones(2, 8))


def test_a_buffer_that_is_resized_is_refused_until_it_has_its_size():
    """Bug: a traceback; the old numbers could not be written into the new size."""
    said = refusal(built(Observes))
    assert "the buffer 'low' is resized from [0] to [8]" in said
    assert "call the model once for in model()" in said
    assert unlike(built(Observed), cuts=["relu/1"]) == []


class Expanded(Net):
    """Several entries of a buffer are one in memory, which no op writes."""

    def begin(self):
        self.register_buffer("scale", torch.full((1,), 0.5).expand(8))
        self.register_buffer("places", torch.arange(8.0).expand(3, 8))

    def inside(self, hidden):
        return self.middle(hidden) * self.scale + self.places[1]


def test_a_buffer_may_be_an_expanded_tensor():
    """Bug: what put its values back ended planning in torch's own words."""
    planned(built(Expanded))
    assert unlike(built(Expanded), cuts=["relu/1"]) == []


class InAList(Net):
    """A buffer that is registered, and kept in a list beside."""

    def begin(self):
        self.register_buffer("mean", torch.zeros(8))
        self.all = [self.mean]

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.move(hidden.detach().mean(0))
        return hidden - self.mean * self.all[0]


class WrittenInAList(InAList):
    def move(self, mean):
        self.all[0].mul_(0.9).add_(mean)


class WrittenByName(InAList):
    def move(self, mean):
        self.mean.lerp_(mean, 0.1)


class AssignedByName(InAList):
    def move(self, mean):
        self.mean = 0.9 * self.mean + mean


class RowInAnAttribute(Net):
    def begin(self):
        self.register_buffer("table", torch.zeros(2, 8))
        self.row = self.table[1]

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.row.lerp_(hidden.detach().mean(0), 0.1)
        return hidden - self.table[1]


@pytest.mark.parametrize("kind", [WrittenInAList, WrittenByName])
def test_a_buffer_in_a_list_is_the_buffer(kind, size):
    """Bug: without a word for a large model, in which the list had a tensor of its own."""
    planned(built(kind), loss_over="micro-batch")
    assert unlike(built(kind)) == []


def test_a_buffer_that_is_assigned_is_refused_if_a_list_keeps_the_one_before(size):
    assert "assigns the buffer 'mean', and the model keeps the tensor that it was before" in (
        refusal(built(AssignedByName))
    )


def test_a_view_of_a_buffer_in_an_attribute_is_refused_if_it_is_written(size):
    """Bug: without a word for a large model, as above."""
    assert (
        "forward writes 'row', and 'table', which the model keeps besides, is in the same memory"
    ) in refusal(built(RowInAnAttribute))


class ReadByAPart(WrittenByName):
    """`route` has sizes that depend on values, and runs as it is."""

    def inside(self, hidden):
        hidden = self.middle(hidden)
        self.move(hidden.detach().mean(0))
        return self.route(hidden)

    def route(self, hidden):
        chosen = hidden.sum(1) > 0
        result = torch.zeros_like(hidden)
        result[chosen] = hidden[chosen] * 2 - self.all[0]
        return result


def test_a_buffer_in_a_list_is_refused_beside_a_part_that_runs_as_it_is(size):
    """Bug: of a large model the part read the list's tensor, which nothing moved."""
    assert (
        "a call here runs as it is, and may read the buffer 'mean', which forward writes, in "
        "another place, too (all"
    ) in refusal(built(ReadByAPart), loss_over="micro-batch")
