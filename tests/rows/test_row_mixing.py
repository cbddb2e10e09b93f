"""Planning says which op of a model makes a row depend on the other rows of its micro-batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.rows import row_mixing
from tests.support.shell import LINE, changed
from tests.support.staged import trace_model

WIDTH, TOKENS = 6, 3


def inputs(rows):
    return {"x": torch.randn(rows, TOKENS, WIDTH), "target": torch.randn(rows, TOKENS, WIDTH)}


def loss(outputs, batch):
    return (outputs - batch["target"]).square().mean()


class Between(nn.Module):
    """Two layers, and `mix` between them."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.mix(self.up(x)))


def said(mix, inputs=inputs, loss=loss):
    """The op that was named, without its line."""
    line = row_mixing.remark(trace_model(Between(mix), inputs, loss), inputs)
    return line and line.split(": ")[1].split(" makes")[0]


def over_rows(h):
    """An attention in which rows are the tokens: `batch_first` was forgotten."""
    return F.scaled_dot_product_attention(*[h.transpose(0, 1)[:, None]] * 3)[:, 0].transpose(0, 1)


def sorted_and_back(h):
    order = h.sum((1, 2)).argsort()
    return F.gelu(h[order])[order.argsort()]


def first_come(h):
    """A mixture of experts whose first two tokens are taken, whichever row they are of."""
    flat = h.flatten(0, 1)
    place = (flat[:, :1] > 0).long().cumsum(0)
    return (flat * (place <= 2)).view_as(h)


def experts(h):
    """A mixture of experts that takes all tokens: each one where its largest entry says."""
    flat = h.flatten(0, 1)
    order = flat.argmax(1).argsort()
    made = flat.new_zeros(flat.shape).index_add(0, order, torch.tanh(flat[order]))
    return made.view_as(h)


class Positive(nn.Module):
    """Less the mean of the rows that are positive: how many there are depends on values."""

    def forward(self, h):
        return h - h[h.sum((1, 2)) > 0].sum(0)


MIX = {
    "less the mean": (lambda h: h - h.mean(0), "mean()"),
    "less the largest": (lambda h: h - h.amax(0, keepdim=True), "amax()"),
    "of the row before": (lambda h: h + h.roll(1, 0), "roll()"),
    "the other way round": (lambda h: h + h.flip(0), "flip()"),
    "running sums": (lambda h: h.cumsum(0), "cumsum()"),
    "a share of the batch": (lambda h: h.softmax(0), "softmax()"),
    "a norm of the batch": (lambda h: h / h.norm(), "linalg_vector_norm()"),
    "attention over rows": (over_rows, "scaled_dot_product_attention()"),
    "similar rows": (
        lambda h: h * (h.mean(1) @ h.mean(1).T).softmax(1).diag()[:, None, None],
        "softmax()",
    ),
    "experts with room for two": (first_come, "cumsum()"),
    "batch norm": (lambda h: F.batch_norm(h, None, None, training=True), "batch_norm()"),
    "a call that runs as it is": (Positive(), "mix"),
    "less the mean, with dropout": (lambda h: F.dropout(h - h.mean(0), 0.5), "mean()"),
}


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("name", MIX)
def test_an_op_that_mixes_rows_is_named(name):
    mix, op = MIX[name]
    assert said(mix) == op


APART = {
    "layers": nn.GELU(),
    "a norm of each row": nn.LayerNorm(WIDTH),
    "an instance norm": lambda h: F.instance_norm(h),
    "the mean of a row": lambda h: h - h.mean(1, keepdim=True),
    "attention over tokens": lambda h: F.scaled_dot_product_attention(h, h, h),
    "sums over tokens": lambda h: h.cumsum(1),
    "dropout": nn.Dropout(0.5),
    "noise": lambda h: h + torch.randn_like(h),
    "rows and tokens as one": lambda h: torch.tanh(h.flatten(0, 1)).unflatten(0, (-1, TOKENS)),
    "all rows twice": lambda h: sum(torch.tanh(torch.cat([h, -h])).chunk(2)),
    "sorted, and put back": sorted_and_back,
    "experts that take all": experts,
    "the number of rows": lambda h: h / h.shape[0] ** 0,
}


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("name", APART)
def test_of_rows_that_stay_apart_nothing_is_said(name):
    assert said(APART[name]) is None


def test_what_reaches_no_loss_is_not_named():
    def logged(h):
        logged.mean = h.detach().mean(0)
        return h

    assert said(logged) is None


def test_a_loss_may_be_a_mean_over_rows_that_a_parameter_weighs():
    """A term of the model's own: halves have two means, and their mean is that of the whole."""

    class Balanced(Between):
        def __init__(self):
            super().__init__(nn.Tanh())
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return super().forward(x), self.weight * self.up(x).square().mean()

    def both(outputs, batch):
        return loss(outputs[0], batch) + outputs[1]

    assert row_mixing.remark(trace_model(Balanced(), inputs, both), inputs) is None


def test_a_loss_may_leave_labels_out():
    """Rows count unequally in it, which is no matter of the model."""

    def some(rows):
        labels = torch.where(torch.arange(rows * TOKENS) % 5 == 0, -100, 1).view(rows, TOKENS)
        return {**inputs(rows), "labels": labels}

    def entropy(outputs, batch):
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    assert said(nn.Tanh(), some, entropy) is None
    assert said(lambda h: h - h.mean(0), some, entropy) == "mean()"


def test_the_line_is_the_user_s(autopipe):
    """It is said of a plan that cuts the batch, and the plan is made."""
    mixing = "return self.down(y - y.mean(0))"
    autopipe.write("net.py", changed("return self.down(y.relu())", mixing))
    options = "plan net.py --cluster cpu:2 --pp 2 --batch 8 -o plan.json".split()
    said = autopipe(*options, "--micro-batches", "2")
    assert said.code == 0
    line = LINE["        return self.down(y.relu())"]
    mixes = f"net.py:{line}: mean() makes a row depend on the other rows of its micro-batch"
    assert f"{mixes}: each micro-batch is computed by itself" in said.err
    assert "mean()" not in autopipe(*options, "--micro-batches", "1", "--dp", "1").err
