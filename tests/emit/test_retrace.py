"""An emitted stage, traced again, has the graphs that `lower` made."""

from textwrap import dedent

import pytest
import torch
from torch import Tensor, fx, nn

from autopipe.emit.retrace import graph_of
from autopipe.runtime.emitted import States, check_read, draw, low, parameter
from autopipe.runtime.step.compile import compile_stage
from autopipe.stages.recompute import Recomputed
from autopipe.stages.rng import stream

# torch's own compiler warns itself: it asks for the .grad of tensors that have none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

aten = torch.ops.aten


class Block(States):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self.up = States(weight=parameter(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low_up = aten.linear.default(x, low(self.up.weight))
        dropout = draw(aten.dropout.default, f"{self._path}/dropout/0", low_up, 0.5, True)
        return (aten.add.Tensor(x, dropout), low_up)


class Stage0(States):
    def __init__(self) -> None:
        super().__init__()
        self.block = Recomputed(Block("block"))
        self.scale = States({"0": States(weight=parameter(4))})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        arange = aten.arange.default(4)
        check_read(aten.all.default(x), "__bool__", True, "net.py:3")
        a, b = self.block(aten.mul.Tensor(x, arange))
        return (aten.mul.Tensor(a, self.scale["0"].weight), b)


def code(module: nn.Module) -> str:
    """A line for each node: `name = function(arguments)`."""
    assert isinstance(module, fx.GraphModule)
    lines = []
    for node in module.graph.nodes:
        function = str(node.target)
        if callable(node.target) and not function.startswith("aten."):
            function = node.target.__name__
        lines.append(f"{node.name} = {function}({', '.join(map(str, node.args))})")
    return "\n".join(lines)


def test_the_graphs_of_a_stage() -> None:
    """Blocks are called, ops without a tensor stand in the graph, and our own words are words."""
    traced = graph_of(Stage0())
    assert code(traced) == dedent(
        """\
        x = x()
        arange_default = aten.arange.default(4)
        all_default = aten.all.default(x)
        check_read = check_read(all_default, __bool__, True, net.py:3)
        mul_tensor = aten.mul.Tensor(x, arange_default)
        block = block(mul_tensor)
        getitem = take(block, 0)
        getitem_1 = take(block, 1)
        scale_0_weight = scale.0.weight()
        mul_tensor_1 = aten.mul.Tensor(getitem, scale_0_weight)
        output = output((mul_tensor_1, getitem_1))"""
    )
    again = traced.get_submodule("block")
    assert isinstance(again, Recomputed)
    assert code(again.block) == dedent(
        """\
        x = x()
        up_weight = up.weight()
        low = low(up_weight)
        linear_default = aten.linear.default(x, low)
        draw = draw(aten.dropout.default, block/dropout/0, linear_default, 0.5, True)
        add_tensor = aten.add.Tensor(x, draw)
        output = output((add_tensor, linear_default))"""
    )


def test_they_do_what_the_stage_does() -> None:
    """Also in islands, with gradients, random numbers and a block that runs again."""
    results = []
    for make in (Stage0, lambda: graph_of(Stage0()), islands):
        torch.manual_seed(0)
        stage = make()
        for parameter_ in stage.parameters():
            nn.init.normal_(parameter_)
        with stream(0, 0, 0):
            a, b = stage(torch.ones(3, 4, requires_grad=True))
            (a + b).sum().backward()
        results.append([a, b, *(p.grad for p in stage.parameters())])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


def islands() -> fx.GraphModule:
    stage = graph_of(Stage0())
    compile_stage(stage, backend="eager")
    return stage
