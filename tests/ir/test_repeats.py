"""Observations of a short graph, extended to the whole graph, equal those of the whole graph."""

import pytest
import torch
from torch import nn

from autopipe.cluster.tp_groups import tp_groups
from autopipe.ir.blocks import find_blocks
from autopipe.ir.cut_points import find_units
from autopipe.ir.dataflow import analyse
from autopipe.ir.repeats import Run, Short, Storage, Uneven, shorten, storage_along
from autopipe.ir.stage_classes import KEPT
from autopipe.planners.costs import profile
from autopipe.planners.costs.profile import Costing
from autopipe.planners.model.devices import machine_of
from autopipe.planners.model.problem import Constraints
from tests.support.inprocess import machine
from tests.support.repeated_models import (
    DEPTH,
    Collecting,
    Deep,
    Growing,
    Recalling,
    Tied,
    Turning,
)
from tests.support.staged import trace_model


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


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("model", [Deep(3), Collecting()])
def test_where_nothing_can_be_left_out_the_graph_is_whole(model: nn.Module) -> None:
    short, nodes = short_of(model)
    assert not short.runs and len(short.graph.nodes) == nodes


def test_a_layer_whose_weight_is_used_elsewhere_stands_for_nobody() -> None:
    short, _ = short_of(Tied(12))
    assert all(("layers.3",) not in run.paths for run in short.runs)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (Turning(10), [(n, n + 1) for n in range(0, 10, 2)]),
        (Turning(9, masks=True), [(n, n + 1) for n in range(0, 8, 2)]),  # and one more
        pytest.param(
            Turning(25, 6),
            [tuple(range(n, n + 6)) for n in range(0, 24, 6)],
            marks=pytest.mark.long,
        ),
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


@pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.long), "bf16-autocast"]
)
@pytest.mark.parametrize(
    "model",
    [
        Growing(),
        *(
            pytest.param(model, marks=pytest.mark.long)
            for model in (
                *(Deep(in_place=True), Tied(12), Deep(), Collecting(), Deep(12)),
                *(Turning(9, masks=True), Turning(11), Turning(16, 3), Recalling(12)),
            )
        ),
    ],
)
def test_problems_of_the_short_graph_and_of_the_whole_one_are_the_same(
    model: nn.Module, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = trace_model(model, lambda b: {"x": torch.ones(b, 4)}).graph
    flow, blocks = analyse(graph), find_blocks(graph)
    devices, kinds = machine_of(machine(4), tp_groups(machine(4), 1))

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
        seconds = [(each.forward, each.backward, each.recompute) for each in (one, other)]
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
    assert [tuple(storage) for storage in storage_along(Storage(*seen), RUN)] == whole


def test_a_storage_of_some_blocks_and_not_of_others_tells_nothing() -> None:
    with pytest.raises(Uneven):
        storage_along(Storage(3, (101, 112, 141)), RUN)
