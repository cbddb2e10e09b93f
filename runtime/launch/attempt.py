"""Gives the ranks of one torchrun attempt a key prefix of their own in a store that is used again.

torchrun restarts the workers after one has died. The new workers get the old workers' store, whose
addresses belong to dead processes, and gloo waits for these (pytorch/pytorch#135712). The number of
the attempt is no prefix, as the agents of several nodes count attempts differently. So rank 0 draws
a random word, and each rank asks for the word with a random number of its own:

    rank 2      hello/2 = 7f3a                 rank 2 is here; its number is 7f3a
    rank 0      welcome/2 = 7f3a 51c8          to the rank with number 7f3a: the word is 51c8
    rank 2      51c8/here/2                    rank 2 has the word; rank 0 need not look again

Rank 0 may also answer a number that a dead worker has left in the store; nobody reads that answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

from autopipe.errors import LaunchError


class SharedStore(Protocol):
    """The methods of `torch.distributed.Store` that this module calls."""

    def set(self, key: str, value: str) -> None:
        """Make `value` known to all ranks."""

    def get(self, key: str) -> bytes:
        """The value of `key`, which has been set before."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are set."""


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""An environment variable; if it is 1, torchrun's agents give the workers a store of their own."""

_PAUSE = 0.02
"""Seconds between two looks into the store."""


def of_this_attempt(store: SharedStore, rank: int, size: int, timeout: float) -> Any:
    """The store under a prefix that only this attempt's ranks know; every rank calls it.

    Returns:
        A `torch.distributed.PrefixStore`.

    Raises:
        LaunchError: another rank has not called it within `timeout` seconds.
    """
    import torch.distributed as dist

    nonce, deadline = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"{_HERE}/hello/{rank}", nonce)
    word = nonce if rank == 0 else _word_from_rank_0(store, rank, nonce, deadline)
    if rank == 0:
        _give_word(store, word, size, deadline)
    whole: Any = store
    return dist.PrefixStore(f"{_HERE}/{word}", whole)  # type: ignore[attr-defined]  # public


_HERE = "autopipe/attempt"


def elastic_warning(environ: Mapping[str, str]) -> str | None:
    """A warning for runs that an elastic torchrun started without `OWN_STORE`; None: no warning.

    After its first rendezvous an agent of torch 2.13 that shares its store does not publish its
    address again, and a node that comes back waits for the address before it starts a rank. That
    node cannot print the warning, so the first ranks do, whether or not torchrun is elastic: a rank
    cannot find that out.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get(OWN_STORE) == "1":
        return None
    return (
        f"--replan: an elastic torchrun (--nnodes MIN:MAX) needs {OWN_STORE}=1 on every node; "
        "without it a node that comes back waits until torchrun's timeout"
    )


def _word_from_rank_0(store: SharedStore, rank: int, nonce: str, deadline: float) -> str:
    """The word that rank 0 has drawn, as another rank learns it."""
    welcome = f"{_HERE}/welcome/{rank}"
    while time.monotonic() < deadline:
        if store.check([welcome]):
            number, _, word = store.get(welcome).decode().partition(" ")
            if number == nonce:
                store.set(f"{_HERE}/{word}/here/{rank}", "")
                return word
        time.sleep(_PAUSE)
    raise LaunchError(f"rank {rank}: rank 0 did not answer in time", hint="did all ranks start?")


def _give_word(store: SharedStore, word: str, size: int, deadline: float) -> None:
    """As rank 0, give the word to the other ranks; returns when all of them have it."""
    missing = set(range(1, size))
    while missing and time.monotonic() < deadline:
        for rank in sorted(missing):
            if store.check([f"{_HERE}/{word}/here/{rank}"]):
                missing.discard(rank)
            elif store.check([f"{_HERE}/hello/{rank}"]):
                number = store.get(f"{_HERE}/hello/{rank}").decode()
                store.set(f"{_HERE}/welcome/{rank}", f"{number} {word}")
        time.sleep(_PAUSE)
    if missing:
        raise LaunchError(
            f"rank 0: rank {min(missing)} did not come in time", hint="did all ranks start?"
        )
