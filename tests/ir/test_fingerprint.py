"""Which graphs a fingerprint tells apart, and how it names the place where they differ."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.batch.description import describe
from autopipe.frontend.construct import fake_copy
from autopipe.ir.fingerprint import fingerprint, first_difference, lines, trail
from autopipe.tracing.trace import trace
from autopipe.util.seeding import of_draws
from tests.support.staged import trace_model


class Attention(nn.Module):
    def __init__(self, width=16, heads=4, eps=1e-5, bias=True, frozen=False, scale=1.0):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.norm.requires_grad_(not frozen)
        self.heads, self.scale = heads, scale

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return (F.scaled_dot_product_attention(q, k, v) * self.scale).mean()


def graph(**options):
    width = options.get("width", 16)
    return trace_model(Attention(**options), lambda b: {"x": torch.zeros(b, 6, width)}).graph


@cache
def same():
    return graph()


def test_two_builds_of_one_model_agree_whatever_their_weights():
    assert fingerprint(graph()) == fingerprint(same())
    assert len(fingerprint(same())) == 64


CHANGES = {
    "width": ({"width": 32}, "<x> torch.float32[~,6,32,]"),
    "heads": ({"heads": 2}, "unflatten/0 = aten.unflatten.int"),
    "eps": ({"eps": 1e-6}, "norm/layer_norm/0 = aten.layer_norm.default"),
    "bias": ({"bias": False}, "[qkv.weight] parameter"),
    "frozen": ({"frozen": True}, "[norm.bias] parameter False"),
    "scale": ({"scale": 2.0}, "mul/0 = aten.mul.Tensor"),
}


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(("options", "line"), CHANGES.values(), ids=CHANGES)
def test_what_changes_the_model_changes_the_fingerprint_and_is_named(options, line):
    changed = graph(**options)
    assert fingerprint(changed) != fingerprint(same())
    assert first_difference(changed, trail(same())).startswith(line)


def test_an_equal_graph_has_no_difference_and_a_shorter_one_says_so():
    assert first_difference(same(), trail(same())).startswith("nothing")
    assert first_difference(same(), trail(same()) + "0000").startswith(
        "nothing: the plan's model goes"
    )


def test_the_batch_is_one_sign_in_every_line():
    assert lines(same())[0] == "<x> torch.float32[~,6,16,]"


def test_a_constant_that_equals_the_rows_is_no_batch():
    """Traced at 6 rows the batch and the length are both 6; a twin tells which is which."""

    def fixed(rows):
        batch = {"x": torch.zeros(rows, 6, 16)}
        specs = describe({"x": torch.zeros(2, 6, 16)}, {"x": torch.zeros(3, 6, 16)}, 2, 3)
        return trace(fake_copy(Attention()), batch, specs, symbolic=False).graph

    assert fingerprint(fixed(6), fixed(5)) == fingerprint(same())


def test_the_value_of_a_constant_of_the_forward_belongs_to_the_model():
    """Regression: two models that differ in `torch.tensor([...])` alone had one fingerprint."""

    class Weighted(nn.Module):
        def __init__(self, weights):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.weights = weights

        def forward(self, x):
            return (self.layer(x) * torch.tensor(self.weights)).mean()

    first, second = (
        trace_model(Weighted(weights), lambda b: {"x": torch.zeros(b, 2)}).graph
        for weights in ([1.0, 2.0], [1.0, 3.0])
    )
    assert fingerprint(first) != fingerprint(second)
    here = first_difference(first, trail(second))
    assert of_draws(here).startswith("; if lifted_tensor_0 is drawn at random, call torch.manual")
    assert of_draws(lines(first)[0]) == ""
