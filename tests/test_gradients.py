"""One sum per parameter and step, in buckets; ranks that disagree on None would wait for ever.

Sums over several ranks are told in `pipe_worker` (three_steps_of_a_sum_and_a_count, a_tied_model).
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.runtime import gradients
from autopipe.runtime.gradients import GradientSum


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """All ranks of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What goes into each all-reduce, which doubles it: as if another rank had the same."""
    seen: list[list[float]] = []

    class Work:
        def wait(self) -> None:
            pass

    def all_reduce(flat: Tensor, **_: object) -> Work:
        seen.append(flat.tolist())
        flat.mul_(2)
        return Work()

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    return seen


def parameter(*values: float, grad: bool = True) -> nn.Parameter:
    made = nn.Parameter(torch.tensor(values, dtype=torch.float32))
    made.grad = made.detach().clone() if grad else None
    return made


def test_by_name_whatever_the_order(group: dist.ProcessGroup, reduced: list[list[float]]) -> None:
    """Ranks may know their parameters in different orders; the names' order is everybody's."""
    one, two, alone = parameter(1, 1), parameter(2), parameter(3)
    GradientSum({"b": two, "alone": alone, "a": one}, {"b": group, "a": group}, frozenset())()
    assert reduced == [[1, 1, 2]]
    assert one.grad is not None and two.grad is not None and alone.grad is not None
    assert (one.grad.tolist(), two.grad.tolist(), alone.grad.tolist()) == ([2, 2], [4], [3])


def test_a_tied_parameter_without_a_gradient_here(
    group: dist.ProcessGroup, reduced: list[list[float]]
) -> None:
    """Another stage may have one and waits: zeros go in. Untied, all ranks have none alike."""
    tied, unused = parameter(1, 1, grad=False), parameter(5, grad=False)
    GradientSum(
        {"tied": tied, "unused": unused},
        dict.fromkeys(("tied", "unused"), group),
        frozenset({"tied"}),
    )()
    assert reduced == [[0, 0]]
    assert tied.grad is not None and unused.grad is None


def test_buckets(
    group: dist.ProcessGroup, reduced: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is closed once it holds more than 8 bytes; one larger gradient is not cut."""
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 8)
    sizes = {"a": 1, "b": 1, "c": 1, "d": 5, "e": 1}
    made = {name: parameter(*[float(size)] * size) for name, size in sizes.items()}
    GradientSum(made, dict.fromkeys(made, group), frozenset())()
    assert reduced == [[1, 1, 1], [5] * 5, [1]]


def test_a_bucket_has_one_dtype(group: dist.ProcessGroup, reduced: list[list[float]]) -> None:
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    made = {"a": parameter(1), "b": half, "c": parameter(2)}
    GradientSum(made, dict.fromkeys(made, group), frozenset())()
    assert reduced == [[1], [1, 1], [2]]
    assert half.grad.dtype is torch.float16 and half.grad.tolist() == [2, 2]


def test_a_transposed_gradient(group: dist.ProcessGroup, reduced: list[list[float]]) -> None:
    """Its entries go by their places, whatever the strides: ranks may differ in layout."""
    made = nn.Parameter(torch.zeros(2, 2))
    made.grad = torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t()
    GradientSum({"a": made}, {"a": group}, frozenset())()
    assert reduced == [[1, 2, 3, 4]]
    assert made.grad.tolist() == [[2, 4], [6, 8]]
