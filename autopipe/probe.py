"""Measures the machine one stands on: rates of its devices, and of the link between processes.

    process 0   | matmul | add | ops | <--- ping-pong ---> |
    process 1   | matmul | add | ops | <------------------ |        one median of each figure
    process 2   | matmul | add | ops | <--- ping-pong ---> |
    process 3   | matmul | add | ops | <------------------ |
                ^ barrier            ^ barrier

All processes measure at the same time, so that each gets the share of cores, caches and memory
that it has when they train. A rate is work over the time of a whole *window*, long beside a time
slice of the operating system: where processes share a core, single operations mostly run
undisturbed and would say that each has the core for itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autopipe import codec, heap, presets, speeds
from autopipe.cluster import Cluster, Device, Group, Kernel, Link, Node, Pace, check
from autopipe.communication import Level, all_gather, all_reduce
from autopipe.errors import AutopipeError, LaunchError, PlanError
from autopipe.renamed import all_gather_single, reduce_scatter_single

PATIENCE = 120.0
"""Seconds after which processes that have not finished are given up."""

SMALL, LARGE = 2**10, 2**20
"""Bytes of the two messages: the first measures latency, their difference bandwidth."""

WHOLE = 2**24
"""Bytes that the collectives sum or gather: about a bucket of gradients, or a block."""

METHOD = "3"
"""Of measuring: another one makes other figures, and records of before are measured anew."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """What one process measured: as `Device` has it, and the link.

    `launch` is of one small op that autograd records, forward and backward. `latency` and
    `bandwidth` are those of the link, None for a process without a partner. `summing` and
    `gathering` are seconds in which all processes sum or gather `WHOLE` bytes.
    """

    flops: dict[str, float]
    half: float
    memory_bandwidth: float
    launch: tuple[float, float]
    kernels: dict[str, Kernel]
    latency: float | None
    bandwidth: float | None
    summing: float
    gathering: float


@dataclass(frozen=True)
class _Cached:
    """A measurement, and the circumstances in which it holds."""

    key: dict[str, str]
    cluster: Cluster


def local_processes() -> int:
    """How many processes this machine is for: one a GPU, or 2 without."""
    return torch.cuda.device_count() or 2


def local_cluster(processes: int, say: Say | None = None, *, again: bool = False) -> Cluster:
    """This machine as a cluster of `processes` devices; measured once, then read from a cache.

    The cache is `$XDG_CACHE_HOME/autopipe` or `~/.cache/autopipe`, one file per processor, number
    of cores and processes, GPU and torch version. A file that cannot be read is measured anew, and
    with `again` any.

    Raises:
        AutopipeError, LaunchError: as `probe`.
    """
    say = say or _silent
    key = _key(processes)
    path = _cache_path(key)
    cached = None if again else _read_cache(path, key)
    if cached is not None:
        say(f"rates of this machine: measured before, read from {path}")
        return cached
    device, link = probe(processes, say)
    group = Group(processes, device)
    cluster = Cluster(f"local:{processes}", (Node(1, (group,)),), within=link, between=link)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.save(_Cached(key, cluster), path)
    except (OSError, PlanError) as error:
        say(f"the rates are not kept for next time: {error}")
    return cluster


def probe(processes: int, say: Say | None = None) -> tuple[Device, Link]:
    """Start `processes` processes, measure all of them at once, and take medians over them.

    On a machine with GPUs there is one process a GPU. Without, each process has an equal part of
    the cores and is said to have an equal part of the installed memory, whatever else may be
    using it. A single process has no link: its own memory stands for it.

    Raises:
        AutopipeError: less than one process, or more than there are GPUs.
        LaunchError: a process failed, with the end of what it wrote.
    """
    say = say or _silent
    gpus = torch.cuda.device_count()
    if processes < 1:
        raise AutopipeError(f"asked to measure {processes} processes, at least 1 is needed")
    if gpus and processes > gpus:
        raise AutopipeError(
            f"asked for {processes} processes, found {gpus} GPUs",
            hint=f"use local:{gpus}",
        )
    say(f"measuring this machine with {processes} processes at once, some seconds")
    samples = run_workers(processes, [sys.executable, "-c", _WORKER])
    flops = {
        dtype: statistics.median(sample.flops[dtype] for sample in samples)
        for dtype in samples[0].flops
    }
    for dtype, rate in flops.items():
        say(f"  matmul in {dtype}: {rate / 1e9:.4g} GFLOP/s a process")
    bandwidth = statistics.median(sample.memory_bandwidth for sample in samples)
    say(f"  memory: {bandwidth / 1e9:.3g} GB/s a process")
    half = statistics.median(sample.half for sample in samples)
    say(f"  of matmuls with dims of {half:.3g} an eighth of it")
    forward, backward = (statistics.median(sample.launch[n] for sample in samples) for n in (0, 1))
    say(f"  one small op: {forward * 1e6:.3g} us forward, {backward * 1e6:.3g} us backward")
    kernels = _medians([sample.kernels for sample in samples])
    say(f"  by themselves: {', '.join(kernels)}")
    device = Device(
        kind=torch.cuda.get_device_name() if gpus else "cpu",
        memory=_memory(processes, bool(gpus)),
        flops=flops,
        bandwidth=bandwidth,
        # A step runs about as many ops backward as forward.
        launch=(forward + backward) / 2,
        source=f"measured on {_key(processes)['processor']}, {_cores()} cores, {processes} "
        f"processes, torch {torch.__version__}, {date.today().isoformat()}",
        half=half,
        kernels=kernels,
    )
    link = _link(samples, device)
    say(
        f"  between processes: {link}; on the wire of sums {link.summing / 1e9:.3g} GB/s, of "
        f"gathering {link.gathering / 1e9:.3g} GB/s"
    )
    return device, link


def run_workers(processes: int, command: list[str]) -> list[Sample]:
    """The sample of each process of `command`, called with rank, processes and a shared folder.

    Raises:
        LaunchError: a process ended badly or not at all; the others are stopped.
    """
    with tempfile.TemporaryDirectory(prefix="autopipe-probe-") as name:
        folder = Path(name)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(processes):
                arguments = [*command, str(rank), str(processes), name]
                with open(folder / f"{rank}.log", "wb") as log:
                    worker = subprocess.Popen(
                        arguments,
                        env=_environment(processes),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                workers.append(worker)
            _wait(workers, folder)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return [
            codec.load(Sample, folder / f"{rank}.json", root="sample") for rank in range(processes)
        ]


# --- The process that measures -------------------------------------------------------------------

# Not `-m autopipe.probe`: where the package imports this module, that would make it twice.
_WORKER = "import sys; from autopipe import probe; probe.worker(*sys.argv[1:])"


def worker(rank_text: str, processes_text: str, folder: str) -> None:
    """Measure as process `rank` of `processes`, and leave a `Sample` in `folder`."""
    rank, processes = int(rank_text), int(processes_text)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        heap.keep()  # as a rank does
    torch.set_num_threads(_threads(processes))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=PATIENCE),
    )
    dist.barrier()
    fp32, half = speeds.matmuls(torch.float32, device)
    bf16, _ = speeds.matmuls(torch.bfloat16, device, half)
    dist.barrier()
    memory_bandwidth = speeds.memory(device)
    dist.barrier()
    launch = speeds.launch(device)
    kernels = speeds.kernels(device)
    dist.barrier()
    latency, bandwidth = _ping_pong(rank, processes, device)
    flops = {"fp32": fp32, "bf16": bf16}
    dist.barrier()
    together = _collectives(processes, device)
    link = (latency, bandwidth, *together)
    sample = Sample(flops, half, memory_bandwidth, launch, kernels, *link)
    codec.save(sample, Path(folder, f"{rank}.json"))
    dist.barrier()
    dist.destroy_process_group()


def _ping_pong(
    rank: int, processes: int, device: torch.device
) -> tuple[float | None, float | None]:
    """Latency and bandwidth one way between processes 2i and 2i + 1, all pairs at once."""
    partner = rank ^ 1
    if partner >= processes:
        return None, None
    small, large = (_one_way(rank, partner, size, device) for size in (SMALL, LARGE))
    # Noise can make the small message the slower one; then its time is no latency to subtract.
    transfer = large - small if large > small else large
    return small, (LARGE - SMALL) / transfer


def _one_way(rank: int, partner: int, size: int, device: torch.device) -> float:
    """Seconds in which a message of `size` bytes goes one way: half of there and back."""
    message = torch.ones(size, dtype=torch.uint8, device=device)
    first, second = (dist.send, dist.recv) if rank < partner else (dist.recv, dist.send)
    rounds = 100 if size == SMALL else 20
    times = []
    for _ in range(speeds.WINDOWS + 1):
        begin = speeds.now(device)
        for _ in range(rounds):
            first(message, partner)
            second(message, partner)
        times.append((speeds.now(device) - begin) / (2 * rounds))
    return statistics.median(times[1:])


def _collectives(processes: int, device: torch.device) -> tuple[float, float]:
    """Seconds of an all-reduce, and of a reduce-scatter or an all-gather; of all processes."""
    own = torch.zeros(-(-WHOLE // (4 * processes)), device=device)
    whole = torch.zeros(len(own) * processes, device=device)
    ops: tuple[Callable[[], object], ...] = (
        lambda: dist.all_reduce(whole),
        lambda: all_gather_single(whole, own),
        lambda: reduce_scatter_single(own, whole),
    )
    rounds = []
    for _ in range(speeds.WINDOWS + 1):
        times = []
        for op in ops:
            begin = speeds.now(device)
            for _ in range(4):
                op()
            times.append((speeds.now(device) - begin) / 4)
        rounds.append((times[0], (times[1] + times[2]) / 2))
    summing, gathering = zip(*rounds[1:], strict=True)
    return statistics.median(summing), statistics.median(gathering)


# --- Around it -----------------------------------------------------------------------------------


def _wait(workers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(worker.poll() is None for worker in workers):
        failed = [rank for rank, worker in enumerate(workers) if worker.poll()]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for rank, worker in enumerate(workers):
        code = worker.poll()
        if code is not None and code != 0:
            lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()
            raise LaunchError(
                f"process {rank} of {len(workers)} that measured this machine ended with code "
                f"{code}: {lines[-1] if lines else 'it wrote nothing'}",
                hint="describe the machine in a cluster file instead, or try fewer processes",
            )
    if any(worker.poll() is None for worker in workers):
        raise LaunchError(f"measuring this machine did not end within {PATIENCE:.0f} seconds")


def _environment(processes: int) -> dict[str, str]:
    """The environment of a worker: this package can be imported, and gloo talks over loopback."""
    environment = dict(os.environ)
    home = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (home, environment.get("PYTHONPATH")) if part
    )
    environment["OMP_NUM_THREADS"] = str(_threads(processes))
    if sys.platform == "linux":
        # Else gloo looks up the name of the host, which not every machine can answer.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _medians(found: Sequence[dict[str, Kernel]]) -> dict[str, Kernel]:
    """Each figure's median over processes."""

    def pace(name: str, way: str) -> Pace:
        paces = [getattr(kernels[name], way) for kernels in found]
        return Pace(
            statistics.median(pace.start for pace in paces),
            statistics.median(pace.rate for pace in paces),
        )

    return {name: Kernel(pace(name, "forward"), pace(name, "backward")) for name in found[0]}


def _link(samples: list[Sample], device: Device) -> Link:
    latencies = [sample.latency for sample in samples if sample.latency is not None]
    bandwidths = [sample.bandwidth for sample in samples if sample.bandwidth is not None]
    if not latencies:
        return Link(latency=0.0, bandwidth=device.bandwidth)
    latency = statistics.median(latencies)
    ring = [Level(len(samples), Link(latency, math.inf))]
    parts = WHOLE * (len(samples) - 1) / len(samples)

    def rate(seconds: float, rounds: int, latencies: float) -> float:
        """Bytes a second on the wire; where latency is all, noise is what is left of it."""
        return rounds * parts / max(seconds - latencies, seconds / 10)

    return Link(
        latency,
        statistics.median(bandwidths),
        rate(statistics.median(s.summing for s in samples), 2, all_reduce(0.0, tuple(ring))),
        rate(statistics.median(s.gathering for s in samples), 1, all_gather(0.0, tuple(ring))),
    )


def _memory(processes: int, cuda: bool) -> int:
    if cuda:
        totals = (torch.cuda.get_device_properties(i).total_memory for i in range(processes))
        return presets.usable(min(totals))
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads(processes: int) -> int:
    return max(1, _cores() // processes)


def _key(processes: int) -> dict[str, str]:
    """The circumstances in which a measurement holds."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": str(_cores()),
        "gpus": ", ".join(gpus),
        "torch": str(torch.__version__),
        "processes": str(processes),
        "method": METHOD,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cache_path(key: dict[str, str]) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(home, "autopipe", f"probe-{digest[:16]}.json")


def _read_cache(path: Path, key: dict[str, str]) -> Cluster | None:
    try:
        cached = codec.load(_Cached, path, root="cache")
        check(cached.cluster)
    except AutopipeError:
        return None
    return cached.cluster if cached.key == key else None


def _silent(line: str) -> None:
    """Say nothing."""
