"""What `plan` makes of what it is asked."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from autopipe.errors import AutopipeError
from autopipe.frontend.optimizer import optimizer_factor
from autopipe.planners.driver.arguments import limits_of
from autopipe.planners.driver.request import micro_batch_rows
from autopipe.planners.model.problem import Constraints
from tests.support.inprocess import machine


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 KiB", 1536), ("512M", 512 * 10**6), (7, 7)],
)
def test_sizes(text: int | str, bytes: int) -> None:
    assert limits_of(text, machine(2)) == (bytes, bytes)


def test_a_limit_for_each_device() -> None:
    assert limits_of("80GB,40GB", machine(2)) == (80 * 10**9, 40 * 10**9)
    with pytest.raises(AutopipeError, match="3 limits were given for the 2 devices"):
        limits_of([1, 2, 3], machine(2))


def test_micro_batches_have_rows_that_some_mesh_divides_the_batch_into() -> None:
    assert micro_batch_rows(12, 2, Constraints()) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_rows(12, 2, Constraints(dp=2)) == [1, 2, 3, 6]
    assert micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3)) == [2]
    assert micro_batch_rows(12, 2, Constraints(micro_batch_size=3)) == [3]
    assert micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3, micro_batch_size=2)) == [2]
    with pytest.raises(AutopipeError, match="12 rows does not divide into dp=2 x micro_batches=4"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=4))
    with pytest.raises(AutopipeError, match="into micro-batches of 4 rows over dp=2"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batch_size=4))
    with pytest.raises(AutopipeError, match="micro_batches=3 of a batch of 12 rows makes micro-b"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3, micro_batch_size=1))


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (torch.optim.AdamW, 2.0),
        (torch.optim.SGD, 0.0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1.0),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3.0),
        (torch.optim.Adagrad, 1.0),
    ],
)
def test_optimizer_factor(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], factor: float
) -> None:
    """Adam keeps two moments of a parameter, momentum one; the step's number is not counted."""
    assert optimizer_factor(make) == factor
