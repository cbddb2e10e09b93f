"""The graph's words, and sizes that are expressions in the batch."""

import torch

from autopipe.ir.graph import (
    BATCH,
    Graph,
    Input,
    Node,
    Ref,
    State,
    StateSpec,
    TensorSpec,
    at_batch,
    bytes_at,
    shape_at,
    values_in,
)
from autopipe.util import dtypes

X = TensorSpec((BATCH, 4), torch.float32)


def node(name, *args, outputs=(X,), **kwargs):
    return Node(name, "aten.op.default", args, kwargs, outputs, len(outputs) > 1, (), "")


def test_names_of_values():
    assert [str(v) for v in (Ref("h/add/0"), Ref("split/0", 1), Input("ids"), State("w"))] == [
        "h/add/0",
        "split/0:1",
        "<ids>",
        "[w]",
    ]


def test_values_are_found_in_nested_arguments_in_order():
    a, b = Ref("a"), Input("b")
    assert list(values_in(((a, 1), 2 * BATCH, (b, (a,)), "text", None))) == [a, b, a]
    assert list(node("n", (a, 3), b, key=a).values()) == [a, b, a]


def test_a_node_reads_like_a_line_of_python():
    line = node("n", (Ref("a"), 2 * BATCH), Input("x"), dtype=torch.float16, outputs=(X, None))
    assert str(line) == "n = aten.op.default((a, 2*b), <x>, dtype=float16) -> float32[b, 4], None"
    assert dtypes.text_of((1, (torch.bool,))) == "(1, (bool))"


def test_sizes_at_a_number_of_rows():
    spec = TensorSpec((2 * BATCH + 1, 3), torch.bfloat16)
    assert shape_at(spec, 5) == (11, 3)
    assert bytes_at(spec, 5) == 11 * 3 * 2
    assert spec.bytes.subs(BATCH, 5) == 66
    assert at_batch(7, 5) == 7
    assert bytes_at(TensorSpec((), torch.float64), 1) == 8


def test_a_value_has_the_spec_of_who_makes_it():
    small = TensorSpec((3,), torch.int64)
    graph = Graph(
        {"x": X},
        {"w": StateSpec(small, "buffer")},
        (node("n", Input("x"), outputs=(None, small)),),
        (Ref("n", 1),),
    )
    assert graph.spec(Input("x")) is X
    assert graph.spec(State("w")) is graph.spec(Ref("n", 1)) is small
    assert graph.index == {"n": 0}
