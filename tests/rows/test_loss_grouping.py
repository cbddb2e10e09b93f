"""A loss whose value depends on how rows are cut into micro-batches is reported."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import ModelError
from autopipe.planners.driver import checked_trace
from autopipe.rows import loss_grouping, row_mixing
from autopipe.tracing import source as tracing
from tests.support.grouped_losses import (
    FINE,
    OTHERWISE,
    TOGETHER,
    WIDTH,
    Net,
    checked,
    inputs,
    negatives,
    tokens,
)
from tests.support.inprocess import machine
from tests.support.staged import trace_model


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize("loss", FINE.values(), ids=FINE)
def test_a_mean_over_rows_is_taken_as_it_is(loss):
    assert checked(loss) == []


REFUSED = {
    "sum": (
        lambda o, b: (o - b["x"]).square().sum(),
        "it is a sum over rows",
        f"return a mean, or autopipe.SumCount(total, count); {OTHERWISE}",
    ),
    "uneven": (
        lambda o, b: o.square().mean(1) @ b["label"].float() / b["label"].sum().sqrt() ** 2,
        "rows weigh unequally in it, as in a mean over unequally many tokens",
        f"return autopipe.SumCount(total, count); {OTHERWISE}",
    ),
    "uneven beside another term": (
        lambda o, b: tokens(o, b) + o.square().mean(),
        "one of its terms is a mean over labels, of which rows have unequally many",
        TOGETHER,
    ),
    "a mean over chosen places beside another term": (
        lambda o, b: o.square().mean() + (o * (b["labels"] > 1)).sum() / (b["labels"] > 1).sum(),
        "one of its terms is a mean over labels, of which rows have unequally many",
        TOGETHER,
    ),
    "negatives": (negatives, "it compares rows with each other", TOGETHER),
    "spread over rows": (
        lambda o, b: -o.var(0).mean(), "it compares rows with each other", TOGETHER,
    ),
    "a mean and a number": (
        lambda o, b: (F.cross_entropy(o, b["label"]), (o.argmax(1) == b["label"]).sum()),
        "sum and count of the whole are not those of the halves added",
        "a mean is returned alone; or autopipe.SumCount(sum over rows, what it counts)",
    ),
}  # fmt: skip


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("offset", [0, 100])
def test_a_mean_of_the_hardest_rows_agrees_by_chance_in_two_draws_of_three(offset):
    """Bug: it was taken as it is where the first draw agreed."""

    def hardest(outputs, batch):
        each = (outputs - batch["x"]).square().mean(1) + offset
        return each.sort(descending=True).values[: outputs.shape[0] // 2].mean()

    with pytest.raises(ModelError, match="it compares rows with each other"):
        checked(hardest)


@pytest.mark.parametrize(
    ("loss", "what", "hint"),
    [
        pytest.param(
            *case, marks=pytest.mark.long if name == "uneven beside another term" else (), id=name
        )
        for name, case in REFUSED.items()
    ],
)
def test_any_other_loss_is_refused_with_its_values(loss, what, hint):
    """As the values are those of made-up numbers, the oracle is what is said of them."""
    with pytest.raises(ModelError) as error:
        checked(loss)
    place, _, sentence = error.value.message.partition(": the loss of 4 rows is ")
    assert place.startswith(f"{inspect.getsourcefile(loss)}:")
    values, _, why = sentence.partition(" (tried on made-up numbers): ")
    then = "so its value would depend on the micro-batches that the batch is cut into"
    if what.startswith("sum and count"):
        then = "so it is no sum and count"
    assert why == f"{what}, {then}"
    assert error.value.hint == hint
    if not values.startswith("("):
        whole, _, halves = values.partition(", of their halves ")
        one, two = map(float, halves.split(" and "))
        assert abs(float(whole) - (one + two) / 2) > 1e-3


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("sharpness", [0.5, 1, 2, 8, 16])
def test_in_batch_negatives_are_no_unequal_weights(sharpness):
    """Even where the value of all rows lies between those of the halves by chance."""

    def loss(outputs, batch):
        near = F.normalize(outputs, dim=1) @ F.normalize(batch["x"], dim=1).T
        return F.cross_entropy(sharpness * near, torch.arange(outputs.shape[0]))

    with pytest.raises(ModelError, match="it compares rows with each other"):
        checked(loss)


def test_in_batch_negatives_are_what_the_model_itself_gives():
    """The same on the model's own outputs: the refusal is not one of made-up numbers."""
    torch.manual_seed(0)
    model, batch = Net(), inputs(4)
    outputs = model(batch["x"])
    halves = [negatives(outputs[n : n + 2], {"x": batch["x"][n : n + 2]}).item() for n in (0, 2)]
    assert abs(negatives(outputs, batch).item() - sum(halves) / 2) > 0.1


@pytest.mark.long
def test_a_temperature_that_is_learned_hides_nothing():
    class Pairs(Net):
        def forward(self, x):
            near = F.normalize(self.layer(x), dim=1) @ F.normalize(x, dim=1).T
            return F.cross_entropy(self.scale * near, torch.arange(x.shape[0]))

    with pytest.raises(ModelError, match="it compares rows with each other"):
        checked(None, Pairs, lambda rows: {"x": torch.randn(rows, WIDTH)})


def test_batch_norm_is_not_the_losss_business():
    class Normed(Net):
        def forward(self, x):
            return self.norm(self.layer(x))

    assert checked(FINE["mean over rows"], Normed) == []


class Experts(Net):
    """Its last parameters see rows in the order of their experts; they are put back behind them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        order = self.layer(x).argmax(1).argsort(stable=True)
        return F.linear(x[order], self.experts)[order.argsort()]


@pytest.mark.parametrize("name", ["mean over rows", "mean over all numbers"])
def test_rows_may_enter_the_loss_in_an_order_of_their_own(name):
    """A bug: values made up in the batch's order were put back as if they were in the experts'."""
    assert checked(FINE[name], Experts) == []
    assert row_mixing.remark(trace_model(Experts(), inputs, FINE[name]), inputs) is None


@pytest.mark.parametrize(
    "loss", [negatives, lambda o, b: -o.var(0).mean()], ids=["negatives", "spread over rows"]
)
def test_rows_in_an_order_of_their_own_hide_no_loss_that_compares_them(loss):
    with pytest.raises(ModelError, match="it compares rows with each other"):
        checked(loss, Experts)


def test_rows_that_come_last_in_a_flattened_dim_are_found():
    """As in language models that put time first: [s, b, d] flattened is not [b, s, d]."""

    class TimeFirst(Net):
        def forward(self, x):
            return self.layer(x[:, :, None].expand(-1, -1, WIDTH).transpose(0, 1).flatten(0, 1))

    def loss(outputs, batch):
        return F.mse_loss(outputs[:, 0], batch["x"].T.flatten())

    assert checked(loss, TimeFirst) == []


def test_a_loss_that_fails_on_made_up_numbers_is_let_be():
    def loss(outputs, batch):
        return F.cross_entropy(outputs[:, :3], batch["label"].clamp(max=2)) + outputs.log().mean()

    assert checked(lambda o, b: (o - 5).log().mean()) == []  # of no number below 5
    assert checked(loss) == []


def test_what_is_too_large_to_be_tried_is_said(monkeypatch):
    monkeypatch.setattr(loss_grouping, "MOST_BYTES", 100)
    assert checked(FINE["mean over rows"]) == [
        "loss: not compared with that of half the rows: at 4 rows its last part takes 0 MiB"
    ]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return self.head(self.table(tokens))


def summed(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["tokens"].flatten(), reduction="sum")


def counted(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["tokens"].flatten())


def root_of_rows(outputs, batch):
    return outputs.square().sum((1, 2)).sqrt().mean()


def test_what_is_too_large_is_tried_on_fewer_tokens(monkeypatch):
    """Bug: of a model with many words and tokens no loss was tried, a sum over rows was planned."""

    def words(rows):
        return {"tokens": torch.arange(rows * 32).view(rows, 32) % WIDTH}

    def traced(model, example, *args, **how):
        lengths.append(example["tokens"].shape[1])
        return tracing.trace_source(model, example, *args, **how)

    def planned(loss):
        """The lengths that the model is traced for; as for other tests, but not from memory."""
        lengths.clear()
        autopipe.plan(
            Words, words, loss=loss, cluster=machine(2), batch_size=8, pp=2, micro_batches=2
        )
        return lengths

    lengths: list[int] = []
    monkeypatch.setattr(checked_trace, "trace_source", traced)
    monkeypatch.setattr(loss_grouping, "MOST_BYTES", 8000)
    monkeypatch.setattr(loss_grouping, "BYTES_OF_FEW", 4000)
    assert planned(root_of_rows) == [32, 10]
    assert planned(counted) == [32]  # a mean over labels is known without it
    with pytest.raises(ModelError, match="it is a sum over rows"):
        planned(summed)
