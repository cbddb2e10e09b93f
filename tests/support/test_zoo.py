"""The zoo is alive: each model runs forward and backward, and is the same each time it is built."""

import pytest
import torch
from torch import Tensor

from tests.support.long import chosen
from tests.support.zoo import ZOO, Case


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
@pytest.mark.parametrize("rows", chosen((1, 2, 3, 8), now=(1, 3)))
def test_every_parameter_that_learns_gets_a_gradient(case: Case, rows: int) -> None:
    model = case.model()
    loss = case.eager(model, case.inputs(rows))
    scalar = loss if isinstance(loss, Tensor) else loss[0] / loss[1]
    assert scalar.isfinite()
    scalar.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@pytest.mark.parametrize("case", ZOO.values(), ids=ZOO)
def test_the_same_weights_and_rows_each_time(case: Case) -> None:
    torch.manual_seed(7)
    first, before = case.model(), torch.get_rng_state()
    second = case.model()
    assert torch.equal(before, torch.get_rng_state())
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    few, many = case.inputs(2), case.inputs(5)
    for key in few if isinstance(few, dict) else range(len(few)):
        assert torch.equal(few[key], many[key][:2])
