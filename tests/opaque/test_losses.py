"""A loss that no trace can look into runs as it is: its rows are chosen, or matched, by values."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import CaptureError, ModelError
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    planned,
    refusal,
    unlike,
    unlike_whole_or_cut,
)
from tests.support.staged import trace_model


def chosen(outputs, batch):
    """The mean over the numbers that values choose, of each micro-batch."""
    kept = batch["y"] > 0
    return F.mse_loss(outputs[kept], batch["y"][kept])


def matched(outputs, batch):
    """As DETR matches boxes: what is nearest is found outside of torch."""
    with torch.no_grad():
        far = torch.cdist(outputs, batch["y"]).numpy()
    return (outputs - batch["y"][torch.as_tensor(far.argmin(1))]).square().mean()


def branches(outputs, batch):
    """One way for one micro-batch, another for the next."""
    found = outputs[batch["y"][:, 0] > 0]
    return found.square().mean() if len(found) else outputs.sum() * 0


class Matcher(nn.Module):
    """Says which numbers count, in a method of its own."""

    def chosen(self, outputs, y):
        return outputs[y > 0], y[y > 0]


class Criterion(nn.Module):
    """A module with a buffer and a part."""

    def __init__(self):
        super().__init__()
        self.matcher = Matcher()
        self.register_buffer("weight", torch.tensor([0.5, 2.0]))

    def forward(self, outputs, batch):
        made, y = self.matcher.chosen(outputs, batch["y"])
        return self.weight[1] * (made - y).abs().mean()


LOSSES = [chosen, matched, branches, Criterion()]


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda one: getattr(one, "__name__", "module"))
def test_it_computes_what_eager_computes(loss):
    """Bug: all were refused, with a hint to do what the module already does."""
    (region,) = trace_model(built(Net), inputs, loss).regions
    assert region.name == "loss()"
    assert unlike_whole_or_cut(built(Net), loss, cuts=["relu/1"]) == []


class Tuples(Net):
    """Gives more than a tensor."""

    def forward(self, x):
        return {"made": [super().forward(x), None], "scale": 2.0}


def test_outputs_may_be_a_tree():
    def loss(outputs, batch):
        return chosen(outputs["made"][0], batch) * outputs["scale"]

    assert unlike(built(Tuples), loss) == []


class Both(Net):
    """Its own forward sets a hook on a gradient: all of it runs as it is, and so does its loss."""

    def forward(self, x):
        hidden = self.up(x)
        hidden.register_hook(lambda gradient: gradient * 0.5)
        return self.down(self.inside(hidden))


@pytest.mark.long
def test_a_whole_model_beside_it():
    regions = trace_model(built(Both), inputs, chosen).regions
    assert [region.name for region in regions] == ["forward()", "loss()"]
    assert unlike(built(Both), chosen) == []


def test_a_mean_over_unequally_many_is_refused_unless_each_micro_batch_has_its_own():
    """Bug: what runs as it is was not compared with its halves."""
    with pytest.raises(ModelError, match="rows weigh unequally in it") as error:
        planned(built(Net), chosen, pp=2, micro_batches=2)
    assert 'loss_over = "micro-batch"' in error.value.hint
    plan = planned(built(Net), chosen, loss_over="micro-batch", pp=2, micro_batches=2)
    assert [region.name for region in plan.regions] == ["loss()"]


def test_a_sum_and_a_count():
    def counted(outputs, batch):
        kept = batch["y"] > 0
        total = F.mse_loss(outputs[kept], batch["y"][kept], reduction="sum")
        return autopipe.SumCount(total, kept.sum())

    assert planned(built(Net), counted, pp=2, micro_batches=2).regions


def test_a_count_may_be_the_number_of_what_was_chosen():
    """Bug: an integer, another one in each batch, could not be given by what runs as it is."""

    def counted(outputs, batch):
        kept = (outputs - batch["y"])[batch["y"] > 0]
        return autopipe.SumCount(kept.square().sum(), kept.numel())

    model = built(Net)
    plan = planned(model, counted, pp=1, dp=1, micro_batches=2)
    assert [region.name for region in plan.regions] == ["loss()"]
    pipe = autopipe.parallelize(copy.deepcopy(model), plan, loss=counted)
    batch = inputs(4)
    total, count = counted(model(batch["x"]), batch)
    (total / count).backward()
    assert pipe.step(batch).item() == pytest.approx(total.item() / count)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_over_the_whole_batch():
    assert planned(built(Net), chosen, loss_over="batch", pp=2, micro_batches=2).regions


class Averages(Criterion):
    def forward(self, outputs, batch):
        self.weight.lerp_(outputs.detach().mean(), 0.5)
        return super().forward(outputs, batch)


class Centers(nn.Module):
    """As DINO's loss has it: a buffer that is assigned, in a method of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def forward(self, outputs, batch):
        loss = chosen(outputs - self.center, batch)
        self.update(outputs.detach())
        return loss

    def update(self, outputs):
        self.center = self.center * 0.9 + outputs.mean(0) * 0.1


class HasACriterion:
    """A loss that is no module, and keeps one."""

    def __init__(self):
        self.criterion = Centers()

    def __call__(self, outputs, batch):
        return self.criterion(outputs, batch)


class Weighs(Criterion):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class LeavesAMean(Net):
    def forward(self, x):
        made = super().forward(x)
        self.mean = made.detach().mean()
        return made


def of(model):
    """A loss that holds the model."""
    return lambda outputs, batch: chosen(outputs, batch) + model.up.weight.square().mean()


def of_an_attribute(model):
    """A loss that reads what forward leaves; the model has been called before."""
    model(inputs(2)["x"])
    return lambda outputs, batch: chosen(outputs, batch) * model.mean


COUNTS = torch.zeros(())


def counts(outputs, batch):
    COUNTS.add_(1)
    return chosen(outputs, batch) / COUNTS


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda model: Averages(), "it writes a tensor that it keeps"),
        (lambda model: Centers(), "it writes a tensor that it keeps"),
        (lambda model: Weighs(), "it reads a parameter"),
        (of, "it reads"),
        (of_an_attribute, "the loss"),
        (lambda model: counts, "it writes a tensor that it keeps"),
    ],
    ids=["buffer", "assigned", "parameter", "model", "attribute", "global"],
)
def test_what_it_does_besides_is_refused(make, why):
    """Bug: a buffer that it assigned was lost, without a word in a model too large to be run."""
    model = built(LeavesAMean)
    said = refusal(model, make(model), loss_over="micro-batch")
    assert why in said


def test_a_loss_that_is_no_module_may_assign_no_buffer_of_one_either():
    said = refusal(built(Net), HasACriterion(), loss_over="micro-batch")
    assert "it writes a tensor that it keeps" in said


def test_the_hint_says_what_a_loss_can_do():
    with pytest.raises(CaptureError) as error:
        planned(built(Net), Averages(), loss_over="micro-batch")
    assert error.value.hint.endswith(
        "or let the loss compute with what it is given alone, the outputs and the batch, and give "
        "a scalar: it then runs as it is (the loss cannot, for it writes a tensor that it keeps)"
    )
