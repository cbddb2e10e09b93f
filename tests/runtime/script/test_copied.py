"""A write to a module whose weights a rank has copied is noticed, and one to its own is let be."""

import torch
from torch import Tensor, nn

from autopipe.runtime.script.copied import LOOKED_AT, Copied


def copies_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_a_write_is_noticed_once() -> None:
    model = nn.Linear(4, 4)
    copied = Copied([model], copies_of(model))
    assert copied.written() is None
    with torch.no_grad():
        model.bias.clamp_(-0.01, 0.01)
    assert copied.written() == ("bias", True)
    assert copied.written() is None


def test_a_write_through_data_shows_in_the_elements() -> None:
    """`p.data.clamp_(...)`, as in a WGAN's loop, counts as no write in autograd's eyes."""
    model = nn.Linear(4 * LOOKED_AT, 2)
    copied = Copied([model], copies_of(model))
    model.weight.data.mul_(0.5)
    assert copied.written() == ("weight", True)


def test_what_was_written_back_as_it_was_is_no_change() -> None:
    model = nn.Linear(4, 4)
    copied = Copied([model], copies_of(model))
    model.load_state_dict(copies_of(model))
    assert copied.written() is None


def test_what_is_written_back_once_training_has_begun() -> None:
    """Bug: `model.load_state_dict(begun)`, to begin anew, gives the module the values that it has
    had all along, and the copies trained on."""
    model = nn.Linear(4, 4)
    copied = Copied([model], copies_of(model))
    copied.note()
    assert copied.written() is None
    model.load_state_dict(copies_of(model))
    assert copied.written() == ("weight", True)


def test_the_modules_own_weights_may_be_written_and_not_replaced() -> None:
    model = nn.Linear(4, 4)
    held = dict(model.named_parameters())
    copied = Copied([model], held)
    model.weight.data.zero_()
    assert copied.written() is None
    model.weight = nn.Parameter(torch.ones(4, 4))
    assert copied.written() == ("weight", False)


def test_what_another_rank_has_is_looked_at_there() -> None:
    model = nn.Linear(4, 4)
    copied = Copied([model], {"bias": model.bias.detach().clone()})
    model.weight.data.zero_()
    assert copied.written() is None


def test_values_that_are_no_numbers_stay_what_they_are() -> None:
    model = nn.Linear(4, 4)
    model.bias.data.fill_(torch.nan)
    copied = Copied([model], copies_of(model))
    assert copied.written() is None
