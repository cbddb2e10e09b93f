"""What a traced model looks like, and that the trace stands for the model and nothing else."""

import copy
import inspect
import re
import textwrap
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.batch.description import describe
from autopipe.errors import CaptureError, ModelError
from autopipe.frontend.construct import fake_copy
from autopipe.ir.fingerprint import fingerprint
from autopipe.ir.graph import BATCH, Ref, State
from autopipe.tracing.capture.exported_nodes import LOSS_SCOPE
from autopipe.tracing.trace import trace
from tests.support.inprocess import traced
from tests.support.long import chosen
from tests.support.row_graphs import graph_of, node, ops
from tests.support.staged import trace_model
from tests.support.zoo import ZOO


class Tiny(nn.Module):
    def __init__(self, width=4, eps=1e-5):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(2)])

    def forward(self, x):
        x = self.norm(x)
        for layer in self.layers:
            x = F.relu(layer(x).view(x.shape[0] * 2, -1)).view_as(x)
        return x


def unwrapped(text):
    """Lines as they are, those that go on further in joined to the one they go on from."""
    return re.sub(r"\n {4}\s*", " ", textwrap.dedent(text)).strip()


def test_a_graph_reads_like_the_model():
    assert unwrapped(str(graph_of(Tiny()))) == unwrapped("""
        <x>: float32[b, 4]
        [norm.weight]: parameter float32[4]
        [norm.bias]: parameter float32[4]
        [layers.0.weight]: parameter float32[4, 4]
        [layers.1.weight]: parameter float32[4, 4]
        norm/layer_norm/0 = aten.layer_norm.default(<x>, (4), [norm.weight], [norm.bias],
            1e-05, False) -> float32[b, 4]
        layers.0/linear/0 = aten.linear.default(norm/layer_norm/0, [layers.0.weight])
            -> float32[b, 4]
        view/0 = aten.view.default(layers.0/linear/0, (2*b, -1)) -> float32[2*b, 2]
        relu/0 = aten.relu.default(view/0) -> float32[2*b, 2]
        view_as/0 = aten.view_as.default(relu/0, norm/layer_norm/0) -> float32[b, 4]
        layers.1/linear/0 = aten.linear.default(view_as/0, [layers.1.weight]) -> float32[b, 4]
        view/1 = aten.view.default(layers.1/linear/0, (2*b, -1)) -> float32[2*b, 2]
        relu/1 = aten.relu.default(view/1) -> float32[2*b, 2]
        view_as/1 = aten.view_as.default(relu/1, view_as/0) -> float32[b, 4]
        loss()/mean/0 = aten.mean.default(view_as/1) -> float32[]
        return (loss()/mean/0)
    """)


def test_every_node_knows_the_line_it_came_from():
    lines, first = inspect.getsourcelines(Tiny.forward)
    wanted = {f"{__file__}:{first + n}" for n, line in enumerate(lines) if "layer(x)" in line}
    linear = node(graph_of(Tiny()), "view/0")
    assert {linear.place} == wanted


# One graph, however many rows it was traced with.


def at_rows(case_or_model, inputs, loss, count):
    """A trace with the number of rows baked in, as a batch of `count` rows gives it."""
    batch = inputs(count)
    specs = describe(inputs(2), inputs(3), 2, 3)
    skeleton = fake_copy(case_or_model)
    real = lambda: case_or_model  # noqa: E731
    return trace(skeleton, batch, specs, loss, symbolic=False, real=real).graph


@pytest.mark.parametrize("name", chosen(("gpt", "resnet", "lstm"), now=("resnet",)))
def test_symbolic_and_fixed_rows_give_the_same_names_and_fingerprint(name):
    case = ZOO[name]
    symbolic = traced(name)[0].graph
    one, four = (at_rows(case.model(), case.inputs, case.loss, b) for b in (1, 4))
    names = [n.name for n in symbolic.nodes]
    assert names == [n.name for n in one.nodes] == [n.name for n in four.nodes]
    assert fingerprint(symbolic) == fingerprint(one, four) == fingerprint(four, one)


@pytest.mark.long
def test_a_whole_slice_is_no_node():
    """`hidden[slice(0, None)]` of llama: eager returns `hidden`, a symbolic trace had a slice."""
    case = ZOO["llama"]
    symbolic = traced("llama")[0].graph
    # Not one row: for that, its mask code asks whether sequences are packed into it.
    three, four = (at_rows(case.model(), case.inputs, case.loss, b) for b in (3, 4))
    assert [n.name for n in symbolic.nodes] == [n.name for n in four.nodes]
    assert fingerprint(symbolic) == fingerprint(three, four)


# What a model is made of.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x))


def test_a_tied_parameter_is_one_state_with_all_its_names():
    graph = graph_of(Tied(), lambda b: {"x": torch.ones(b, 3, dtype=torch.long)})
    assert list(graph.states) == ["embedding.weight"]
    assert graph.states["embedding.weight"].aliases == ("head.weight",)


def test_a_frozen_parameter_is_a_parameter_that_does_not_train():
    states = traced("frozen")[0].graph.states
    assert not states["embedding.weight"].trainable
    assert states["layers.1.weight"].trainable
    assert {s.kind for s in states.values()} == {"parameter"}


def test_buffers_and_constants_are_states_too():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("kept", torch.ones(4))
            self.register_buffer("dropped", torch.ones(4), persistent=False)

        def forward(self, x):
            return x * self.weight * self.kept * self.dropped * torch.tensor([1.0, 2, 3, 4])

    graph = graph_of(Model())
    kinds = {name: (state.kind, state.persistent) for name, state in graph.states.items()}
    (constant,) = set(kinds) - {"weight", "kept", "dropped"}
    assert kinds["weight"] == ("parameter", True)
    assert kinds["kept"] == ("buffer", True)
    assert kinds["dropped"] == ("buffer", False)
    assert kinds[constant][0] == "constant"
    assert graph.constants[constant].tolist() == [1, 2, 3, 4]


def test_batch_norm_stays_in_training_and_counts_its_batches():
    graph = traced("unet")[0].graph
    norm = node(graph, "down.0.1/batch_norm/0")
    assert norm.args[5] is True and norm.args[3] == State("down.0.1.running_mean")
    assert node(graph, "down.0.1/add_/0").args[0] == State("down.0.1.num_batches_tracked")


def test_evaluation_is_another_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    takes_x = Wrapped(model)
    training, evaluation = graph_of(takes_x), graph_of(takes_x, training=False)
    assert node(training, "model.1/dropout/0").args[2] is True
    assert node(evaluation, "model.2/batch_norm/0").args[5] is False
    assert not any("add_" in op for op in ops(evaluation))


class Wrapped(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def test_the_calls_of_a_module_are_told_apart():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Wrapped(nn.Linear(4, 4))

        def forward(self, x):
            return self.layer(self.layer(x))

    names = [n.name for n in graph_of(Twice()).nodes]
    assert names == ["layer.model/linear/0", "layer.model@1/linear/0", "loss()/mean/0"]


def test_what_the_loss_computes_is_in_a_scope_of_its_own():
    graph = traced("counted")[0].graph
    assert [n.name for n in graph.nodes if n.scopes == (LOSS_SCOPE,)] == [
        f"{LOSS_SCOPE}/cross_entropy_loss/0",
        f"{LOSS_SCOPE}/ne/0",
        f"{LOSS_SCOPE}/sum/0",
    ]
    assert graph.outputs == (Ref("loss()/cross_entropy_loss/0"), Ref("loss()/sum/0"))


# What goes in and comes out.


def test_inputs_of_all_kinds():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 4)

        def forward(self, ids, mask=None, *, extra, scale=2.0, mode="sum"):
            x = self.embedding(ids) * scale + extra["a"][0]
            x = x.masked_fill(mask[..., None], 0.0)
            return x.sum() if mode == "sum" else x.mean()

    def inputs(b):
        return {
            "ids": torch.ones(b, 3, dtype=torch.int32),
            "mask": torch.zeros(b, 3, dtype=torch.bool),
            "extra": {"a": [torch.ones(b, 3, 4)]},
            "scale": 3.0,
            "mode": "mean",
        }

    graph = graph_of(Model(), inputs, None)
    assert {path: str(spec) for path, spec in graph.inputs.items()} == {
        "ids": "int32[b, 3]",
        "mask": "bool[b, 3]",
        "extra.a.0": "float32[b, 3, 4]",
    }
    assert node(graph, "mul/0").args[1] == 3.0
    assert ops(graph)[-1] == "mean"


@dataclass
class Output:
    loss: torch.Tensor
    note: str = ""


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: {"loss": x, "hidden": x + 1}, lambda x: Output(x)]
)
def test_a_loss_comes_out_by_itself_in_a_dict_or_as_an_attribute(wrap):
    class Model(Tiny):
        def forward(self, x):
            return wrap(super().forward(x).sum())

    graph = graph_of(Model(), loss=None)
    assert graph.outputs == (Ref("sum/0"),)
    assert graph.nodes[-1].name == "sum/0", "what no result needs is not in the graph"


def test_a_model_without_a_scalar_and_without_a_loss_is_refused():
    with pytest.raises(ModelError) as error:
        graph_of(Tiny(), loss=None)
    assert str(error.value) == (
        f"{__file__}:{Tiny.forward.__code__.co_firstlineno}: the model gives a tensor of shape "
        "(2, 4); a loss is a scalar tensor or autopipe.SumCount(sum, count)\n"
        "hint: give a loss(outputs, batch) function"
    )


def test_one_tensor_passed_twice_is_two_inputs():
    """`labels=tokens` in the example must not make the graph read the tokens for labels."""

    def twice(b):
        x = torch.ones(b, 4)
        return {"x": x, "y": x}

    class Model(Tiny):
        def forward(self, x, y):
            return (super().forward(x) - y).square().mean()

    graph = graph_of(Model(), twice, None)
    used = {str(v) for n in graph.nodes for v in n.values()}
    assert {"<x>", "<y>"} <= used


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("of", ["inputs", "weights"])
def test_a_size_that_depends_on_values_is_refused_with_its_line(of):
    """It is what the model gives: no lines of forward give tensors of fixed sizes."""

    class Model(Tiny):
        def forward(self, x):
            y = super().forward(x)
            return (x if of == "inputs" else y)[x > 2] + y.mean()  # this line

    lines, first = inspect.getsourcelines(Model.forward)
    line = next(first + n for n, text in enumerate(lines) if "this line" in text)
    with pytest.raises(CaptureError) as error:
        graph_of(Model(), loss=lambda outputs, batch: outputs.mean())
    assert str(error.value).startswith(f"{__file__}:{line}")
    assert "a size here depends on the values of a tensor" in str(error.value)


def test_a_batch_expression_is_kept_in_arguments():
    class Model(Tiny):
        def forward(self, x):
            return super().forward(x).sum() / (2 * x.shape[0] + 1)

    division = node(graph_of(Model(), loss=None), "div/0")
    assert division.args[1] == 2 * BATCH + 1


# The user's model is theirs.


@pytest.mark.parametrize("name", chosen(("unet", "dropout", "gpt2"), now=("unet",)))
def test_tracing_leaves_the_model_as_it_was(name):
    case = ZOO[name]
    model = case.model().eval()
    before = copy.deepcopy(model.state_dict())
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    random = torch.get_rng_state()
    trace_model(model, case.inputs, case.loss)
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not model.training
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks and not module._forward_pre_hooks


@pytest.mark.long
def test_a_skeleton_can_be_traced_again_and_gives_the_same():
    case = ZOO["unet"]
    skeleton = fake_copy(case.model())
    specs = describe(case.inputs(2), case.inputs(3), 2, 3)
    first, second = (trace(skeleton, case.inputs(2), specs, case.loss).graph for _ in range(2))
    assert str(first) == str(second)
    assert skeleton.down[0][1].num_batches_tracked.item() == 0
