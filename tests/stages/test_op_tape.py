"""What runs is written down, op by op."""

import operator

import pytest
import torch

from autopipe.ir.torch_private import fake_mode, storage_key
from autopipe.stages import op_tape
from autopipe.stages.op_tape import MADE, Tape, marking


def names(found: Tape) -> list[str]:
    return [node.name for node in found.graph.nodes]


def test_ops_and_what_they_read() -> None:
    x, found = torch.ones(2, 3), Tape()
    given = found.given(x)
    with found:
        y = torch.tanh(x + 1)
    assert names(found) == ["arg0", "add", "tanh"]
    add, tanh = list(found.graph.nodes)[1:]
    assert (add.target, add.args) == (torch.ops.aten.add.Tensor, (given, 1))
    assert found.node(y) is tanh and tanh.args == (add,)
    assert found.node(0.5) == 0.5


def test_backward_is_among_them() -> None:
    x, found = torch.ones(3, requires_grad=True), Tape()
    found.given(x)
    with found:
        (gradient,) = torch.autograd.grad(x.exp().sum(), x)
    assert names(found) == [
        "arg0",
        "exp",
        "detach",
        "sum_1",
        "ones_like",
        "expand",
        *names(found)[6:],
    ]
    assert found.node(gradient).name == "mul"


def test_of_several_results_each_has_a_node() -> None:
    x, found = torch.ones(4), Tape()
    found.given(x)
    with found:
        first, second = x.split(2)
    call, *parts = list(found.graph.nodes)[1:]
    assert [(part.target, part.args) for part in parts] == [
        (operator.getitem, (call, 0)),
        (operator.getitem, (call, 1)),
    ]
    assert [found.node(first), found.node(second)] == parts


def test_who_writes_a_tensor_in_place_has_made_it() -> None:
    x, found = torch.ones(4), Tape()
    found.given(x)
    with found:
        y = x + 1
        y.mul_(2)
    assert found.node(y).name == "mul_"


def test_lists_of_tensors_and_keywords() -> None:
    x, y, found = torch.ones(2), torch.ones(2), Tape()
    given = [found.given(x), found.given(y)]
    with found:
        torch.cat([x, y])
        torch.ones_like(x, dtype=torch.float64)
    cat, ones = list(found.graph.nodes)[2:]
    assert cat.args == (given,)
    assert ones.kwargs["dtype"] == torch.float64 and ones.meta[MADE].dtype == torch.float64


def test_a_tensor_from_nowhere_is_a_constant() -> None:
    x, other, found = torch.ones(2), torch.ones(2), Tape()
    found.given(x)
    with found:
        x + other
    assert [node.op for node in found.graph.nodes] == ["placeholder", "get_attr", "call_function"]


def test_bytes_are_those_of_storages() -> None:
    """A view lies in the storage of what it is a view of, and counts all of it."""
    with fake_mode():
        x, found = torch.empty(4, 8), Tape()
        found.given(x)
        with found:
            view = (x + 1)[0]
    whole, row = list(found.graph.nodes)[1:]
    assert row.meta[MADE].storages == whole.meta[MADE].storages == {storage_key(view): 4 * 8 * 4}


def test_marks_are_for_what_is_written_meanwhile() -> None:
    x, found = torch.ones(2), Tape()
    with marking("a", 0):
        pass  # no tape, nothing to mark
    with found:
        x + 1
        with pytest.raises(ZeroDivisionError), marking("a", 1):
            x * 2
            raise ZeroDivisionError
        x - 1
    calls = [node for node in found.graph.nodes if node.op == "call_function"]
    assert [node.meta.get("a") for node in calls] == [None, 1, None]


def test_only_inside_it_is_running() -> None:
    found = Tape()
    with found:
        assert op_tape.running() is found
    assert op_tape.running() is None
