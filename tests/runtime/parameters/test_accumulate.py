"""Gradients added without autograd's engine: to the bit what the engine makes of them."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from autopipe.runtime.parameters.accumulate import accumulate, exact


def by_engine(parameter: Tensor, gradient: Tensor) -> None:
    torch.autograd.backward([get_gradient_edge(parameter)], [gradient])


def sums(
    gradients: Sequence[Tensor], *, summed_in: torch.dtype | None = None, transposed: bool = False
) -> tuple[nn.Parameter, nn.Parameter]:
    """Two parameters of [4, 3]: of one accumulate has made the gradient, of one the engine."""
    found = []
    for add in (accumulate, by_engine):
        start = torch.zeros(3, 4).t() if transposed else torch.zeros(4, 3)
        parameter = nn.Parameter(start)
        if summed_in is not None:
            parameter.grad_dtype = summed_in
        with torch.no_grad():
            for gradient in gradients:
                add(parameter, gradient.clone())
        found.append(parameter)
    return found[0], found[1]


def assert_same(mine: Tensor | None, other: Tensor | None) -> None:
    assert mine is not None and other is not None
    assert mine.dtype == other.dtype and mine.stride() == other.stride()
    assert torch.equal(mine, other)


@pytest.mark.parametrize("made_in", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("summed_in", [None, torch.bfloat16, torch.float32])
def test_sums_are_the_engines(made_in: torch.dtype, summed_in: torch.dtype | None) -> None:
    gradients = [torch.randn(4, 3).to(made_in) for _ in range(3)]
    mine, other = sums(gradients, summed_in=summed_in)
    assert_same(mine.grad, other.grad)


def test_what_was_made_in_16_bits_may_skip_its_cast() -> None:
    """fp32(bf16) has the bits of the bf16, and the sum adds them in fp32 either way."""
    gradients = [torch.randn(4, 3).bfloat16() for _ in range(3)]
    mine, _ = sums(gradients)
    _, other = sums([gradient.float() for gradient in gradients])
    assert_same(mine.grad, other.grad)


@pytest.mark.parametrize(
    ("narrow", "wide", "is_exact"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float16, torch.bfloat16, False),
    ],
)
def test_of_which_dtypes_all_numbers_are_numbers_of_another(
    narrow: torch.dtype, wide: torch.dtype, is_exact: bool
) -> None:
    assert exact(narrow, wide) == is_exact


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_lies_as_its_parameter_does(transposed: bool) -> None:
    mine, other = sums([torch.randn(3, 4).t()], transposed=transposed)
    assert_same(mine.grad, other.grad)


def first(gradient: Tensor, *, own: bool) -> Tensor:
    """The gradient of a parameter of [4, 3] that had none."""
    parameter = nn.Parameter(torch.zeros(4, 3))
    with torch.no_grad():
        accumulate(parameter, gradient, own=own)
    assert parameter.grad is not None and torch.equal(parameter.grad, gradient.float())
    return parameter.grad


def in_one_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_memory_that_nobody_else_has_becomes_the_gradient() -> None:
    mine = torch.randn(4, 3)
    assert in_one_memory(first(mine, own=True), mine)
    assert not in_one_memory(first(mine, own=False), mine)


@pytest.mark.parametrize(
    "gradient",
    [torch.randn(8, 3)[:4], torch.randn(3, 4).t(), torch.ones(1, 1).expand(4, 3)],
    ids=["part of more", "other strides", "expanded"],
)
def test_memory_of_another_size_or_order_does_not(gradient: Tensor) -> None:
    made = first(gradient, own=True)
    assert not in_one_memory(made, gradient) and made.is_contiguous()


def test_hooks_on_the_sum_see_it() -> None:
    """1, then 1 + 2; one that takes it away, as ZeRO-2's, leaves none."""
    parameter, seen = nn.Parameter(torch.zeros(2)), list[float]()

    def see(summed: Tensor) -> None:
        assert summed is parameter and summed.grad is not None
        seen.append(float(summed.grad[0]))

    handle = parameter.register_post_accumulate_grad_hook(see)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        accumulate(parameter, torch.ones(2))
        accumulate(parameter, 2 * torch.ones(2))
        handle.remove()
        take = parameter.register_post_accumulate_grad_hook  # type: ignore[no-untyped-call]
        take(lambda summed: setattr(summed, "grad", None))
        accumulate(parameter, torch.ones(2))
    assert seen == [1, 3] and parameter.grad is None


def test_hooks_that_change_a_gradient_do() -> None:
    """Of a user, on `pipe.parameters()`: (2 + 4) in fp32, though backward made bf16."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        accumulate(parameter, torch.ones(2).bfloat16(), own=True)
        accumulate(parameter, 2 * torch.ones(2).bfloat16(), own=True)
    assert_same(parameter.grad, torch.full((2,), 6.0))


def test_sparse_gradients_are_summed_too() -> None:
    """Of an embedding that is the head as well, one sparse and one dense."""
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    sparse = table.weight.grad
    assert sparse is not None and sparse.is_sparse
    for gradients in ([sparse, sparse], [sparse, torch.ones(4, 3)], [torch.ones(4, 3), sparse]):
        found = []
        for add in (accumulate, by_engine):
            parameter = nn.Parameter(torch.zeros(4, 3))
            with torch.no_grad():
                for gradient in copy.deepcopy(gradients):
                    add(parameter, gradient)
            assert parameter.grad is not None
            found.append(parameter.grad.to_dense())
        assert torch.equal(*found)
