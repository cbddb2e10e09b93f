"""What forward keeps where cheap ops may run again: golden cases, and brute force as an oracle."""

import itertools

import pytest
import torch
from torch import nn

from autopipe.joint.joint_graph import Layout, differentiate, is_of_state, storages
from autopipe.joint.run_again import CHEAP, chosen
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.stages.lower import Lowered
from autopipe.stages.op_tape import MADE, SEGMENT
from tests.support.small_stages import (
    FLOAT,
    ROWS,
    TENSOR,
    Stage,
    activation,
    attention_of_the_rows,
    chain_of_cheap_ops,
    gated,
    in_three_parts,
    layouts,
    norm_and_product,
    residual_sum,
    written_in_place,
)
from tests.support.staged import lowered, trace_model

KEPT = {
    norm_and_product: (0, "x came from elsewhere; the norm runs again"),
    activation: (TENSOR, "the product's result; gelu runs again"),
    residual_sum: (TENSOR, "the sum; the norm runs again, the sum does not"),
    gated: (2 * TENSOR, "both factors before the gate"),
    attention_of_the_rows: (2 * TENSOR + ROWS * ROWS * FLOAT, "q, k and the probabilities"),
    written_in_place: (TENSOR, "as autograd: what is written has no first value any more"),
    chain_of_cheap_ops: (TENSOR, "the product's result, from which all else follows"),
    in_three_parts: (TENSOR, "the product's result; its parts are views"),
}


@pytest.mark.parametrize("run", KEPT, ids=lambda run: run.__name__)
def test_bytes_that_are_kept(run):
    expected, _ = KEPT[run]
    assert split(Lowered(None, Stage(run), ROWS), *layouts(), wanted=Wanted(False, True)).kept == (
        expected
    )


def test_of_equal_bytes_what_is_latest_is_kept():
    """The sum is kept, and not the product from which it could be added again."""
    joint = split(Lowered(None, Stage(residual_sum), ROWS), *layouts(), wanted=Wanted(False, True))
    assert "add.Tensor" not in joint.backward_input.code.split("mm")[0]
    assert "native_layer_norm" in joint.backward_input.code


@pytest.mark.parametrize("run", KEPT, ids=lambda run: run.__name__)
def test_no_other_choice_keeps_less(run):
    """Every set of values from which backward can be computed holds as many bytes or more."""
    graph = differentiate(Lowered(None, Stage(run), ROWS), *layouts())
    inside = set(graph.forward)
    needed = {
        read
        for call in graph.backward
        for read in call.all_input_nodes
        if read in inside and not is_of_state(graph, read)
    }
    owned = storages([*graph.states, *graph.arguments])
    written = {
        s for n in graph.forward if n.target.__name__.endswith("_.default") for s in storages([n])
    }

    def cheap(node):
        call = node.all_input_nodes[0] if "getitem" in str(node.target) else node
        op = call.target
        view = storages([call]) <= storages(call.all_input_nodes)
        named = op.overloadpacket.__name__ in CHEAP or torch.Tag.pointwise in op.tags
        return (view or named) and not storages([call]) & written

    def follows(kept):
        """Whether all that backward reads can be made from `kept`."""
        there = set()
        for node in graph.forward:
            made = cheap(node) and all(
                read in there or read not in inside for read in node.all_input_nodes
            )
            if made or is_of_state(graph, node) or storages([node]) <= kept | owned:
                there.add(node)
        return needed <= there

    sizes = {s: n for node in graph.forward for s, n in node.meta[MADE].storages.items()}
    choices = sorted(sizes.keys() - owned)
    least = min(
        sum(sizes[s] for s in kept)
        for count in range(len(choices) + 1)
        for kept in itertools.combinations(choices, count)
        if follows(set(kept))
    )
    assert least == KEPT[run][0]
    assert needed.isdisjoint(chosen(graph, (), least=True))


class Block(nn.Module):
    """Reads a norm that stands before it, which therefore runs again in its backward."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x * self.scale).tanh()


class NormsOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return x.square().mean()


def test_results_of_one_op_are_taken_where_it_runs_again():
    """Bug: the norm ran again where the block reads its result, and its mean and variance were
    taken where the norm's own backward reads them: islands of a compiler gave the three as one
    value, which is none of a tensor, and the first step ended in an AssertionError."""
    model = NormsOutside()
    found = trace_model(model, lambda rows: {"x": torch.randn(rows, 8)})
    (stage,) = lowered(found, model, [], 2)
    given = [Layout.dense((2, 8), torch.float32)]
    joint = split(stage, given, [Layout.dense((), torch.float32)], wanted=Wanted(False, True))
    twice = [n for n in joint.backward_input.graph.nodes if "native_layer_norm.d" in str(n.target)]
    assert len(twice) == 2
    for norm in twice:
        parts = [norm.next, norm.next.next, norm.next.next.next]
        assert {*parts} == {*norm.users}
        assert {part.meta[SEGMENT] for part in parts} == {norm.meta[SEGMENT]}
