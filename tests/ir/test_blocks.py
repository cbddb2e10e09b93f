"""The repeated structure of models, found in their graphs."""

import pytest
import torch
from torch import nn

from autopipe.ir.blocks import Block, Visit, classes, find_blocks
from tests.support.inprocess import traced
from tests.support.staged import differences, eager_step, staged_step, trace_model
from tests.support.zoo import Case


def four(path):
    return {f"{path}.0": tuple(f"{path}.{n}" for n in range(4))}


FOUND = {
    "gpt": four("blocks"),
    "gpt2": four("transformer.h"),
    "llama": four("model.layers"),
    "resnet": four("blocks"),
    "keywords": four("body"),
    "whisper": {
        "model.encoder.layers.0": ("model.encoder.layers.0", "model.encoder.layers.1"),
        "model.decoder.layers.0": ("model.decoder.layers.0", "model.decoder.layers.1"),
    },
    # The first layer of each half makes the position bias, so it is a class of its own; the
    # feed-forward layers are alike.
    "t5": {
        "encoder.block.0.layer.0": ("encoder.block.0.layer.0",),
        "encoder.block.0.layer.1": ("encoder.block.0.layer.1", "encoder.block.1.layer.1"),
        "encoder.block.1.layer.0": ("encoder.block.1.layer.0",),
        "decoder.block.0.layer.0": ("decoder.block.0.layer.0",),
        "decoder.block.0.layer.1": ("decoder.block.0.layer.1",),
        "decoder.block.0.layer.2": ("decoder.block.0.layer.2", "decoder.block.1.layer.2"),
        "decoder.block.1.layer.0": ("decoder.block.1.layer.0",),
        "decoder.block.1.layer.1": ("decoder.block.1.layer.1",),
    },
    "unet": {},  # no two of its convolutions have one shape
    "lstm": {},
}


@pytest.mark.parametrize("name", FOUND)
def test_blocks_of_the_zoo(name):
    assert classes(traced(name)[2]) == FOUND[name]


@pytest.mark.parametrize("name", ["gpt", "t5", "resnet"])
def test_blocks_are_ranges_in_order_and_hold_their_calls_nodes_alone(name):
    found, _, blocks = traced(name)
    stop = 0
    for block in blocks:
        assert stop <= block.first < block.stop
        stop = block.stop
        nodes = found.graph.nodes
        assert all(block.path in n.scopes for n in nodes[block.first : block.stop])
        others = (*nodes[: block.first], *nodes[block.stop :])
        assert not any(block.path in n.scopes for n in others)


def blocks_of(model, width=8):
    loss = lambda outputs, batch: outputs.mean()  # noqa: E731
    found = trace_model(Chain(model), lambda b: {"x": torch.ones(b, width)}, loss)
    return classes(find_blocks(found.graph))


class Chain(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


class Unit(nn.Module):
    def __init__(self, width=8, factor=1.0):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.factor = factor

    def forward(self, x):
        return x + self.factor * self.linear(self.norm(x))


def test_other_arguments_make_another_class():
    body = nn.Sequential(Unit(), Unit(factor=2.0), Unit(), Unit(factor=2.0))
    assert blocks_of(body) == {"body.0": ("body.0", "body.2"), "body.1": ("body.1", "body.3")}


def test_a_lone_member_of_a_list_of_blocks_is_one_too():
    assert blocks_of(nn.Sequential(Unit(), Unit(), Unit(factor=2.0))) == {
        "body.0": ("body.0", "body.1"),
        "body.2": ("body.2",),
    }


def test_equal_norms_that_stand_alone_are_no_blocks():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.linear, self.after = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            return self.after(self.linear(self.before(x)))

    assert blocks_of(Alone()) == {}


def test_the_largest_repeated_call_is_the_block():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Unit(), Unit()

        def forward(self, x):
            return self.second(self.first(x))

    assert blocks_of(nn.Sequential(Pair(), Pair())) == {"body.0": ("body.0", "body.1")}


class Shared(nn.Module):
    """ALBERT's way: one module, called again and again."""

    def __init__(self):
        super().__init__()
        self.unit, self.head = Unit(), nn.Linear(8, 3)

    def forward(self, x):
        for _ in range(3):
            x = self.unit(x)
        return self.head(x).square().mean()


SHARED = Case(Shared, lambda b: {"x": torch.arange(8.0 * b).view(b, 8).sin()})


def test_calls_of_one_module_are_blocks_of_one_class():
    found = trace_model(SHARED.model(), SHARED.inputs)
    assert classes(find_blocks(found.graph)) == {"unit": ("unit", "unit@1", "unit@2")}


@pytest.mark.parametrize(
    "written, visit", [("h.3", Visit("h.3")), ("shared@2", Visit("shared", 2)), ("", Visit(""))]
)
def test_a_visit_is_written_and_read_back(written, visit):
    assert Visit.of(written) == visit and str(visit) == written


def test_a_blocks_states_begin_with_its_module_whichever_call_it_is():
    block = Block("layers.1@2", 0, 4, "layers.0")
    assert (block.module, block.prefix) == ("layers.1", "layers.1.")


@pytest.mark.parametrize(
    ("cuts", "tolerance"),
    [
        pytest.param([], 0.0, marks=pytest.mark.long),
        (["head/linear/0"], 0.0),
        (["unit.norm@1/layer_norm/0"], 1e-5),
    ],
)
def test_a_module_called_again_runs_with_the_same_parameters(cuts, tolerance):
    """Cut between its calls, both stages have a part of the sum."""
    found, batch = trace_model(SHARED.model(), SHARED.inputs), SHARED.inputs(4)
    eager = eager_step(SHARED, found, batch, 2)
    split = staged_step(SHARED.model(), found, batch, cuts, 2)
    assert differences(split, eager, tolerance=tolerance) == []


class Fades(nn.Module):
    """Makes constants in forward: export numbers those of a model from one end to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * torch.tensor([0.5]) + torch.tensor([1.0])


def test_blocks_that_make_constants() -> None:
    model = nn.Sequential(*(Fades() for _ in range(3)))
    graph = trace_model(
        model, lambda rows: {"input": torch.ones(rows, 4)}, lambda y, batch: y.mean()
    ).graph
    assert [block.path for block in find_blocks(graph)] == ["0", "1", "2"]
    assert list(graph.constants) == [f"{n}.lifted_tensor_{k}" for n in range(3) for k in range(2)]
    assert [float(constant) for constant in graph.constants.values()] == [0.5, 1.0] * 3
