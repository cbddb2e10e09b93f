"""Where parameters are gathered and let go of: by hand, and on models whose parameters are NaN
whenever nobody has gathered them."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from autopipe.ir.blocks import find_blocks
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.runtime.step.compile import Compiler, compile_stage
from autopipe.runtime.step.engine import AutogradEngine, JointEngine
from autopipe.stages.gathering import (
    GatherEvent,
    Stay,
    begin,
    events,
    let_go,
    most_bytes,
    ready,
    stays,
    units_of,
    with_gathers,
)
from autopipe.stages.lower import lower
from autopipe.stages.op_tape import SEGMENT
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.rng import stream
from tests.support.staged import micro_batches, traced
from tests.support.staged import split as stages_between
from tests.support.zoo import ZOO


def told(staying: list[Stay]) -> list[str]:
    """Events as text: the call, the unit, and the part that it comes before."""
    return [f"{e.call.__name__} {e.unit} before {e.part}" for e in events(staying)]


def test_one_unit_is_fetched_while_another_is_read() -> None:
    assert told([Stay(0, 0, 0), Stay(1, 1, 1), Stay(2, 2, 2)]) == [
        "begin 0 before 0",
        "ready 0 before 0",
        "begin 1 before 0",
        "let_go 0 before 1",
        "ready 1 before 1",
        "begin 2 before 1",
        "let_go 1 before 2",
        "ready 2 before 2",
        "let_go 2 before 3",
    ]


def test_what_is_read_at_both_ends_stays() -> None:
    """Unit 1, a tied embedding; unit 0 is read beside it."""
    assert told([Stay(0, 0, 0), Stay(0, 2, 1), Stay(1, 1, 2)]) == [
        "begin 0 before 0",
        "ready 0 before 0",
        "begin 1 before 0",
        "ready 1 before 0",
        "begin 2 before 0",
        "let_go 0 before 1",
        "ready 2 before 1",
        "let_go 2 before 2",
        "let_go 1 before 3",
    ]
    assert events([]) == []
    assert events([Stay(3, 3, 7)])[0] == GatherEvent(0, begin, 7), "as early as can be"


def test_bytes_are_those_of_a_unit_and_of_the_table_that_the_next_one_comes_in() -> None:
    """Two ranks. Units of 10 bytes; a table has two shares of 5, and each rank gives one."""
    staying = [Stay(number, number, number) for number in range(3)]
    assert most_bytes(staying, [10] * 3, [5] * 3, 2) == 10 + 15
    assert most_bytes(staying[:1], [10], [5], 2) == 10 + 15, "it comes out of its own table"
    assert most_bytes(staying, [10, 100, 10], [5, 50, 5], 2) == 100 + 150
    assert most_bytes([Stay(0, 2, 0), *staying[1:]], [10] * 3, [5] * 3, 2) == 10 + 10 + 15
    assert most_bytes([], [], [], 2) == 0


@dataclass
class Wiped:
    """Parameters that are NaN but between `ready` and `let_go`; says how many units are whole."""

    units: tuple[tuple[str, ...], ...]
    parameters: dict[str, nn.Parameter]
    whole: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)
    most: int = 0

    def __post_init__(self) -> None:
        self._values = {name: p.detach().clone() for name, p in self.parameters.items()}
        for number in range(len(self.units)):
            self._wipe(number)

    def begin(self, unit: int) -> None:
        assert unit not in self.whole | self.arriving
        self.arriving.add(unit)

    def ready(self, unit: int) -> None:
        self.arriving.remove(unit)
        self.whole.add(unit)
        self.most = max(self.most, len(self.whole))
        for name in self.units[unit]:
            self.parameters[name].data.copy_(self._values[name])

    def let_go(self, unit: int) -> None:
        self.whole.remove(unit)
        self._wipe(unit)

    def _wipe(self, unit: int) -> None:
        for name in self.units[unit]:
            self.parameters[name].data.fill_(torch.nan)


Found = dict[str, Tensor]


def step(
    name: str,
    wiped: bool,
    *,
    wanted: Wanted,
    compiled: bool = False,
    recompute: bool = False,
    precision: str = "fp32",
) -> tuple[Found, Wiped | None]:
    """The loss and gradients of a micro-batch of a model in one stage, and an evaluation's loss."""
    found, model = traced(name), copy.deepcopy(ZOO[name].model())
    (stage,), blocks = stages_between(found, []), find_blocks(found.graph)
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | found.graph.constants
    made = lower(
        found.graph,
        stage,
        blocks,
        {state: named[state] for state in stage.states},
        found.reads,
        2,
        last=True,
        recompute=[block.path for block in blocks] if recompute else [],
        precision=precision,
    )
    parameters = {n: p for n, p in model.named_parameters() if n in stage.states}
    leaves = micro_batches(found, ZOO[name].inputs(2), 1)[0]
    arguments = [leaves[path] for path in stage.inputs]
    results = len(found.graph.outputs)
    seeds = [Layout.dense((), torch.float32), *[None] * (results - 1)]
    layouts = [Layout.of(x) for x in arguments]
    joint, module, keeper = split(made, layouts, seeds, precision, wanted), made.module, None
    if wiped:
        units = units_of(made.module, parameters)
        assert sorted(n for unit in units for n in unit) == sorted(parameters)
        keeper = Wiped(units, parameters)

        def gather(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
            return with_gathers(graph, units, parameters, keeper)

        joint, module = joint.mapped(gather), gather(module)
    engine = JointEngine(module, joint, *([Compiler("eager")] if compiled else []))
    with stream(0, 0, 0), computing(arithmetic(precision, "cpu")):
        (loss, *others) = engine.forward(0, arguments)
    with stream(0, 0, 0):
        engine.backward_input(0, [torch.ones(()), *[None] * len(others)])
        engine.backward_weight(0)
    if compiled:
        compile_stage(module, "eager")
    with torch.no_grad(), stream(0, 0, 0), computing(arithmetic(precision, "cpu")):
        evaluated = AutogradEngine(module).forward(0, arguments)[0]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "evaluated": evaluated, **gradients}, keeper


LATER = pytest.mark.long

WAYS = {
    "as it is": {"wanted": Wanted(halves=False)},
    "in halves": {"wanted": Wanted(halves=True)},
    "compiled": {"wanted": Wanted(halves=False, least=True), "compiled": True},
    "recomputed": {"wanted": Wanted(halves=False), "recompute": True},
    "autocast": {"wanted": Wanted(halves=False, least=True), "precision": "bf16-autocast"},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name, way, marks=() if name in ("dropout", "frozen") and way == "as it is" else LATER
        )
        for name in ("llama", "dropout", "t5", "unet", "frozen", "mask", "odd", "keywords")
        for way in WAYS
    ],
)
def test_nothing_is_read_that_is_not_gathered(name: str, way: str) -> None:
    (found, keeper), (expected, _) = (step(name, wiped, **WAYS[way]) for wiped in (True, False))
    assert keeper is not None and not keeper.whole and not keeper.arriving, "all is let go of"
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert torch.equal(found[tensor], expected[tensor]), tensor
    assert keeper.most < len(keeper.units) or len(keeper.units) < 4


class Tail(nn.Module):
    """Gives its weight away: seen from above, the memory of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.ops.aten.mul.Tensor(x, self.v)
        return torch.ops.aten.add.Tensor(y, 1.0), torch.ops.aten.view.default(self.w, [3])


def test_a_result_in_a_parameters_memory_is_a_copy() -> None:
    module = torch.fx.symbolic_trace(Tail())
    parameters = dict(module.named_parameters())
    units = units_of(module, parameters)
    assert units == (("v", "w"),), "read by the same part of the code"
    assert stays(module, units, parameters) == [Stay(0, 0, 0)]
    keeper = Wiped(units, parameters)
    found = with_gathers(module, units, parameters, keeper)(torch.ones(3))
    assert [x.tolist() for x in found] == [[2, 2, 2], [1, 1, 1]]
    calls = [node.target for node in with_gathers(module, units, parameters, keeper).graph.nodes]
    assert [c for c in calls if c in (begin, ready, let_go)] == [begin, ready, let_go]


class Parted(nn.Module):
    """Two blocks. Results are the second half of a table that is read before them, and the first
    block's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0))
        self.first, self.second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        halves = torch.ops.aten.split.Tensor(self.table, 2)
        x = torch.ops.aten.mul.Tensor(x, halves[0])
        half = halves[1]
        x = torch.ops.aten.mm.default(x, self.first)
        return torch.ops.aten.mm.default(x, self.second), half, self.first


def test_a_result_in_a_parameters_memory_is_copied_while_that_is_whole() -> None:
    """Bug: it was copied at the end, when the memory was free: ranks died of signal 11."""
    module = torch.fx.symbolic_trace(Parted())
    expected = [found.detach().clone() for found in module(torch.ones(1, 2))]
    blocks = [n for n in module.graph.nodes if n.target is torch.ops.aten.mm.default]
    for number, node in enumerate(blocks):
        node.meta[SEGMENT] = str(number)
    parameters = dict(module.named_parameters())
    units = units_of(module, parameters)
    assert units == (("table",), ("first",), ("second",))
    staying = stays(module, units, parameters)
    assert staying == [Stay(0, 0, 0), Stay(1, 2, 1), Stay(2, 2, 2)], "a result is read last"
    keeper = Wiped(units, parameters)
    found = with_gathers(module, units, parameters, keeper)(torch.ones(1, 2))
    assert not keeper.whole
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
