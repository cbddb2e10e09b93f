"""Graphs compiled for the tensors they are called with: the results are always eager's."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from autopipe.joint.compiled_graph import CompiledGraph, overlaps

aten = torch.ops.aten

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


class Counting:
    """A backend that compiles with aot_eager, and counts how often it was asked to."""

    def __init__(self) -> None:
        self.shapes: list[list[tuple[int, ...]]] = []

    def __call__(self, body: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Any]:
        self.shapes.append([tuple(argument.shape) for argument in arguments])
        compiler = torch._dynamo.lookup_backend("aot_eager")
        made: Callable[..., Any] = compiler(body, arguments)
        return made


def body_of(count: int, write: Callable[..., tuple[fx.Node, ...]]) -> fx.GraphModule:
    """The graph of `count` arguments that `write(call, *arguments)` writes."""
    graph = fx.Graph()
    arguments = [graph.placeholder(f"x{n}") for n in range(count)]
    graph.output(write(graph.call_function, *arguments))
    return fx.GraphModule(nn.Module(), graph)


def doubled(call: Any, x: fx.Node) -> tuple[fx.Node, ...]:
    return (call(aten.mul.Tensor, (x, 2)), call(aten.sum.dim_IntList, (x, [0])))


def matrices(call: Any, x: fx.Node, y: fx.Node) -> tuple[fx.Node, ...]:
    return (call(aten.mm.default, (x, y)),)


def written_then_read(call: Any, x: fx.Node, y: fx.Node) -> tuple[fx.Node, ...]:
    call(aten.add_.Tensor, (x, 1))
    return (call(aten.mul.Tensor, (y, 2)),)


def compiled(
    count: int, write: Callable[..., tuple[fx.Node, ...]], *, writes: bool = False
) -> tuple[CompiledGraph, fx.GraphModule, Counting]:
    body, backend = body_of(count, write), Counting()
    return CompiledGraph(body, backend, writes=writes), body, backend


def test_two_places_of_equal_code_and_other_shapes_are_both_right() -> None:
    """As a layer of a U-Net and the one below it; nothing in the code has their sizes."""
    graph, body, backend = compiled(1, doubled)
    wide, narrow = graph.at("wide"), graph.at("narrow")
    for _ in range(2):
        for place, x in ((wide, torch.randn(4, 6)), (narrow, torch.randn(4, 3))):
            for made, expected in zip(place(x), body(x), strict=True):
                assert torch.equal(made, expected)
    assert backend.shapes == [[(4, 6)], [(4, 3)]], "once for each"


def test_a_parameter_of_16_bits_may_have_a_gradient_of_32() -> None:
    """Bug: the backward of a head, whose loss is computed in parts, is compiled for a view of a
    weight that has the first part's gradient by then; torch made a fake tensor of that as well, in
    the dtype of the weight."""
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(4, 6)
    graph, body, _ = compiled(2, matrices)
    with torch.no_grad():
        arguments = weight, weight.t()
        assert torch.equal(graph.at("place")(*arguments)[0], body(*arguments)[0])


def test_two_places_of_equal_code_and_equal_shapes_are_compiled_once() -> None:
    graph, _, backend = compiled(1, doubled)
    graph.at("first")(torch.ones(4, 6))
    graph.at("second")(torch.ones(4, 6))
    assert len(backend.shapes) == 1


OTHERS = {
    "strides": torch.randn(6, 4).t(),
    "dtype": torch.randn(4, 6, dtype=torch.float64),
    "shape": torch.randn(8, 6),
    "expanded": torch.randn(1, 6).expand(4, 6),
    "integers": torch.randint(9, (4, 6)),
}


@pytest.mark.parametrize(
    ("other", "backend"),
    [
        pytest.param(
            other,
            backend,
            marks=pytest.mark.long if backend == "inductor" and name != "strides" else (),
            id=f"{backend}-{name}",
        )
        for backend in ("inductor", "aot_eager", "eager")
        for name, other in OTHERS.items()
    ],
)
def test_one_place_may_be_given_other_tensors(other: Tensor, backend: str) -> None:
    """As an evaluation by batches that the user made in another way."""
    body = body_of(1, doubled)
    place = CompiledGraph(body, backend, writes=False).at("place")
    for x in (torch.randn(4, 6), other, torch.randn(4, 6)):
        for made, expected in zip(place(x), body(x), strict=True):
            assert made.dtype == expected.dtype
            torch.testing.assert_close(made, expected)


def test_one_tensor_may_be_given_twice() -> None:
    """x x' of tied weights; with another weight of the same shape the code is compiled anew."""
    graph, _, backend = compiled(2, matrices)
    place, x, y = graph.at("place"), torch.randn(4, 4), torch.randn(4, 4)
    for first, second in ((x, x), (y, y), (x, y), (y, x), (y, y)):
        assert torch.equal(place(first, second)[0], first @ second)
    assert len(backend.shapes) == 2


def test_autocast_and_gradients_are_those_of_the_call() -> None:
    graph, _, backend = compiled(2, matrices)
    place = graph.at("place")
    x = torch.randn(4, 4, requires_grad=True)
    with torch.no_grad():
        (plain,) = place(x, x)
        with torch.autocast("cpu", torch.bfloat16):
            (lowered,) = place(x, x)
    (learning,) = place(x, x)
    assert plain.dtype == torch.float32 and lowered.dtype == torch.bfloat16
    assert learning.requires_grad and not plain.requires_grad
    assert len(backend.shapes) == 3


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_what_is_written_is_seen_through_whatever_shares_its_memory(backend: str) -> None:
    """y = 2 y after x += 1: of one tensor 2 (x + 1), of two 2 y, whichever came first."""
    body = body_of(2, written_then_read)
    place = CompiledGraph(body, backend, writes=True).at("place")
    for _ in range(2):
        x, y = torch.zeros(4), torch.zeros(4)
        assert torch.equal(place(x, y)[0], torch.zeros(4)) and torch.equal(x, torch.ones(4))
        x = torch.zeros(4)
        assert torch.equal(place(x, x)[0], torch.full((4,), 2.0))
        whole = torch.zeros(6)
        (made,) = place(whole[:4], whole[2:])
        assert torch.equal(made, torch.tensor([2.0, 2.0, 0.0, 0.0]))


def test_which_arguments_overlap_is_told_by_their_storages() -> None:
    x, y = torch.zeros(6), torch.zeros(6)
    assert overlaps([x, y]) == []
    assert overlaps([x, y, x[2:]]) == [[(0, 0), (2, 2)]]


def test_an_op_that_asks_for_values_runs_as_it_is() -> None:
    """How many rows `nonzero` has, no compiler can know."""

    def places(call: Any, x: fx.Node) -> tuple[fx.Node, ...]:
        return (call(aten.nonzero.default, (x,)),)

    place = CompiledGraph(body_of(1, places), "aot_eager", writes=False).at("place")
    assert len(place(torch.tensor([0, 1, 1]))[0]) == 2
    assert len(place(torch.tensor([0, 0, 1]))[0]) == 1


def test_a_mode_sees_each_op() -> None:
    """mm of 4 x 4: 2 * 4^3 operations, whether it was compiled before or not."""
    graph, _, backend = compiled(2, matrices)
    place, x = graph.at("place"), torch.randn(4, 4)
    place(x, x)
    with FlopCounterMode(display=False) as counter:
        place(x, x)
    assert counter.get_total_flops() == 2 * 4**3
    place(x, x)
    assert len(backend.shapes) == 1


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_no_argument_is_kept(backend: str) -> None:
    place = CompiledGraph(body_of(1, doubled), backend, writes=False).at("place")
    for _ in range(2):
        x = torch.ones(4, 6)
        here, results = weakref.ref(x), place(x)
        there = [weakref.ref(result) for result in results]
        del x, results
        assert here() is None and all(result() is None for result in there)
