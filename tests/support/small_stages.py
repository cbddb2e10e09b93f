"""Stages of a few ops, of which cheap ones may run again in backward."""

import torch
from torch import nn

from autopipe.joint.joint_graph import Layout

ROWS, WIDTH, FLOAT = 3, 8, 4
TENSOR = ROWS * WIDTH * FLOAT


class Stage(nn.Module):
    """`run(self, x)` is what the stage does."""

    def __init__(self, run):
        super().__init__()
        self.one, self.two, self.norm = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )
        self.run = run

    def forward(self, x):
        return (self.run(self, x),)


def norm_and_product(m, x):
    return m.one(m.norm(x))


def activation(m, x):
    return m.two(nn.functional.gelu(m.one(x)))


def residual_sum(m, x):
    return m.two(m.norm(x + m.one(x)))


def gated(m, x):
    return m.two(nn.functional.silu(m.one(x)) * m.two(x))


def attention_of_the_rows(m, x):
    scores = m.one(x) @ m.two(x).T
    return torch.softmax(scores, -1) @ x


def written_in_place(m, x):
    return m.two(m.one(x).relu_())


def chain_of_cheap_ops(m, x):
    return m.two(torch.tanh(torch.exp(torch.sin(m.one(x)))))


def in_three_parts(m, x):
    """Views of a kept product: they are looked at again, and nothing is made."""
    first, second, third = m.one(x).view(ROWS, 2, -1).split((1, 2, 1), -1)
    return m.two(torch.cat((first, torch.tanh(second), third), -1).flatten(1))


RUNS = (
    norm_and_product,
    activation,
    residual_sum,
    gated,
    attention_of_the_rows,
    written_in_place,
    chain_of_cheap_ops,
    in_three_parts,
)


def layouts():
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    return [Layout.of(x)], [Layout.of(x.detach())]
