"""Ops in place become new tensors exactly where nobody can tell; names and gradients stay."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopipe.ir.dataflow import analyse
from autopipe.sharding.functionalize import out_of_place
from tests.support import simulated
from tests.support.staged import micro_batches, trace_model, traced
from tests.support.zoo import ZOO


class Model(nn.Module):
    """A linear layer, and what a test does to its result."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x)).float().square().mean()


def ops(then: Callable[[Tensor], Tensor]) -> str:
    """What stands between the linear layer and the loss, by op."""
    trace = trace_model(Model(then), lambda rows: {"x": torch.ones(rows, 4)})
    before = trace.graph
    after = out_of_place(before)
    names = [node.name for node in before.nodes]
    assert [name for name in names if name in after.index] == [*after.index]
    names = [node.short for node in after.nodes[1:]]
    return " ".join(name for name in names if name not in ("to", "pow", "square", "mean"))


def no_grad(y: Tensor) -> Tensor:
    with torch.no_grad():
        y.mul_(2)
    return y


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda y: y.relu_(), "relu"),
        (lambda y: y.mul_(2).add_(1), "mul add"),  # a chain: each reads only the one before
        (lambda y: y.masked_fill_(y.detach() > 0, 0.0), "detach gt masked_fill"),
        (lambda y: y.view(-1, 2, 2).add_(1), "view add"),  # the whole is not read again
    ],
)
def test_becomes_new(then: Callable[[Tensor], Tensor], expected: str) -> None:
    assert ops(then) == expected


@pytest.mark.parametrize("exponent", [3, torch.tensor([1.0, 2.0, 3.0, 4.0])])
def test_powers_are_those_of_the_tensor(exponent: float | Tensor) -> None:
    """Barlow Twins' loss: `pow_.Scalar` is x**3 and `pow.Scalar` 3**x, which takes no tensor x."""
    trace = trace_model(Model(lambda y: y.pow_(exponent)), lambda rows: {"x": torch.ones(rows, 4)})
    (power,) = [node for node in out_of_place(trace.graph).nodes if node.short == "pow"]
    assert power.op.startswith("aten.pow.Tensor_")


def test_an_op_that_takes_its_tensor_second_gets_it_there() -> None:
    """Bug: `y.polygamma_(2)` became `polygamma(y, 2)`, which takes the number first."""
    model = Model(lambda y: (2 + y.tanh()).polygamma_(2).mul_(3))
    trace = trace_model(model, lambda rows: {"x": torch.ones(rows, 4)})
    changed = dataclasses.replace(trace, graph=out_of_place(trace.graph))
    assert [node.short for node in changed.graph.nodes if "polygamma" in node.op] == ["polygamma"]
    (leaves,) = micro_batches(trace, {"x": torch.randn(2, 4)}, 1)
    loss, gradients = simulated.one_process(trace, model, leaves, 2)
    new_loss, new = simulated.one_process(changed, model, leaves, 2)
    assert torch.equal(loss, new_loss) and gradients.keys() == new.keys() != set()
    assert all(torch.equal(gradients[n], new[n]) for n in gradients)


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda y: (y.view(-1, 2, 2), y.add_(1))[0], "view add_"),  # read by an older name
        (lambda y: (y[:, :2].mul_(2), y)[1], "slice mul_"),  # a part of what is read
        (no_grad, "mul_"),  # y keeps its history
        (lambda y: y.bfloat16().add_(torch.ones(4)), "ones add_"),  # add would be fp32
    ],
)
def test_stays_in_place(then: Callable[[Tensor], Tensor], expected: str) -> None:
    assert ops(then) == expected


def filled(*parts: slice, length: int = 8) -> Callable[[Tensor], Tensor]:
    """Keys as DeepSeek-V3 puts them together: a new tensor that is filled slice by slice."""

    def then(y: Tensor) -> Tensor:
        keys = y.new_empty(len(y), length)
        for number, part in enumerate(parts):
            keys[:, part] = y * number
        return keys

    return then


def read_between(y: Tensor) -> Tensor:
    keys = y.new_zeros(len(y), 8)
    keys[:, :4] = y
    seen = keys.sum()
    keys[:, 4:] = y * 2
    return keys + seen


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (lambda h: h.gt_(0.1) @ h.new_ones(4, 4), "gt_ new_ones matmul"),
        (lambda h: h.logical_not_() @ h.new_ones(4, 4), "logical_not_ new_ones matmul"),
        (lambda h: h.gt(0.1).logical_not_() * 2, "gt logical_not mul"),
    ],
)
def test_an_answer_in_a_tensor_of_numbers_is_a_number(
    then: Callable[[Tensor], Tensor], expected: str
) -> None:
    """Bug: out of place it is a boolean, of which there is no matrix product."""
    assert ops(lambda h: h + then(h.detach().clone())).startswith(f"detach clone {expected}")


def test_what_fills_a_tensor_is_put_together() -> None:
    assert ops(filled(slice(0, 4), slice(4, None))) == "mul mul cat"
    assert ops(filled(slice(4, 8), slice(0, 4))) == "mul mul cat"  # in another order
    assert ops(filled(slice(0, 4), slice(4, 8), length=12)).endswith("slice copy_")  # not all
    assert ops(filled(slice(0, 4), slice(2, 6), slice(4, 8))).endswith("slice copy_")  # twice
    assert "cat" not in ops(read_between)


def test_filled_out_of_order_it_is_the_same() -> None:
    model = Model(filled(slice(4, 8), slice(0, 4)))
    trace = trace_model(model, lambda rows: {"x": torch.ones(rows, 4)})
    (leaves,) = micro_batches(trace, {"x": torch.randn(2, 4)}, 1)
    changed = dataclasses.replace(trace, graph=out_of_place(trace.graph))
    loss, gradients = simulated.one_process(trace, model, leaves, 2)
    new_loss, new = simulated.one_process(changed, model, leaves, 2)
    assert torch.equal(loss, new_loss) and gradients.keys() == new.keys() != set()
    assert all(torch.equal(gradients[n], new[n]) for n in gradients)


@pytest.mark.parametrize("name", ["resnet", "unet", "t5", "llama"])
def test_loss_and_gradients_are_the_same_bits(name: str) -> None:
    trace, case = traced(name), ZOO[name]
    (leaves,) = micro_batches(trace, case.inputs(2), 1)
    changed = dataclasses.replace(trace, graph=out_of_place(trace.graph))
    loss, gradients = simulated.one_process(trace, case.model(), leaves, 2)
    new_loss, new = simulated.one_process(changed, case.model(), leaves, 2)
    assert torch.equal(loss, new_loss)
    assert all(torch.equal(gradients[n], new[n]) for n in gradients | new)


def test_convolutions_between_relus_are_dealt_out() -> None:
    """What it is for: nothing in a residual network shares memory but its statistics."""
    graph = out_of_place(traced("resnet").graph)
    left = {node.op for node in graph.nodes if node.short.endswith("_")}
    assert left <= {"aten.add_.Tensor"}  # the count of batches
    assert all(not str(root).endswith("relu") for root in analyse(graph).writers)
