"""A short graph tells of the whole one what the whole one would."""

import pytest
import torch
from torch import nn

from autopipe import profile
from autopipe.blocks import find_blocks
from autopipe.dataflow import analyse
from autopipe.machine import machine_of
from autopipe.problem import Constraints
from autopipe.profile import Costing
from autopipe.shorten import KEPT, Run, Short, Storage, Uneven, _along, shorten
from autopipe.teams import teams
from autopipe.units import find_units
from tests.inprocess import machine
from tests.staged import trace_model

DEPTH = 7


class Layer(nn.Module):
    """Residual, with a mask that all layers read; written in place if asked to."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.in_place = in_place

    def forward(self, x: torch.Tensor, mask: torch.Tensor, far: bool = False) -> torch.Tensor:
        bend = torch.relu if far else torch.tanh
        made = self.down(bend(self.up(self.norm(x)) * mask))
        return x.add_(made) if self.in_place else x + made


class Deep(nn.Module):
    def __init__(self, depth: int = DEPTH, in_place: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.scale = nn.Linear(4, 16)
        self.layers = nn.ModuleList(Layer(in_place) for _ in range(depth))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        for layer in self.layers:
            y = layer(y, mask)
        return self.head(y).mean()


class Collecting(Deep):
    """The result is made of what all layers give: none of them can be left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        found = []
        for layer in self.layers:
            y = layer(y, mask)
            found.append(y)
        return self.head(torch.stack(found).sum(0)).mean()


class Growing(Deep):
    """Layers alike, of which the fifth has a wider relative."""

    def __init__(self) -> None:
        super().__init__(9)
        self.layers[4].up, self.layers[4].down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.wider = nn.Linear(4, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        for number, layer in enumerate(self.layers):
            y = layer(y, torch.sigmoid(self.wider(x)) if number == 4 else mask)
        return self.head(y).mean()


class Turning(Deep):
    """Of so many layers the last looks far, the others near: each kind has its own mask.

    Looking far is another function too, unless `masks` alone make the difference.
    """

    def __init__(self, depth: int, period: int = 2, masks: bool = False) -> None:
        super().__init__(depth)
        self.further = nn.Linear(4, 16)
        self.period, self.masks = period, masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near, far = torch.sigmoid(self.scale(x)), torch.sigmoid(self.further(x))
        y = self.embed(x) * 2
        for number, layer in enumerate(self.layers):
            looks_far = number % self.period == self.period - 1
            y = layer(y, far if looks_far else near, looks_far and not self.masks)
        return self.head(y).mean()


class Recalling(Deep):
    """Layers with an even number read what the first layer has made, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        first = y
        for number, layer in enumerate(self.layers):
            y = layer(y * first if number % 2 == 0 else y, mask)
            first = y if number == 0 else first
        return self.head(y).mean()


class Tied(Deep):
    """One layer's weight is also the head's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        for layer in self.layers:
            y = layer(y, mask)
        return nn.functional.linear(y, self.layers[3].up.weight).mean()


def short_of(model: nn.Module) -> tuple[Short, int]:
    graph = trace_model(model, lambda b: {"x": torch.ones(b, 4)}).graph
    return shorten(analyse(graph), find_blocks(graph)), len(graph.nodes)


def test_of_a_run_of_seven_layers_three_stay() -> None:
    """The first two and the last. The first one's input is not made by a layer; nobody minds."""
    short, nodes = short_of(Deep())
    (run,) = short.runs
    assert run.count == DEPTH
    assert nodes - len(short.graph.nodes) == (run.count - KEPT) * run.length
    assert run.paths == tuple((f"layers.{number}",) for number in range(DEPTH))
    assert sum("layers" in name for name in short.graph.states) == KEPT * 6
    assert short.states["layers.4.up.weight"] == "layers.1.up.weight"


@pytest.mark.parametrize("model", [Deep(3), Collecting()])
def test_where_nothing_can_be_left_out_the_graph_is_whole(model: nn.Module) -> None:
    short, nodes = short_of(model)
    assert not short.runs and len(short.graph.nodes) == nodes


def test_a_layer_whose_weight_is_used_elsewhere_stands_for_nobody() -> None:
    short, _ = short_of(Tied(12))
    assert all(("layers.3",) not in run.paths for run in short.runs)


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (Turning(10), [(n, n + 1) for n in range(0, 10, 2)]),
        (Turning(9, masks=True), [(n, n + 1) for n in range(0, 8, 2)]),  # and one more
        (Turning(25, 6), [tuple(range(n, n + 6)) for n in range(0, 24, 6)]),
        (Turning(14, 6), [(n,) for n in range(5)] + [(n,) for n in range(6, 11)]),
    ],
    ids=["in turns", "by their masks", "one of six", "too few turns"],
)
def test_layers_that_take_turns_are_left_out_in_groups(
    model: nn.Module, paths: list[tuple[int, ...]]
) -> None:
    """In the period that leaves out most; where no turn comes four times, layers one by one."""
    short, _ = short_of(model)
    found = [group for run in short.runs for group in run.paths]
    assert found == [tuple(f"layers.{number}" for number in group) for group in paths]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        Deep(),
        Deep(in_place=True),
        Collecting(),
        Growing(),
        Tied(12),
        Deep(12),
        Turning(11),
        Turning(9, masks=True),
        Turning(16, 3),
        Recalling(12),
    ],
)
def test_problems_of_the_short_graph_and_of_the_whole_one_are_the_same(
    model: nn.Module, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = trace_model(model, lambda b: {"x": torch.ones(b, 4)}).graph
    flow, blocks = analyse(graph), find_blocks(graph)
    devices, kinds = machine_of(machine(4), teams(machine(4), 1))

    def problem() -> profile.Problem:
        return Costing(
            flow=flow,
            blocks=blocks,
            units=find_units(flow, blocks),
            machine=devices,
            kinds=kinds,
            batch=32,
            rows=(1, 2, 4, 8, 16),
            optimizer_factor=2.0,
            window=2,
            constraints=Constraints(),
            precision=precision,
        ).profiled()[0]

    found = problem()
    monkeypatch.setattr(profile, "shortened", lambda flow, blocks: iter([shorten(flow, ())]))
    whole = problem()
    assert set(found.parameters) == set(whole.parameters)
    assert set(found.constants) == set(whole.constants)
    for one, other in zip(found.profiles, whole.profiles, strict=True):
        assert set(one.saved) == set(other.saved)
        assert set(one.crossings) == set(other.crossings)
        seconds = [(each.forward, each.backward, each.again) for each in (one, other)]
        assert seconds[0] == seconds[1]


# Storages, of a run of five blocks, each of ten nodes, from position 100 on.

RUN = Run(100, 10, 5, tuple((f"h.{number}",) for number in range(5)))


@pytest.mark.parametrize(
    ("seen", "whole"),
    [
        ((3, (4, 150)), [(3, (4, 150))]),
        ((99, (105,)), [(99, (105,))]),
        ((112, (115,)), [(112, (115,)), (122, (125,)), (132, (135,))]),
        ((109, (111, 115)), [(109, (111, 115)), (119, (121, 125)), (129, (131, 135))]),
        ((119, (141, 145)), [(139, (141, 145))]),
        ((149, (150,)), [(149, (150,))]),
        ((3, (101, 111, 141)), [(3, (101, 111, 121, 131, 141))]),
    ],
    ids=["outside", "into the first", "one's own", "to the next", "to the last", "out", "for all"],
)
def test_a_storage_stands_for_those_of_the_blocks_between(seen, whole) -> None:
    assert [tuple(storage) for storage in _along(Storage(*seen), RUN)] == whole


def test_a_storage_of_some_blocks_and_not_of_others_tells_nothing() -> None:
    with pytest.raises(Uneven):
        _along(Storage(3, (101, 112, 141)), RUN)
