"""Processes that were started again meet in a store that has the dead ones' words still."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autopipe import LaunchError
from autopipe.runtime.launch.attempt import OWN_STORE, elastic_warning, of_this_attempt


def attempt(store: Any, size: int) -> list[Any]:
    """The stores that so many ranks get, each in a thread."""
    with ThreadPoolExecutor(size) as pool:
        ends = [pool.submit(of_this_attempt, store, rank, size, 10.0) for rank in range(size)]
        return [end.result() for end in ends]


def test_each_attempt_has_its_own() -> None:
    """What rank 2 has written in the first is not there in the second; within one all see it."""
    store = dist.HashStore()
    first, second = attempt(store, 3), attempt(store, 3)
    first[2].set("address", "of the dead")
    assert first[0].get("address") == b"of the dead"
    assert not second[0].check(["address"])
    second[1].set("address", "of the living")
    assert [each.get("address") for each in second] == [b"of the living"] * 3


def test_a_rank_that_died_before_it_had_asked() -> None:
    """Rank 1 of the first attempt never came: the second one is not a round behind."""
    store = dist.HashStore()
    with pytest.raises(LaunchError, match="rank 0: rank 1 did not come in time"):
        of_this_attempt(store, 0, 2, 0.1)
    both = attempt(store, 2)
    both[0].set("a", "b")
    assert both[1].get("a") == b"b"


def test_rank_0_does_not_come() -> None:
    with pytest.raises(LaunchError, match="rank 1: rank 0 did not answer in time"):
        of_this_attempt(dist.HashStore(), 1, 2, 0.1)


def test_an_elastic_torchrun_is_told_of_its_variable_in_time() -> None:
    """Before a node is lost: afterwards its agent waits, and starts no rank that could say so."""
    torchrun = {"TORCHELASTIC_RUN_ID": "run", "RANK": "0"}
    assert f"needs {OWN_STORE}=1 on every node" in str(elastic_warning(torchrun))
    assert elastic_warning({**torchrun, OWN_STORE: "1"}) is None
    assert elastic_warning({"SLURM_PROCID": "0"}) is None
