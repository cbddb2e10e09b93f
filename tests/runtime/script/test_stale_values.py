"""Parameters that training has left behind: what they are may be asked, their values not.

Each read would be of what training began with, where plain PyTorch has the trained ones.
"""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopipe import ModelError
from autopipe.runtime.script.stale import Stale

NAMES = ["0.weight", "0.bias"]


def left() -> tuple[nn.Sequential, nn.Parameter]:
    """A module after a first step, which a rank trains copies of; and its weight."""
    model = nn.Sequential(nn.Linear(3, 3))
    Stale(model, NAMES).note()
    return model, model.get_parameter("0.weight")


READS: dict[str, Callable[[nn.Module, nn.Parameter, Tensor], object]] = {
    "a norm": lambda model, p, other: p.norm(),
    "a sum": lambda model, p, other: sum(float(one.sum()) for one in model.parameters()),
    "a product": lambda model, p, other: other @ p,
    "through data": lambda model, p, other: other.lerp_(p.data, 0.1),
    "into another": lambda model, p, other: other.copy_(p.detach()),
    "several": lambda model, p, other: torch._foreach_lerp_([other], [p], 0.1),
    "a vector": lambda model, p, other: nn.utils.parameters_to_vector(model.parameters()),
    "numpy": lambda model, p, other: np.asarray(p.detach()),
    "on another device": lambda model, p, other: p.detach().cpu(),
    "a gradient": lambda model, p, other: p.grad,
    "clipping": lambda model, p, other: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "a dtype": lambda model, p, other: model.double(),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_is_refused(read: str) -> None:
    with pytest.raises(ModelError, match="a parameter of the module itself was read") as refused:
        READS[read](*left(), torch.zeros(3, 3))
    assert "pipe.named_parameters()" in str(refused.value.hint)


@pytest.mark.parametrize("how", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_a_mean_of_weights(how: dict[str, object]) -> None:
    """It was made before the first step, and its own weights may be read and called."""
    model = nn.Sequential(nn.Linear(3, 3))
    stale = Stale(model, NAMES)
    mean = AveragedModel(model, **how)  # type: ignore[arg-type]
    mean.update_parameters(model)
    stale.note()
    with pytest.raises(ModelError, match="was read after training has begun"):
        mean.update_parameters(model)
        mean.update_parameters(model)
    mean(torch.ones(1, 3))


def test_what_it_is_may_be_asked() -> None:
    model, weight = left()
    assert isinstance(weight, nn.Parameter) and weight.shape == (3, 3)
    assert sum(one.numel() for one in model.parameters()) == 12
    assert weight.requires_grad and weight.is_leaf and weight.dtype == torch.float32
    assert {weight: 1}[weight] == 1
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.zero_grad()
    optimizer.step()  # `updates` tells of it


def test_passed_over_where_a_default_device_is_set() -> None:
    """Bug: `model.zero_grad()` was refused, for the mode of the device stood between."""
    model, weight = left()
    with torch.device("cpu"):
        model.zero_grad()
        with pytest.raises(ModelError, match="was read after training has begun"):
            weight.norm()


def test_a_write_is_found_later() -> None:
    """By `copied`, which says that this rank trains a copy."""
    _, weight = left()
    weight.data.clamp_(-0.1, 0.1)
    with torch.no_grad():
        weight.mul_(2.0)


def test_a_copy_has_the_same_weights() -> None:
    """As of the best model so far: it is refused as the module is, until it is loaded."""
    model, _ = left()
    best = copy.deepcopy(model)
    for read in (lambda: best(torch.ones(1, 3)), best.state_dict):
        with pytest.raises(ModelError, match="called, saved or given to another"):
            read()
    trained = {"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3)}
    best.load_state_dict(trained)
    assert best(torch.ones(1, 3)).sum().item() == 12.0


def test_the_module_is_loaded() -> None:
    model, weight = left()
    model.load_state_dict({"0.weight": torch.ones(3, 3), "0.bias": torch.ones(3)})
    assert weight.sum().item() == 9.0
