"""The bytes that a rank's tensors really take: torch's own count of its CPU allocator.

A profiler runs from before the first step until after the second, and sees every tensor come and go
that is not there before: parameters and buffers are, and are added. The most that is alive within
the second step, which has optimizer state and whose gradients are made anew, is the rank's peak:

    alive   parameters, buffers | 1st step, optimizer state | 2nd step: peak |
                                ^ the profiler counts from 0

It has what the plan's parts have, and what they have not: results that live within one op or one
block's backward, copies of gradients in buckets, the batch. What the optimizer makes besides its
state is not among it: a step ends with its gradients, as a plan's does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "the measured step"


def peak(work: Callable[[], Callable[[], object]], folder: Path) -> int:
    """Bytes at the fullest moment of what `work` returns, beyond those alive before `work`."""
    # There is one cycle of events, so all are kept anyhow; without a word torch 2.11 warns of more.
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        step = work()
        with record_function(STEP):
            step()
    path = folder / "allocator.json"
    profiler.export_chrome_trace(str(path))
    return peak_of(json.loads(path.read_text())["traceEvents"])


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes of their memory, each storage counted once."""
    storages = {storage.data_ptr(): storage for t in tensors for storage in [t.untyped_storage()]}
    return sum(storage.nbytes() for storage in storages.values())


def peak_of(events: list[dict[str, object]]) -> int:
    """The most bytes that were allocated in total while the event called `STEP` went on."""
    span = next(event for event in events if event.get("name") == STEP)
    begin = float(str(span["ts"]))
    end = begin + float(str(span["dur"]))
    return max(
        int(str(event["args"]["Total Allocated"]))  # type: ignore[index]
        for event in events
        if event.get("name") == "[memory]" and begin <= float(str(event["ts"])) <= end
    )
