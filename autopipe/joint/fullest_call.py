"""Count the bytes that a half of a backward holds at each of its calls.

                                    kept, g and x of 8 bytes       one island
    d  = gelu_backward(dy, g)       g x   d                        g x   d
    dw = mm(d.t(), x)                 x   d dw                     g x   d dw
    dx = mm(d, w)                         d dx                     g x   d dw dx
    da = mul(dx, 2)                         dx da                  g x     dw dx
    db = add(da, 1)                            da db               g x     dw    db

A tensor is freed by its last reader, whether forward has kept it or backward has made it; a
parameter's gradient is handed over where it is made. A compiled island (`joint.islands`) holds its
inputs and its results until it ends; a tensor that only its loops make and read, as da, never takes
memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopipe.joint.islands import is_loop, islands
from autopipe.joint.joint_graph import storages
from autopipe.stages.op_tape import AGAIN, MADE


@dataclass(frozen=True)
class Half:
    """The calls of a backward, or of one half of it, with the bytes around them.

    Attributes:
        calls: its calls, in order.
        kept: bytes of each storage that it is given and frees.
        elsewhere: storages that are counted elsewhere: states, arguments and their gradients.
        given_away: storages of the parameters' gradients.
        leaving: storages that are still there at its end.
        compiled: whether islands are compiled; else the calls run one by one.
        again_alone: whether only results of ops that run again count as made.
    """

    calls: Sequence[fx.Node]
    kept: Mapping[int, int]
    elsewhere: Collection[int]
    given_away: Collection[int]
    leaving: Collection[int]
    compiled: bool
    again_alone: bool

    def most(self) -> int:
        """Bytes at the fullest call: kept, and made."""
        return int((self.existing(self.kept) + self.made()).max(initial=0))

    def made(self) -> NDArray[np.int64]:
        """At each call, the bytes that this half has made by then and still holds."""
        return self.existing(self._sizes)

    def existing(self, sizes: Mapping[int, int]) -> NDArray[np.int64]:
        """At each call, the bytes of these storages that exist then."""
        change = np.zeros(len(self.calls) + 1, dtype=np.int64)
        for storage, size in sizes.items():
            first, last = self._stay(storage)
            change[first] += size
            change[last + 1] -= size
        return change.cumsum()[:-1]

    def _stay(self, storage: int) -> tuple[int, int]:
        """The first and the last call at which a storage exists."""
        at, given = self._touched[storage], storage in self.kept
        if storage in self.leaving or not at:
            last = len(self.calls) - 1
        elif given or self._leaves_island(storage):
            last = self._ends[self._island[at[-1]]]
        else:
            last = at[-1]
        return 0 if given else at[0], last

    def _leaves_island(self, storage: int) -> bool:
        """Whether a call of another island reads a call's result."""
        at = self._touched[storage]
        away = storage in self.leaving or storage in self.given_away
        return away or self._island[at[0]] != self._island[at[-1]]

    @cached_property
    def _touched(self) -> Mapping[int, Sequence[int]]:
        """The numbers of the calls that make a storage, read it or write to it."""
        found: dict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            for storage in storages([call, *call.all_input_nodes]):
                found[storage].append(number)
        return found

    @cached_property
    def _parts(self) -> Sequence[Sequence[fx.Node]]:
        return islands(self.calls) if self.compiled else [[call] for call in self.calls]

    @cached_property
    def _island(self) -> Sequence[int]:
        """The number of each call's island."""
        return [number for number, part in enumerate(self._parts) for _ in part]

    @cached_property
    def _ends(self) -> Sequence[int]:
        """The number of each island's last call."""
        return [end - 1 for end in accumulate(map(len, self._parts))]

    @cached_property
    def _sizes(self) -> Mapping[int, int]:
        """The bytes of each storage that this half makes and that takes memory."""
        given = {*self.kept, *self.elsewhere}
        calls = (c for c in self.calls if AGAIN in c.meta or not self.again_alone)
        sizes = {s: n for call in calls for s, n in call.meta[MADE].storages.items()}
        return {s: n for s, n in sizes.items() if s not in given and not self._fused(s)}

    def _fused(self, storage: int) -> bool:
        """Whether a storage takes no memory: only loops of one island make and read it."""
        if not self.compiled or self._leaves_island(storage):
            return False
        return all(self._loops[number] for number in self._touched[storage])

    @cached_property
    def _loops(self) -> Sequence[bool]:
        return [is_loop(call) for call in self.calls]
