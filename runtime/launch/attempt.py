"""A part of a store that outlives its processes, for the processes of one attempt alone.

torchrun restarts workers after one has died, and gives them the store that the dead ones have
used: the addresses in it lead nowhere, and gloo waits for them (pytorch/pytorch#135712). Counting
attempts does not help, as agents of several nodes count differently. So rank 0 invents a word, and
each rank asks for it with a number that nobody has used before:

    rank 2      hello/2 = 7f3a                        I am here, and this is my number
    rank 0      welcome/2 = 7f3a 51c8                 you with this number: the word is 51c8
    rank 2      51c8/here/2                           it may stop to ask for me

What the dead have left in the store is answered too, and nobody reads it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

from autopipe.errors import LaunchError


class SharedStore(Protocol):
    """What is needed of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Make `value` known to all ranks."""

    def get(self, key: str) -> bytes:
        """The value of `key`, which is set."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are set."""


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""What torchrun's agents read: with it, the store in which they meet is not the workers' too."""

_PAUSE = 0.02
"""Seconds from one look into the store to the next."""


def of_this_attempt(store: SharedStore, rank: int, size: int, timeout: float) -> Any:
    """The store under a prefix that only the ranks which are alive know; every rank calls it.

    Raises:
        LaunchError: a rank has not come within `timeout` seconds.
    """
    import torch.distributed as dist

    own, deadline = secrets.token_hex(8), time.monotonic() + timeout
    store.set(f"{_HERE}/hello/{rank}", own)
    word = own if rank == 0 else _asked(store, rank, own, deadline)
    if rank == 0:
        _answer(store, word, size, deadline)
    whole: Any = store
    return dist.PrefixStore(f"{_HERE}/{word}", whole)  # type: ignore[attr-defined]  # public


_HERE = "autopipe/attempt"


def elastic_warning(environ: Mapping[str, str]) -> str | None:
    """What is to be known of an elastic torchrun before a node is lost; None: nothing.

    An agent of torch 2.13 that shares its store tells nobody where it is after its first meeting: a
    node that comes back waits for that before it starts a rank, which could say so. A rank does not
    know whether its agent is elastic.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get(OWN_STORE) == "1":
        return None
    return (
        f"--replan: an elastic torchrun (--nnodes MIN:MAX) needs {OWN_STORE}=1 on every node; "
        "without it a node that comes back waits until torchrun's timeout"
    )


def _asked(store: SharedStore, rank: int, own: str, deadline: float) -> str:
    """Rank 0's word."""
    welcome = f"{_HERE}/welcome/{rank}"
    while time.monotonic() < deadline:
        if store.check([welcome]):
            number, _, word = store.get(welcome).decode().partition(" ")
            if number == own:
                store.set(f"{_HERE}/{word}/here/{rank}", "")
                return word
        time.sleep(_PAUSE)
    raise LaunchError(f"rank {rank} has waited in vain for rank 0", hint="did all ranks start?")


def _answer(store: SharedStore, word: str, size: int, deadline: float) -> None:
    """Tell every rank the word, until all of them have it."""
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
            f"rank 0 has waited in vain for rank {min(missing)}", hint="did all ranks start?"
        )
