"""Measures the rates of this machine that a cost model needs and the record does not have yet.

    Need --> figures --> in the record? --no--> processes that measure them --> record --> Cluster
                              |                        | fails, or is late         ^
                              +----- yes --------------+------- an estimate -------+

The record is a file, one for each processor, number of cores and processes, GPU and torch version.
A figure that cannot be measured is estimated, and marked as rough, instead of an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from autopipe.cluster import efficiency
from autopipe.cluster.cluster import Cluster, Device, Link
from autopipe.cluster.measured import (
    DTYPES,
    EVERYTHING,
    LAUNCH,
    MEMORY,
    MESSAGES,
    Found,
    Need,
    Record,
    checked,
    cluster_of,
    figures,
)
from autopipe.cluster.spec import LocalSpec, check_processes
from autopipe.errors import AutopipeError, LaunchError
from autopipe.runtime.probe import chains, microbench
from autopipe.runtime.probe.workers import cores, measure
from autopipe.util import codec, host_memory
from autopipe.util.numbers import count
from autopipe.util.progress import Say

METHOD = "5"
"""The version of the measuring method: figures in records of another version are measured anew."""

QUICK = 0.5
"""Seconds for each figure that this process measures itself, after the other processes failed."""

LATENCY, OF_MEMORY = 1e-4, 1 / 4
"""Estimates for a link that could not be measured: its latency in seconds, and its bandwidth as a
share of the memory's (gloo on one host, 2-core VM, 2026-11)."""

SETTINGS = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"),
)
"""Environment variables that change how fast torch computes."""


def this_machine(processes: int | None = None, *, cpu: bool = False) -> LocalSpec:
    """This machine with a number of processes.

    Args:
        processes: how many; None: one for each GPU, or 2 on its processor.
        cpu: run on its processor, whether or not it has GPUs.

    Raises:
        AutopipeError: more processes than one machine has a use for.
    """
    if processes is not None:
        check_processes(f"--processes {processes}", processes)
    gpus = 0 if cpu else torch.cuda.device_count()
    return LocalSpec(processes or gpus or 2, cpu)


def local_cluster(
    local: LocalSpec,
    say: Say | None = None,
    *,
    need: Need = EVERYTHING,
    again: bool = False,
    estimate: bool = True,
) -> Cluster:
    """This machine as a cluster with one device for each process; measures missing figures.

    On a machine with GPUs each process has a GPU. Without GPUs, or if the processor is asked for,
    each process counts as a device with an equal share of the cores and of the installed memory,
    whatever other programs use. A single process has no link; its memory's rate stands in for one.

    Figures are kept in `$XDG_CACHE_HOME/autopipe` or `~/.cache/autopipe`. A figure that cannot be
    measured is estimated, and `Device.rough` names it.

    Args:
        local: this machine, with its number of processes.
        say: called with lines for the user; None: there are none.
        need: the figures to measure.
        again: also measure figures that the record has.
        estimate: return estimates if nothing could be measured, instead of an error.

    Raises:
        AutopipeError: less than one process, or more than there are GPUs.
        LaunchError: nothing could be measured, and `estimate` is False.
    """
    say = say or _silent
    key = _key(local)
    path = _cache_path(key)
    record = _read(path, key)
    names = _names(need, local)
    known = {} if again else {n: record.figures[n] for n in names if n in record.figures}
    if len(known) == len(names):
        say(f"rates of this machine: measured before, read from {path}")
    else:
        measured = _missing(known, names, local, say)
        complete = {name: figure for name, figure in measured.items() if figure.values}
        if not (complete or known or estimate):
            raise LaunchError(
                f"nothing of this machine could be measured: {next(iter(measured.values())).rough}",
                hint="describe the machine in a cluster file instead, or try fewer processes",
            )
        if complete:
            today = date.today().isoformat()
            record = replace(record, figures={**record.figures, **complete}, day=today)
            _keep(record, path, say)
        known |= measured
    cluster = _cluster(known, names, local, record.day)
    if cluster.devices[0].rough:
        say(f"rough, and so are predictions: {'; '.join(cluster.devices[0].rough)}")
    return cluster


def probe(processes: int, say: Say | None = None) -> tuple[Device, Link]:
    """Measure all figures of this machine now, and keep none in the record.

    Raises:
        AutopipeError: less than one process, or more than there are GPUs.
    """
    local = LocalSpec(processes)
    names = _names(EVERYTHING, local)
    found = _missing({}, names, local, say or _silent)
    cluster = _cluster(found, names, local, date.today().isoformat())
    return cluster.devices[0], cluster.within


def _gpus(local: LocalSpec) -> list[str]:
    """The GPUs that processes run on, by name; none: they run on the processor."""
    found = 0 if local.cpu else torch.cuda.device_count()
    return [torch.cuda.get_device_name(i) for i in range(found)]


def _names(need: Need, local: LocalSpec) -> tuple[str, ...]:
    gpus, processes = len(_gpus(local)), local.processes
    if processes < 1:
        raise AutopipeError(f"asked to measure {processes} processes, at least 1 is needed")
    if gpus and processes > gpus:
        raise AutopipeError(
            f"asked for {processes} processes, found {count(gpus, 'GPU')}",
            hint=f"use local:{gpus}, or cpu:{processes} for processes on its processor",
        )
    return figures(need, processes, bool(gpus))


def _missing(
    known: Mapping[str, Found], names: tuple[str, ...], local: LocalSpec, say: Say
) -> dict[str, Found]:
    """Measure the figures that are not known yet."""
    half = known[DTYPES[0]].values[1] if DTYPES[0] in known else None
    return measure(local, [name for name in names if name not in known], half, say)


def _cluster(
    known: Mapping[str, Found], names: tuple[str, ...], local: LocalSpec, day: str
) -> Cluster:
    gpus = _gpus(local)
    source = (
        f"measured on {_processor()}, {cores()} cores, {local.processes} processes, "
        f"torch {torch.__version__}, {day}"
    )
    found = {**known, **_stand_ins(known, local)}
    kind, memory = gpus[0] if gpus else "cpu", _memory(local.processes, bool(gpus))
    return cluster_of(found, local, names, kind, memory, source)


# --- What could not be measured ------------------------------------------------------------------


def _stand_ins(known: Mapping[str, Found], local: LocalSpec) -> dict[str, Found]:
    """Estimates of the figures that every cluster needs, each with a note of its origin."""
    failed = {name: figure.rough for name, figure in known.items() if not figure.values}
    stand_ins: dict[str, Found] = {}
    device = torch.device("cuda" if _gpus(local) else "cpu")
    # This process measures alone; in training several share the cores.
    crowd = 1.0 if device.type == "cuda" else max(1.0, local.processes / cores())
    looks: dict[str, Callable[[microbench.Budget], Found]] = {
        DTYPES[0]: lambda budget: microbench.matmuls(torch.float32, budget),
        MEMORY: microbench.memory,
        LAUNCH: chains.launch,
    }
    for name, look in looks.items():
        if name in failed:
            chains.warm_up(device)
            values = look(microbench.Budget(QUICK, device, 1.0)).values
            of_one = f"{failed[name]}; this process alone took a quick look"
            if name == LAUNCH:
                stand_ins[name] = Found((values[0] * crowd, values[1] * crowd), of_one)
            else:
                stand_ins[name] = Found((values[0] / crowd, *values[1:]), of_one)
    with_estimates = {**known, **stand_ins}
    for name in DTYPES[1:]:
        if name in failed:
            as_fp32 = f"{failed[name]}; taken to be as fast as {DTYPES[0]}"
            stand_ins[name] = Found(with_estimates[DTYPES[0]].values[:1], as_fp32)
    if MESSAGES in failed:
        guess = f"{failed[MESSAGES]}; taken as 100 us and a quarter of memory's bytes a second"
        bandwidth = with_estimates[MEMORY].values[0] * OF_MEMORY
        stand_ins[MESSAGES] = Found((LATENCY, bandwidth), guess)
    return stand_ins


# --- The record ----------------------------------------------------------------------------------


def _key(local: LocalSpec) -> dict[str, str]:
    """The circumstances in which a measurement holds.

    For a measurement of the processor the machine's GPUs make no difference.
    """
    settings = (f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name))
    return {
        "processor": _processor(),
        "cores": str(cores()),
        "gpus": ", ".join(_gpus(local)),
        "torch": str(torch.__version__),
        "processes": str(local.processes),
        "settings": ", ".join(settings),
        "method": METHOD,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cache_path(key: dict[str, str]) -> Path | None:
    """None without a home folder."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return home / "autopipe" / f"probe-{digest[:16]}.json"


def _read(path: Path | None, key: dict[str, str]) -> Record:
    """The record for these circumstances; empty if the file has impossible contents."""
    nothing = Record(key)
    try:
        record = checked(codec.load(Record, path, root="record")) if path else nothing
    except (AutopipeError, OSError):
        return nothing
    return record if record.key == key else nothing


def _keep(record: Record, path: Path | None, say: Say) -> None:
    try:
        if path is None:
            raise OSError("there is no home folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.save(record, path)
    except (OSError, AutopipeError) as error:
        why = error.message if isinstance(error, AutopipeError) else error
        say(f"the rates are not kept for next time: {why}")


def _memory(processes: int, cuda: bool) -> int:
    if cuda:
        totals = (torch.cuda.get_device_properties(i).total_memory for i in range(processes))
        return efficiency.usable(min(totals))
    return host_memory.total() // processes


def _silent(line: str) -> None:
    """Say nothing."""
