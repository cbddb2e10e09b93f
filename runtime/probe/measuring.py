"""The processes that measure this machine: all of them measure the same figure at the same time.

    process 0   | fp32 | memory | launch | <--- messages ---> | gelu, tanh |
    process 1   | fp32 | memory | launch | <----------------- | gelu, tanh |   one median of each
    process 2   | fp32 | memory | launch | <--- messages ---> | gelu, tanh |   figure
    process 3   | fp32 | memory | launch | <----------------- | gelu, tanh |
                       ^ gathered: no process begins the next figure before all have this one

So each process gets the share of cores, caches and memory that it has in training. A rate is work
over the time of a whole *window*, much longer than a time slice of the operating system: where
processes share a core, a single operation is mostly not interrupted, and its time would be that of
a process with a core for itself.

Each figure has a budget in seconds, and takes about that time. Messages and collectives between
processes take as many turns as the slowest process has time for.

One process loads torch, and the others are forks of it; where a fork is not safe (on macOS) each
process loads torch. They load little else: see `workers.command`.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from multiprocessing import connection

import torch
import torch.distributed as dist

from autopipe.cluster.measured import (
    COLLECTIVES,
    DTYPES,
    KERNELS,
    LAUNCH,
    MEMORY,
    MESSAGES,
    WHOLE,
    Found,
)
from autopipe.runtime.probe import chains, microbench
from autopipe.runtime.probe.microbench import WINDOW, Budget, now
from autopipe.sharding.torch_names import all_gather_single, reduce_scatter_single
from autopipe.util import codec, host_memory

SECONDS = {
    **dict.fromkeys(DTYPES, 0.8),
    DTYPES[0]: 2.5,
    MEMORY: 0.4,
    LAUNCH: 0.3,
    MESSAGES: 0.6,
    COLLECTIVES: 0.8,
    **dict.fromkeys(KERNELS, 0.35),
}
"""The budget of each figure, in seconds."""

KERNELS_SECONDS = 4.0
"""The budget of all kernels together, in seconds at most: they take turns."""

PATIENCE = 60.0
"""Seconds that a process waits for another one before it fails."""

PREFIX = "figures: "
"""The beginning of a line with figures; torch's libraries may write other lines."""

TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Request:
    """A request to measure figures.

    Args:
        processes: how many processes measure at the same time.
        figures: the names of the figures, in order.
        half: the second value of fp32 (`measured.Found`), if fp32 is not measured too.
        threads: the number of threads of each process.
        crowd: the number of threads for each core.
        folder: an empty folder, in which several processes meet.
    """

    processes: int
    figures: tuple[str, ...]
    half: float | None
    threads: int
    crowd: float
    folder: str


def groups(figures: Sequence[str]) -> list[tuple[str, ...]]:
    """Group the figures that are measured in turns: consecutive kernels. Others are alone."""
    kinds = groupby(figures, lambda name: KERNELS[0] if name in KERNELS else name)
    return [tuple(group) for _, group in kinds]


def budget(group: Sequence[str]) -> float:
    """Seconds that a group of figures may take."""
    each = sum(SECONDS[name] for name in group)
    return min(each, KERNELS_SECONDS) if group[0] in KERNELS else each


def main() -> None:
    """Measure the figures of the request on the command line; print a line for each group of them.

    If a process fails, all end, and stderr names that process.
    """
    request = codec.from_json(Request, json.loads(sys.argv[1]), "request")
    multiprocessing.set_start_method("fork" if sys.platform == "linux" else "spawn")
    ranks = [
        multiprocessing.Process(target=_rank, args=(rank, request), daemon=True)
        for rank in range(request.processes)
    ]
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        connection.wait([process.sentinel for process in ranks if process.is_alive()])
        ended = [(process.exitcode, rank) for rank, process in enumerate(ranks) if process.exitcode]
        if ended:  # a killed process (code below 0) comes first: its peers fail for lack of it
            code, rank = min(ended)
            sys.exit(f"process {rank} of {len(ranks)} ended with code {code}")


def _rank(rank: int, request: Request) -> None:
    try:
        _take_part(rank, request)
    except RuntimeError:
        time.sleep(LATER)
        raise


LATER = 1.0
"""Seconds that a failed process waits before it ends: a lost peer is then the first to be named."""


def _take_part(rank: int, request: Request) -> None:
    cuda = torch.cuda.is_available()  # `workers` hides GPUs where the processor is measured
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        host_memory.keep()  # as a rank does
    torch.set_num_threads(request.threads)
    if request.processes > 1:
        store = dist.FileStore(  # type: ignore[attr-defined]  # public all the same
            f"{request.folder}/store", request.processes
        )
        store.set_timeout(timedelta(seconds=PATIENCE))  # torch sets it in stores of its own alone
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=request.processes,
            timeout=timedelta(seconds=PATIENCE),
        )
    chains.warm_up(device)
    _gathered({}, request.processes)
    if rank == 0:
        print(f"{PREFIX}{{}}", flush=True)  # all have begun
    half = request.half
    for group in groups(request.figures):
        measured = _measure(group, rank, request, device, half)
        if DTYPES[0] in measured and len(measured[DTYPES[0]].values) == 2:
            half = measured[DTYPES[0]].values[1]
        every = _gathered(measured, request.processes)
        if rank == 0:
            medians = {
                name: asdict(_median([of_rank[name] for of_rank in every])) for name in group
            }
            print(PREFIX + json.dumps(medians), flush=True)
    if request.processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def _measure(
    group: tuple[str, ...], rank: int, request: Request, device: torch.device, half: float | None
) -> dict[str, Found]:
    """This process's figures of a group; without values if the device cannot run the ops."""
    name = group[0]
    if name in FIGURES:
        return {name: FIGURES[name](rank, request.processes, Budget(budget(group), device))}
    limit = Budget(budget(group), device, request.crowd)
    try:
        if name in DTYPES:
            known = None if name == DTYPES[0] else half or 0.0
            return {name: microbench.matmuls(TORCH[name], limit, known)}
        return ALONE[name](limit) if name in ALONE else chains.kernels(group, limit)
    except (RuntimeError, NotImplementedError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return {name: Found((), why) for name in group}


def _gathered(own: dict[str, Found], processes: int) -> list[dict[str, Found]]:
    """The figures of all processes, by rank; returns when all have measured."""
    if processes == 1:
        return [own]
    every: list[dict[str, Found]] = [{} for _ in range(processes)]
    dist.all_gather_object(every, own)
    return every


def _median(found: Sequence[Found]) -> Found:
    """The median of each value over the processes; without values if some process has none."""
    rough = next((one.rough for one in found if one.rough), "")
    if not all(one.values for one in found):
        return Found((), rough)
    return Found(
        tuple(map(statistics.median, zip(*(one.values for one in found), strict=True))), rough
    )


# --- Between processes ---------------------------------------------------------------------------

SMALL, LARGE = 2**10, 2**20
"""Bytes of the two messages: the first measures latency, their difference bandwidth."""


def messages(rank: int, processes: int, limit: Budget) -> Found:
    """Latency in seconds, and bytes a second, one way between processes 2i and 2i + 1.

    All pairs measure at once.
    """
    partner = rank ^ 1
    first, second = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)

    def there_and_back(size: int) -> Callable[[], object]:
        message = torch.ones(size, dtype=torch.uint8, device=limit.device)

        def run() -> None:
            if partner < processes:
                first(message, partner)
                second(message, partner)

        return run

    size = SMALL
    while size < LARGE and 4 * _agreed(there_and_back(size), limit) < limit.seconds / 4:
        size *= 4
    small, large = _together([there_and_back(SMALL), there_and_back(size)], limit)
    latency, whole = small / 2, large / 2
    # By noise the small message may be the slower one; then its time cannot be subtracted.
    transfer = max(whole - latency, whole / 10)
    late = "" if size == LARGE else f"out of time after messages of {size >> 10} KiB"
    return Found((latency, max(size - SMALL, SMALL) / transfer), late)


def collectives(rank: int, processes: int, limit: Budget) -> Found:
    """Seconds of an all-reduce over all processes, and of a reduce-scatter or an all-gather."""

    def ops(size: int) -> list[Callable[[], object]]:
        own = torch.zeros(-(-size // (4 * processes)), device=limit.device)
        whole = torch.zeros(len(own) * processes, device=limit.device)
        return [
            lambda: dist.all_reduce(whole),
            lambda: all_gather_single(whole, own),
            lambda: reduce_scatter_single(own, whole),
        ]

    size = WHOLE >> 8
    while size < WHOLE and 4 * _agreed(ops(size)[0], limit) < limit.seconds / 4:
        size *= 4
    summed, gathered, scattered = _together(ops(size), limit)
    late = "" if size == WHOLE else f"out of time after {size >> 10} KiB"
    times = WHOLE / size
    return Found((times * summed, times * (gathered + scattered) / 2), late)


def _together(ops: Sequence[Callable[[], object]], limit: Budget) -> list[float]:
    """Median seconds of each op, in turns of as many calls as fit into a window or its share."""
    share = min(WINDOW, limit.share(len(ops)))
    each = [_agreed(op, limit) for op in ops]
    calls = [max(1, round(share / seconds)) for seconds in each]
    turn = sum(n * seconds for n, seconds in zip(calls, each, strict=True))
    turns = max(1, min(microbench.TURNS, int(_least(limit) / turn)))
    columns: list[list[float]] = [[] for _ in ops]
    for _ in range(turns):
        for n, op, column in zip(calls, ops, columns, strict=True):
            column.append(_timed(op, n, limit.device))
    return [statistics.median(column) for column in columns]


def _timed(op: Callable[[], object], calls: int, device: torch.device) -> float:
    """Mean seconds of a call, over `calls` calls."""
    begin = now(device)
    for _ in range(calls):
        op()
    return (now(device) - begin) / calls


def _agreed(op: Callable[[], object], limit: Budget) -> float:
    """Seconds of a call in the slowest process; all processes get the same number.

    Each process takes its quickest of a few calls: the first call has more to do, and any call may
    wait for its core.
    """
    quickest = min(_timed(op, 1, limit.device) for _ in range(microbench.CALLS))
    return _slowest(quickest, limit.device)


def _least(limit: Budget) -> float:
    """The least seconds that any process has left."""
    return -_slowest(-limit.left, limit.device)


def _slowest(seconds: float, device: torch.device) -> float:
    every = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)


FIGURES: Mapping[str, Callable[[int, int, Budget], Found]] = {
    MESSAGES: messages,
    COLLECTIVES: collectives,
}
"""The figures that several processes measure with each other."""

ALONE: Mapping[str, Callable[[Budget], dict[str, Found]]] = {
    MEMORY: lambda limit: {MEMORY: microbench.memory(limit)},
    LAUNCH: lambda limit: {LAUNCH: chains.launch(limit)},
}
"""The figures that each process measures by itself, beside matmuls and kernels."""
