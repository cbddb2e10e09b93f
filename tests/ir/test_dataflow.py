"""Aliases, writes and what can be made again, worked in small graphs."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse, gradient_values, is_random, obstacle, statistics
from autopipe.ir.graph import Input, Ref, State
from tests.support.inprocess import traced
from tests.support.staged import trace_model


class Model(nn.Module):
    """`forward` is given by the test; there is one weight, and a counter."""

    def __init__(self, run):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("table", torch.arange(4.0))
        self.run = run

    def forward(self, x):
        return self.run(self, x).mean()


def flow_of(run):
    return analyse(trace_model(Model(run), lambda b: {"x": torch.ones(b, 4)}).graph)


def local(flow):
    """Names of the nodes that any stage can make."""
    return [node.name for node in itertools.compress(flow.graph.nodes, flow.local)]


def root(flow, name):
    return str(flow.root[Ref(name)])


def test_the_picture_of_the_docstring():
    """x and y are one storage; relu_ writes it through x; z must see what it wrote."""

    def run(model, batch):
        x = model.layer(batch)
        y = x.view(-1)
        torch.relu_(x)
        return x + y.view(-1, 4)

    flow = flow_of(run)
    assert [n.name for n in flow.graph.nodes[:5]] == [
        "layer/linear/0", "view/0", "relu_/0", "view/1", "add/0",
    ]  # fmt: skip
    assert {root(flow, name) for name in ("view/0", "relu_/0", "view/1")} == {"layer/linear/0"}
    assert root(flow, "add/0") == "add/0"
    assert flow.writers == {Ref("layer/linear/0"): (2,)}
    assert flow.before[3] == (2,), "view/1 reads y, made before the write: it must stay after it"
    assert flow.before[1] == (), "view/0 stands before it"


def test_every_part_of_a_split_is_the_storage_it_came_from():
    def run(model, x):
        a, b = model.layer(x).chunk(2, 1)
        return a.reshape(-1, 1, 2) + b.t().t()

    flow = flow_of(run)
    assert {str(flow.root[Ref("chunk/0", n)]) for n in (0, 1)} == {"layer/linear/0"}
    assert root(flow, "t/1") == "layer/linear/0", "a view of a view"


def test_what_lies_in_an_operand_although_no_schema_says_so():
    """Bug: of several operands an einsum's result was taken for the first one's memory. So a bias
    that was added to it in place wrote the weight, and the model was refused."""

    def run(model, x):
        same = torch.conj_physical(model.layer(x))
        moved = torch.einsum("bi->ib", same)
        return torch.einsum("oi,ib->bo", model.layer.weight, moved).add_(model.layer.bias)

    flow = flow_of(run)
    assert root(flow, "conj_physical/0") == root(flow, "einsum/0") == "layer/linear/0"
    assert flow.writers == {Ref("einsum/1"): (4,)}


def test_a_cast_is_no_view():
    """Bug: a mask that was cast and then filled in place held all nodes that read it together."""

    def run(model, x):
        cast, same = x.double().mul_(2), model.layer(x).float().add_(1)
        return same + cast.float()

    assert flow_of(run).writers == {Ref("to/0"): (1,), Ref("layer/linear/0"): (4,)}


def test_users_are_positions_and_the_result_is_used_after_the_last():
    flow = flow_of(lambda m, x: m.layer(x) + x)
    assert flow.users[Input("x")] == (0, 1)
    assert flow.users[Ref("mean/0")] == (3,)
    assert flow.position(Ref("add/0")) == 1 and flow.position(Input("x")) == -1


def test_batch_norm_writes_its_statistics_though_its_schema_does_not_say_so():
    flow = traced("unet")[1]
    where = flow.graph.index["down.0.1/batch_norm/0"]
    assert flow.writers[State("down.0.1.running_mean")] == (where,)
    assert flow.writers[State("down.0.1.running_var")] == (where,)
    assert State("down.0.1.num_batches_tracked") in flow.writers


def test_statistics_are_what_a_block_writes_and_no_result_of_it_reads():
    """A second run may write copies of them, in the module that they belong to."""
    flow = traced("resnet")[1]
    block = find_blocks(flow.graph)[0]
    own = range(block.first, block.stop)
    found = {state.name for state in statistics(flow, own, block.prefix)}
    kept = ("num_batches_tracked", "running_mean", "running_var")
    assert found == {
        name for name in flow.graph.states if name.startswith("blocks.0.") and name.endswith(kept)
    }
    assert obstacle(flow, own, block.prefix) is None and obstacle(flow, own) is not None
    assert not statistics(flow, own, "elsewhere.")


def test_an_average_that_is_computed_with_is_no_statistics():
    def run(model, x):
        model.table.mul_(0.9).add_(x.mean(0))
        return model.layer(x * model.table)

    flow = flow_of(run)
    assert State("table") in flow.writers
    assert not statistics(flow, range(len(flow.graph.nodes)), "")


# What any stage can make again.


def test_what_comes_from_the_batch_buffers_and_numbers_alone_is_local():
    def run(model, x):
        mask = (x > 0) & (torch.arange(4) < 2)
        return model.layer(x * model.table).masked_fill(mask, 0.0) + torch.tensor(1.0)

    flow = flow_of(run)
    assert set(local(flow)) == {
        "gt/0", "arange/0", "lt/0", "__and__/0", "mul/0", "lift_fresh_copy/0",
    }  # fmt: skip


def test_what_needs_a_weight_is_not_local():
    assert local(flow_of(lambda m, x: x * m.layer.weight.detach().sum())) == []


def test_what_draws_random_numbers_is_not_local():
    flow = flow_of(lambda m, x: m.layer(x) * F.dropout(x.exp(), 0.5) + torch.rand(4))
    assert local(flow) == ["exp/0"]


def test_what_reads_a_written_buffer_is_not_local():
    """Made again in another stage it would read another stage's copy."""

    def run(model, x):
        model.count.add_(1)
        return model.layer(x) + model.count * 2 + model.table * 2

    assert local(flow_of(run)) == ["mul/1"]


def test_what_is_filled_in_place_with_local_values_is_local():
    def run(model, x):
        positions = torch.zeros(4)
        positions[1:] = x[0, 1:]
        return model.layer(x) + positions

    flow = flow_of(run)
    assert "copy_/0" in local(flow) and "zeros/0" in local(flow)


def test_what_is_filled_in_place_with_an_activation_is_not_local_nor_are_its_aliases():
    def run(model, x):
        out = torch.zeros(4)
        view = out[1:]
        out[0] = model.layer(x).sum()
        return view + 1 + x[:, 1:]

    flow = flow_of(run)
    assert not {"zeros/0", "slice/0", "copy_/0", "add/0"} & set(local(flow))


def test_the_masks_and_positions_of_the_zoo_are_local():
    for name, few in {"gpt2": 18, "llama": 33, "t5": 60, "mask": 17}.items():
        flow = traced(name)[1]
        assert sum(flow.local) >= few, name
        states = flow.graph.states
        for node in itertools.compress(flow.graph.nodes, flow.local):
            read = [states[v.name].kind for v in node.values() if isinstance(v, State)]
            assert "parameter" not in read, node


# Random nodes.


def random_nodes(run):
    return [node.name for node in flow_of(run).graph.nodes if is_random(node)]


def test_nodes_that_draw():
    def run(model, x):
        y = model.layer(x)
        y = torch.ops.aten.native_dropout_backward(y, y > 0, 2.0)  # bug: a KeyError, it has no p
        y = F.dropout(y, 0.5) + F.dropout(y, 0.0) + F.dropout(y, 0.5, training=False)
        y = y + torch.rand_like(y) + torch.bernoulli(y.sigmoid()) + F.rrelu(y, training=True)
        q = y[:, None, None]
        y = y + F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)[:, 0, 0]
        return y + F.scaled_dot_product_attention(q, q, q)[:, 0, 0]

    assert random_nodes(run) == [
        "dropout/0",
        "rand_like/0",
        "bernoulli/0",
        "rrelu/0",
        "scaled_dot_product_attention/0",
    ]


def test_an_lstm_draws_only_with_dropout_between_its_layers():
    class Recurrent(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, 2, dropout=dropout, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0].mean()

    for dropout in (0.0, 0.5):
        graph = trace_model(Recurrent(dropout), lambda b: {"x": torch.ones(b, 3, 4)}).graph
        assert [is_random(n) for n in graph.nodes if "lstm" in n.op] == [dropout > 0]


def test_zeros_carry_a_gradient_once_a_view_of_them_is_written_with_one():
    """Bug story: the sum was said to carry none, and tensor-parallel ranks missed its gradient."""

    def run(model, batch):
        zeros = torch.zeros(2, batch.shape[0], 4)
        before = zeros.exp()
        view = zeros[0]
        view.copy_(model.layer(batch))
        return (zeros.sum(0) + before.detach()).cos()

    flow = flow_of(run)
    carrying = {str(value) for value in gradient_values(flow.graph)}
    assert {"zeros/0", "select/0", "copy_/0", "sum/0", "cos/0"} <= carrying
    assert "exp/0" not in carrying, "made before the write"
