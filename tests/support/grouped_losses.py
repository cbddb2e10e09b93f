"""A small model, and losses of it that do or do not depend on how rows are grouped."""

import torch
from torch import nn
from torch.nn import functional as F

from autopipe import SumCount
from autopipe.rows import loss_grouping
from tests.support.staged import trace_model

WIDTH = 6


OTHERWISE = (
    'loss_over = "micro-batch" takes the mean of each micro-batch\'s own loss, and '
    "--micro-batches 1 --dp 1 leaves the batch whole"
)


TOGETHER = f'loss_over = "batch" computes it over all rows of the batch, in two passes; {OTHERWISE}'


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x):
        return self.layer(x)


def inputs(rows):
    """x and labels by position, of which row i has i that no loss counts."""
    labels = torch.arange(rows * WIDTH).reshape(rows, WIDTH) % WIDTH
    ignored = torch.arange(WIDTH) < torch.arange(rows)[:, None] % WIDTH
    return {
        "x": torch.randn(rows, WIDTH),
        "label": torch.arange(rows) % WIDTH,
        "labels": labels.masked_fill(ignored, -100),
    }


def checked(loss, model=Net, inputs=inputs, loss_over="rows"):
    """What was said of a loss."""
    said = []
    loss_grouping.check(trace_model(model(), inputs, loss), inputs, loss, loss_over, said.append)
    return said


def negatives(outputs, batch):
    """Each row beside each other one: what belongs together is on the diagonal."""
    near = F.normalize(outputs, dim=1) @ F.normalize(batch["x"], dim=1).T
    return F.cross_entropy(4 * near, torch.arange(outputs.shape[0]))


def tokens(outputs, batch):
    """A mean over the tokens that count, of which the rows have unequally many."""
    logits = outputs[:, :, None] * torch.arange(1.0, 1 + WIDTH)
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"])


def tokens_counted(outputs, batch):
    logits = (outputs[:, :, None] * torch.arange(1.0, 1 + WIDTH)).transpose(1, 2)
    total = F.cross_entropy(logits, batch["labels"], reduction="sum")
    return SumCount(total, (batch["labels"] != -100).sum())


FINE = {
    "mean over rows": lambda o, b: F.cross_entropy(o, b["label"]),
    "mean over all numbers": lambda o, b: (o - b["x"]).square().mean(),
    "mean over labels": tokens,
    "mean over classes that weigh": lambda o, b: F.cross_entropy(
        o, b["label"], torch.arange(1.0, 7.0)
    ),
    "sum and count": tokens_counted,
    "mean of each row's sum": lambda o, b: (o - b["x"]).square().sum(1).mean(),
    "sum over rows, divided": lambda o, b: o.square().sum() / o.shape[0],
    "dropout": lambda o, b: F.dropout(o, 0.5).square().mean(),
    "probabilities": lambda o, b: F.binary_cross_entropy(o, b["x"].sigmoid()),
    "sigmoid": lambda o, b: F.binary_cross_entropy(o.sigmoid(), b["x"].sigmoid()),
    "a mean near zero": lambda o, b: o.mean(),
    "bf16": lambda o, b: o.bfloat16().mean(),
    "weights of classes": lambda o, b: F.mse_loss(o * torch.arange(1.0, 7.0), b["x"]),
    "in place": lambda o, b: o.relu_().mean() + b["x"].clone().clamp_(0).mean(),
    "rows times tokens": lambda o, b: F.mse_loss(o.reshape(-1), b["x"].reshape(-1)),
}
