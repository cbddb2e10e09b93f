"""Ops of the user's own whose backward reads numbers, as transformers' loop over experts does."""

import pytest
import torch
from torch import nn

from autopipe.errors import AutopipeError, ModelError
from tests.support.odd_models import Net, built, planned, unlike


@torch.library.custom_op("autopipe_tests::by_expert", mutates_args=())
def by_expert(
    rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, how: str
) -> torch.Tensor:
    """Rows, which stand in the order of their experts, through the weight of each one's own."""
    out, start = rows.new_zeros(len(rows), weights.shape[2]), 0
    for expert, end in enumerate(ends.tolist()):
        out[start:end], start = rows[start:end] @ weights[expert], end
    return out


@by_expert.register_fake
def _(rows, weights, ends, how):
    return rows.new_empty(len(rows), weights.shape[2])


def keep(ctx, inputs, output):
    *tensors, ctx.how = inputs
    ctx.save_for_backward(*tensors)


def back(ctx, gradient):
    rows, weights, ends = ctx.saved_tensors
    of_rows, of_weights, start = torch.zeros_like(rows), torch.zeros_like(weights), 0
    for expert, end in enumerate(READ[ctx.how](ends)):
        of_rows[start:end] = gradient[start:end] @ weights[expert].T
        of_weights[expert] = rows[start:end].T @ gradient[start:end]
        start = end
    return of_rows, of_weights, None, None


by_expert.register_autograd(back, setup_context=keep)

READ = {
    "a list": lambda ends: ends.tolist(),
    "each": lambda ends: [end.item() for end in ends],
    "by numpy": lambda ends: ends.numpy(),
    "a quotient": lambda ends: [int(end * (1 / ends[-1].item()) * ends[-1].item()) for end in ends],
}


class Experts(Net):
    """Each row goes through one of three experts."""

    how = "a list"

    def begin(self):
        self.experts = nn.Parameter(torch.randn(3, 8, 8) / 3)

    def inside(self, hidden):
        hidden = self.middle(hidden)
        best, which = hidden[:, :3].softmax(1).max(1)
        order = which.argsort(stable=True)
        ends = (which[:, None] == torch.arange(3)).sum(0).cumsum(0)
        made = by_expert(hidden[order], self.experts, ends, self.how)
        return hidden + (made * best[order, None])[order.argsort()]


@pytest.mark.parametrize("how", ["a list", "each"])
def test_a_backward_that_reads_numbers_is_planned_and_run(how):
    kind = type("Read", (Experts,), {"how": how})
    plan = planned(built(kind), pp=2)
    assert len(plan.stages) == 2
    assert unlike(built(kind), cuts=["relu/1"]) == []


def test_such_a_backward_is_not_compiled():
    """A graph of it would hold the numbers of one batch."""
    line = r"test_read_in_backward.py:\d+ .*ends.tolist\(\).* is not compiled"
    with pytest.raises(AutopipeError, match=f"compiled stages were asked for, and .*{line}"):
        planned(built(Experts), compile=True)


@pytest.mark.parametrize("how", ["by numpy", "a quotient"])
def test_a_backward_that_fails_without_values_is_refused_with_its_line(how):
    with pytest.raises(ModelError, match=r"test_read_in_backward.py:\d+ .*without values"):
        planned(built(type("Read", (Experts,), {"how": how})))
