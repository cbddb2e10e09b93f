"""A module of which a rank trains copies is neither called nor saved, from the first step on.

Plain PyTorch would have the trained weights there.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autopipe import ModelError
from autopipe.runtime.script.stale import Stale, check_fresh


def guarded() -> tuple[nn.Module, Stale]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return model, Stale(model)


def call(model: nn.Module, folder: Path) -> None:
    assert model(torch.ones(2, 4)).shape == (2, 4)


def state(model: nn.Module, folder: Path) -> None:
    assert "0.weight" in model.state_dict()


def save(model: nn.Module, folder: Path) -> None:
    torch.save(model, folder / "model.pt")
    assert isinstance(torch.load(folder / "model.pt", weights_only=False), nn.Sequential)


def train_again(model: nn.Module, folder: Path) -> None:
    check_fresh(model)


Read = Callable[[nn.Module, Path], None]
READS: tuple[Read, ...] = call, state, save, train_again


@pytest.mark.parametrize("read", READS)
def test_from_the_first_step_on(read: Read, tmp_path: Path) -> None:
    model, stale = guarded()
    read(model, tmp_path)
    stale.note()
    with pytest.raises(ModelError, match="called, saved or given to another") as refused:
        read(model, tmp_path)
    assert "pipe.evaluate" in str(refused.value.hint) and "pipe.save" in str(refused.value.hint)


@pytest.mark.parametrize("read", READS)
def test_after_the_trained_weights_were_loaded(read: Read, tmp_path: Path) -> None:
    model, stale = guarded()
    trained = copy.deepcopy(model.state_dict())
    stale.note()
    model.load_state_dict(trained)
    read(model, tmp_path)
    stale.note()  # training goes on
    with pytest.raises(ModelError, match="called, saved"):
        read(model, tmp_path)


@pytest.mark.parametrize("read", READS)
def test_after_a_part_of_the_trained_weights_was_loaded(read: Read, tmp_path: Path) -> None:
    """As by `model.load_state_dict(pipe.state_dict(), strict=False)` of a pipeline's rank."""
    model, stale = guarded()
    part = {"0.weight": torch.zeros(4, 4)}
    stale.note()
    model.load_state_dict(part, strict=False)
    with pytest.raises(ModelError, match="called, saved"):
        read(model, tmp_path)


@pytest.mark.parametrize("read", READS)
def test_a_copy_from_before_is_free(read: Read, tmp_path: Path) -> None:
    """As of the weights to begin with, to compare with."""
    model, stale = guarded()
    before = copy.deepcopy(model)
    stale.note()
    read(before, tmp_path)
    read(copy.deepcopy(before), tmp_path)


@pytest.mark.parametrize("read", READS)
def test_a_copy_from_later_is_none_of_the_trained_module(read: Read, tmp_path: Path) -> None:
    """As `best = copy.deepcopy(model)`, which would be what training began with."""
    model, stale = guarded()
    stale.note()
    later = copy.deepcopy(model)
    with pytest.raises(ModelError, match="called, saved"):
        read(later, tmp_path)
    later.load_state_dict(guarded()[0].state_dict())
    read(later, tmp_path)
