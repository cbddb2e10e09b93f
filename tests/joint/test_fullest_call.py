"""The bytes alive at each call of a backward: small graphs by hand, real runs as an oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from autopipe.joint.fullest_call import Half
from autopipe.joint.joint_graph import differentiate, is_of_state
from autopipe.joint.split_backward import divide
from autopipe.joint.wanted import Wanted
from autopipe.stages.lower import Lowered
from autopipe.stages.op_tape import MADE, SEGMENT, Made
from tests.support.small_stages import ROWS, RUNS, WIDTH, Stage, layouts

ATEN = torch.ops.aten
SIZE = 8


class Calls:
    """Calls that each make a storage of `SIZE` bytes; a storage's key is the call's number."""

    def __init__(self) -> None:
        self.graph, self.made = fx.Graph(), list[fx.Node]()

    def given(self) -> fx.Node:
        return self._with_storage(self.graph.placeholder(f"given_{len(self.made)}"), None)

    def call(self, op, *args, segment="h.0") -> fx.Node:
        return self._with_storage(self.graph.call_function(op.default, args), segment)

    def _with_storage(self, node: fx.Node, segment: str | None) -> fx.Node:
        self.made.append(node)
        node.meta[MADE], node.meta[SEGMENT] = Made(None), segment
        node.meta[MADE].storages[len(self.made)] = SIZE
        return node


def key(node: fx.Node) -> int:
    (storage,) = node.meta[MADE].storages
    return storage


def at_each_call(half: Half) -> list[int]:
    """Tensors of `SIZE` bytes: those made, and those kept and still there."""
    there = half.existing(half.kept) + half.made()
    assert half.most() == there.max()
    return (there // SIZE).tolist()


def five_calls(segments=("h.0",) * 5, *, compiled: bool) -> Half:
    """Those of the docstring of `joint.fullest_call`."""
    calls = Calls()
    g, x, dy, w = (calls.given() for _ in range(4))
    d = calls.call(ATEN.gelu_backward, dy, g, segment=segments[0])
    dw = calls.call(ATEN.mm, d, x, segment=segments[1])
    dx = calls.call(ATEN.mm, d, w, segment=segments[2])
    da = calls.call(ATEN.relu, dx, segment=segments[3])
    db = calls.call(ATEN.tanh, da, segment=segments[4])
    return Half(
        [d, dw, dx, da, db],
        kept={key(g): SIZE, key(x): SIZE},
        elsewhere={key(dy), key(w)},
        given_away={key(dw)},
        leaving={key(db)},
        compiled=compiled,
        again_alone=False,
    )


def test_what_nobody_reads_any_more_is_gone() -> None:
    """g x d | x d dw | d dx | dx da | da db"""
    assert at_each_call(five_calls(compiled=False)) == [3, 3, 2, 2, 2]


def test_an_island_has_what_it_is_given_and_gives_until_it_ends() -> None:
    """g x d | g x d dw | g x d dw dx | g x dw dx | g x dw db; da is made and read in one loop."""
    assert at_each_call(five_calls(compiled=True)) == [3, 4, 5, 4, 4]


def test_what_another_island_reads_exists() -> None:
    """The last call is in another block: g x d | ... | g x dw dx da | da db"""
    half = five_calls(("h.1",) * 4 + ("h.0",), compiled=True)
    assert at_each_call(half) == [3, 4, 5, 5, 2]


@pytest.mark.parametrize(("product", "expected"), [(False, [0, 1]), (True, [1, 2, 3])])
def test_what_a_product_reads_exists(product: bool, expected: list[int]) -> None:
    """relu and tanh are one loop, of which tanh's result is left; what mm reads is there too."""
    calls = Calls()
    x = calls.given()
    relu = calls.call(ATEN.relu, x)
    others = [calls.call(ATEN.mm, relu, relu)] if product else []
    others.append(calls.call(ATEN.tanh, relu))
    left = {key(node) for node in others}
    half = Half([relu, *others], {}, {key(x)}, (), left, compiled=True, again_alone=False)
    assert at_each_call(half) == expected


@pytest.mark.parametrize("least", [False, True], ids=["as autograd", "least"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_what_is_there_is_counted_as_a_run_holds_it(run, least: bool) -> None:
    """The backward's calls on real tensors, one by one, each result let go of after its last
    reader and each parameter's gradient where it is made."""
    stage = Stage(run)
    graph = differentiate(Lowered(None, stage, ROWS), *layouts())
    parameters = dict(stage.named_parameters())
    values = {node: parameters[name].detach() for node, name in graph.states.items()}
    values |= {node: torch.ones(ROWS, WIDTH) for node in (*graph.arguments, *graph.seeds.values())}

    def call(node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)

    for node in graph.forward:
        call(node)
    division = divide(graph, Wanted(halves=False, least=least))
    others = {*graph.states, *graph.arguments, *graph.seeds.values()}
    others |= {node for node in graph.forward if is_of_state(graph, node)}
    values = {n: value for n, value in values.items() if n in others or n in division.saved}
    besides = addresses(values[node] for node in others)
    returned = {node for node in graph.of_arguments if node is not None}
    most = 0
    for number, node in enumerate(division.first):
        call(node)
        there = addresses(values.values()).items() - besides.items()
        away = addresses(values[n] for n in returned if n in values)
        most = max(most, sum(size for key, size in there if key not in away))
        later = {read for other in division.first[number + 1 :] for read in other.all_input_nodes}
        values = {n: value for n, value in values.items() if n in later | others | returned}
    half = replace(division.halves[0], compiled=False, again_alone=False)
    assert half.most() == most


def addresses(values) -> dict[int, int]:
    """Bytes of the storages of tensors, and of tuples of them, by where they are."""
    tensors = [t for v in values for t in (v if isinstance(v, list | tuple) else [v])]
    found = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}
