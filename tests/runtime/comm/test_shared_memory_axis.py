"""Ranks that meet in shared memory; what they compute is told in `tests/support/tp_stories.py`."""

from __future__ import annotations

import mmap

import pytest
import torch

from autopipe.runtime.comm import shared_memory_axis
from autopipe.runtime.comm.group_axis import GroupAxis
from autopipe.runtime.comm.shared_memory_axis import SLOT, SharedAxis


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the others looked for it for ever where no watchdog runs beside them."""

    def alone(axis: GroupAxis, group: object) -> None:
        axis.rank, axis.size = 0, 2

    monkeypatch.setattr(GroupAxis, "__init__", alone)
    monkeypatch.setattr(shared_memory_axis, "TIMEOUT", 0.01)
    # No group is opened: `alone` asks none.
    axis = SharedAxis(None, mmap.mmap(-1, 2 * (64 + 2 * SLOT)))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError) as error:
        axis.all_reduce(torch.ones(4), "sum")
    assert str(error.value) == (
        "rank 1 of a tensor-parallel group of 2 has not come to collective 1 within 0.01 s"
    )
