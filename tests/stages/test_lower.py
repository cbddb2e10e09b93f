"""Stages as modules that run: their names, their parts and their sizes."""

import pytest
import torch
from torch import fx, nn

from autopipe.ir.blocks import find_blocks
from autopipe.stages.lower import lower
from autopipe.stages.node_calls import NODE_NAME
from tests.support.inprocess import traced
from tests.support.odd_models import Filters, built, inputs, square, unlike
from tests.support.staged import (
    eager_step,
    lowered,
    micro_batches,
    one_micro_batch,
    split,
    staged_step,
    trace_model,
)
from tests.support.zoo import ZOO


def stages_of(name, cuts, rows=2):
    found = traced(name)[0]
    model = ZOO[name].model()
    return model, found, lowered(found, model, cuts, rows)


def test_parameters_have_the_models_own_names_and_are_the_models_own():
    model, _, modules = stages_of("unet", ["bottom.0/conv2d/0"])
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = {}
    for stage in modules:
        held |= dict(stage.module.named_parameters()) | dict(stage.module.named_buffers())
    assert {name: id(tensor) for name, tensor in held.items()} == {
        name: id(tensor) for name, tensor in named.items()
    }


def test_a_tied_parameter_keeps_its_first_name_in_every_stage():
    _, _, modules = stages_of("gpt2", ["transformer.h.2.ln_1/layer_norm/0"])
    weights = [dict(stage.module.named_parameters())["transformer.wte.weight"] for stage in modules]
    assert weights[0] is weights[1]


def calls(module):
    return [node.target for node in module.graph.nodes if node.op == "call_module"]


def test_a_stage_calls_one_module_per_block():
    _, _, (first, second) = stages_of("gpt", ["blocks.2.norm1/layer_norm/0"])
    assert calls(first.module) == ["blocks.0", "blocks.1"]
    assert calls(second.module) == ["blocks.2", "blocks.3"]
    block = first.module.get_submodule("blocks.0")
    assert isinstance(block, fx.GraphModule)
    assert type(block).__name__ == "Blocks0"
    assert "qkv.weight" in dict(block.named_parameters())


def test_a_block_cut_in_two_is_a_module_in_both_stages():
    _, _, (first, second) = stages_of("gpt", ["blocks.1.up/linear/0"])
    assert calls(first.module)[-1] == calls(second.module)[0] == "blocks.1"
    parts = [
        dict(stage.module.get_submodule("blocks.1").named_parameters()) for stage in (first, second)
    ]
    assert "qkv.weight" in parts[0] and "down.weight" in parts[1]
    assert parts[0].keys().isdisjoint(parts[1].keys())


class Halves(nn.Module):
    """Two linear layers whose second sum is outside of every block, as a penalty is."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Twice(nn.Module):
    """Both layers are called a second time, and one's `scale` is used by nobody but the model."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Halves(), Halves()])

    def forward(self, x):
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return (x * self.layers[0].scale).square().mean()


def test_a_module_called_again_in_the_stage_that_has_half_of_its_first_call():
    """The first call's second half has no `up`; the second call, in the same stage, needs it."""
    model = Twice()
    found = trace_model(model, lambda rows: {"x": torch.ones(rows, 4)})
    first, second = lowered(found, model, ["layers.1.down/linear/0"], 2)
    assert calls(first.module) == ["layers.0", "layers.1"]
    assert calls(second.module) == ["layers.1", "layers.0", "layers.1_again"]
    held = dict(second.module.named_parameters())
    assert held.keys() == {name for name in second.stage.states}
    assert all(held[name] is model.get_parameter(name) for name in held)
    x = torch.rand(2, 4)
    loss = one_micro_batch([first, second], micro_batches(found, {"x": x}, 1)[0], 1.0)
    assert torch.equal(loss, model(x))


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([], marks=pytest.mark.long),
        pytest.param(["filters.1.made.0/linear/0"], marks=pytest.mark.long),
        ["filters.1/mul/0"],
    ],
)
def test_a_block_within_another_that_is_called_before_it_stays_there(cuts):
    """Bug: the outer one was put in the place of both, and no graph ran."""
    blocks = find_blocks(trace_model(Filters(), inputs, square).graph)
    assert {"filters.1.made", "filters.1"} <= {block.path for block in blocks}
    assert unlike(built(Filters), cuts=cuts) == []


def test_every_node_of_the_stage_is_in_its_code_once():
    _, found, modules = stages_of("llama", ["model.layers.2.self_attn.q_proj/linear/0"])
    for stage in modules:
        graphs = [m.graph for m in stage.module.modules() if isinstance(m, fx.GraphModule)]
        written = [n.meta[NODE_NAME] for g in graphs for n in g.nodes if NODE_NAME in n.meta]
        assert sorted(written) == sorted(found.graph.nodes[p].name for p in stage.stage.nodes)


@pytest.mark.parametrize("rows", [1, 5])
def test_one_trace_serves_every_number_of_rows(rows):
    case, found = ZOO["unet"], traced("unet")[0]
    batch = case.inputs(rows)
    step = staged_step(case.model(), found, batch, ["bottom.0/conv2d/0"], 1)
    assert torch.equal(step.losses[0], eager_step(case, found, batch, 1).losses[0])


def test_another_number_of_rows_is_another_lowering():
    """Sizes are integers, so three rows cannot pass through views made for two unseen."""
    _, found, modules = stages_of("gpt2", [], rows=2)
    assert modules[0].rows == 2
    three = micro_batches(found, ZOO["gpt2"].inputs(3), 1)[0]
    with pytest.raises(RuntimeError, match="shape"):
        one_micro_batch(modules, three, 1.0)


def test_arguments_are_what_arrives_and_then_the_inputs():
    _, found, (first, second) = stages_of("gpt", ["blocks.2.norm1/layer_norm/0"])
    placeholders = [n.name for n in second.module.graph.nodes if n.op == "placeholder"]
    assert placeholders == ["blocks_1_add_1", "labels"]
    assert [n.name for n in first.module.graph.nodes if n.op == "placeholder"] == ["tokens"]


def test_what_a_stage_writes_of_what_arrived_is_its_own_copy():
    _, found, (_, second) = stages_of("resnet", ["blocks.1.relu/relu_/0"])
    (ref,) = second.stage.copied
    buffer = torch.ones(2, 16, 8, 8).neg().requires_grad_()
    inputs = [micro_batches(found, ZOO["resnet"].inputs(2), 1)[0][p] for p in second.stage.inputs]
    second.module(*[buffer for _ in second.stage.receives], *inputs)
    assert (buffer == -1).all(), "relu_ ran on a copy of the receive buffer"
    assert ref in dict(second.stage.receives)


def test_reads_are_checked_unless_left_out():
    """A rehearsal on tensors without values has nothing to check."""
    found, model = traced("llama")[0], ZOO["llama"].model()
    (stage,) = split(found, [])
    named = {
        **found.graph.constants,
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    states = {name: named[name] for name in stage.states}
    assert found.reads
    for reads, checks in ((found.reads, len(found.reads)), (None, 0)):
        made = lower(found.graph, stage, find_blocks(found.graph), states, reads, 2, last=True)
        assert made.module.code.count("check_read(") == checks


def test_a_recomputed_block_stands_at_its_place_under_its_names():
    found, model = traced("gpt")[0], ZOO["gpt"].model()
    (stage,) = split(found, [])
    states = {name: dict(model.named_parameters())[name] for name in stage.states}
    blocks = find_blocks(found.graph)
    made = lower(found.graph, stage, blocks, states, None, 2, last=True, recompute=["blocks.2"])
    kinds = [type(made.module.get_submodule(f"blocks.{n}")).__name__ for n in range(4)]
    assert kinds == ["Blocks0", "Blocks1", "Recomputed", "Blocks3"]
    assert dict(made.module.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_in_mixed_precision_linears_take_copies_and_norms_do_not():
    found, model = traced("gpt")[0], ZOO["gpt"].model()
    (stage,) = split(found, [])
    states = {name: dict(model.named_parameters())[name] for name in stage.states}
    blocks = find_blocks(found.graph)
    made = lower(found.graph, stage, blocks, states, None, 2, last=True, precision="bf16-autocast")
    code = made.module.get_submodule("blocks.0").code
    assert "low = autopipe_stages_precision_low(qkv_weight)" in code
    assert "autopipe_stages_precision_low(norm1_weight)" not in code
    assert "embedding.weight" not in made.low
    assert [name for name in made.low if name.startswith("blocks.0")] == [
        f"blocks.0.{layer}.{kind}"
        for layer in ("qkv", "out", "up", "down")
        for kind in ("weight", "bias")
    ]


class Rows(nn.Module):
    """A batch norm gives other strides on fake tensors, for which `contiguous` is a no-op."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.norm(self.first(x).transpose(1, 2)).transpose(1, 2)
        return self.last(y.contiguous().view(-1, 6)).square().mean()


def test_a_view_copies_where_kernels_give_other_strides():
    """As attention of a GPU does, in the evaluation of a multi-head attention."""
    model = Rows()
    found = trace_model(model, lambda rows: {"x": torch.randn(rows, 4, 6)})
    batch = {"x": torch.randn(4, 4, 6)}
    assert not any("contiguous" in node.op for node in found.graph.nodes)
    (stage,) = lowered(found, model, [], 4)
    assert stage.module(batch["x"])[0].equal(model(**batch))
