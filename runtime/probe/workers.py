"""Starts the processes that measure this machine, waits for their figures, and ends them.

    this process  --request-->  one with torch --fork--> rank 0, rank 1, ...     `measuring`
                  <--a line a group of figures---------- rank 0

Whatever happens there, this process goes on. A group of figures whose processes die, or that takes
far longer than its budget, is left out; the remaining groups are requested once more.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import autopipe
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
from autopipe.cluster.spec import LocalSpec
from autopipe.errors import LaunchError
from autopipe.runtime.probe.measuring import PREFIX, Request, budget, groups
from autopipe.runtime.probe.microbench import STRETCH
from autopipe.util import codec
from autopipe.util.progress import Say, phase

STARTING = 30.0
"""Seconds in which torch has to be loaded and all processes have to have met."""

GRACE = 10.0
"""Seconds that figures may take beyond their budget: an op that has begun cannot be stopped."""

AGAIN = 30.0
"""Seconds after which remaining groups are not requested again."""

_HOME = Path(autopipe.__file__).resolve().parents[1]


def command(program: str) -> tuple[str, ...]:
    """The command that runs a Python program with autopipe; a request is appended to it."""
    begin = "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
    begin += "from autopipe.runtime.probe import measuring\n"
    return sys.executable, "-P", "-c", begin + program, str(_HOME)


COMMAND = command("measuring.main()")

_ENDED = re.compile(r"process \d+ of \d+ ended with code (?P<signal>-?)\d+$")

_OF_A_PEER = "gloo/transport"
"""A part of the error of a process that has lost its peer; such an error is no cause."""


def measure(
    local: LocalSpec, names: Sequence[str], half: float | None, say: Say
) -> dict[str, Found]:
    """Measure figures by all processes at once; a figure that could not be measured has no values.

    Args:
        local: this machine, with its number of processes.
        names: the figures.
        half: the second value of fp32 (`measured.Found`), if fp32 is not among the figures.
    """
    say(_heading(local.processes, sum(budget(group) for group in groups(names))))
    found: dict[str, Found] = {}
    pending, began = groups(names), time.monotonic()
    with phase("measuring this machine", of=len(names)) as done:
        while pending:
            try:
                for answer in _answers(local, pending, half):
                    found |= answer
                    if DTYPES[0] in answer and answer[DTYPES[0]].values:
                        half = answer[DTYPES[0]].values[1]
                    pending = pending[1:]
                    for line in _lines(answer):
                        say(f"  {line}")
                    done(len(answer))
            except LaunchError as error:
                if isinstance(error, _Never) or time.monotonic() - began > AGAIN:
                    failed, pending = pending, []
                else:
                    failed, pending = pending[:1], pending[1:]
                names = [name for group in failed for name in group]
                found |= {name: Found((), error.message) for name in names}
                say(f"  {', '.join(names)}: {error.message}")
                done(len(names))
    return found


class _Never(LaunchError):
    """The processes have not even begun."""


def _answers(
    local: LocalSpec, left: Sequence[tuple[str, ...]], half: float | None
) -> Iterator[dict[str, Found]]:
    """The figures of each group, as soon as they are measured.

    Raises:
        LaunchError: a process ended badly, or took far too long; all are stopped.
    """
    names = tuple(name for group in left for name in group)
    try:
        with tempfile.TemporaryDirectory(prefix="autopipe-", ignore_cleanup_errors=True) as folder:
            threads = max(1, cores() // local.processes)
            crowd = max(1.0, local.processes * threads / cores())
            request = Request(local.processes, names, half, threads, crowd, folder)
            log = Path(folder, "log")
            with _begun(request, log, _environment(threads, local.cpu)) as worker:
                yield from _read(worker, log, left)
    except OSError as error:
        raise _Never(f"no process can be started to measure it: {error}") from error


@contextmanager
def _begun(
    request: Request, log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Within, the process that starts the measuring processes runs; afterwards all are ended."""
    with open(log, "wb") as errors:
        worker = subprocess.Popen(
            [*COMMAND, json.dumps(asdict(request))],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others
        )
    with worker:
        try:
            yield worker
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)


def _read(
    worker: subprocess.Popen[bytes], log: Path, pending: Sequence[tuple[str, ...]]
) -> Iterator[dict[str, Found]]:
    """Read the figures of each group from the worker's stdout.

    Raises:
        LaunchError: the worker has ended early, or is too late.
    """
    assert worker.stdout is not None
    # The first line, without figures, says that all processes have begun.
    waits = [
        ("start", STARTING),
        *((_short(group), STRETCH * budget(group) + GRACE) for group in pending),
    ]
    text, pipe = b"", worker.stdout.fileno()
    for number, (label, patience) in enumerate(waits):
        deadline = time.monotonic() + patience
        failed = LaunchError if number else _Never
        while (line := _PATTERN.search(text)) is None:
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise failed(f"out of time: {label} took more than {patience:.0f} s")
            chunk = os.read(pipe, 2**16)
            if not chunk:
                raise failed(_last(log))
            text += chunk
        text = text[line.end() :]
        if number:
            data = json.loads(line[1])
            yield {name: codec.from_json(Found, value, name) for name, value in data.items()}


def _short(group: tuple[str, ...]) -> str:
    return group[0] if len(group) == 1 else f"{group[0]} and {len(group) - 1} more"


_PATTERN = re.compile(rb"^" + PREFIX.encode() + rb"(.*)\n", re.MULTILINE)


def _last(log: Path) -> str:
    """The last error in the processes' log, as a sentence."""
    lines = log.read_text(errors="replace").splitlines()
    ended = next(filter(None, map(_ENDED.match, lines)), None)
    if ended is not None and ended["signal"]:  # a killed process has left no error
        return ended[0]
    others = [
        line for line in lines if line.strip() and not _ENDED.match(line) and _OF_A_PEER not in line
    ]
    why = f": {others[-1].strip()}" if others else ""
    return f"{ended[0] if ended else 'the processes that measure ended'}{why}"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _environment(threads: int, cpu: bool) -> dict[str, str]:
    """The environment of the measuring processes: the path to autopipe, threads, and loopback.

    Args:
        cpu: hide the GPUs, so that the processor is measured.
    """
    environment = dict(os.environ)
    path = (str(_HOME), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    environment["OMP_NUM_THREADS"] = str(threads)
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # torch there sees a machine without GPUs
    # Without it gloo resolves the name of the host, which fails on some machines.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = loopback[0]
    return environment


# --- In words ------------------------------------------------------------------------------------


def _heading(processes: int, seconds: float) -> str:
    found = cores()
    each = f"{found // processes} cores each" if found >= 2 * processes else "a core each"
    on = f"{processes} processes with {each}"
    if processes > found:
        on = f"{processes} processes share {found} core{'s' if found > 1 else ''}"
    if processes == 1:
        on = f"one process on {found} core{'s' if found > 1 else ''}"
    return f"measuring this machine, about {seconds + LOADING:.0f} s: {on}"


LOADING = 3.0
"""Seconds that loading torch takes, for the time that the user is told."""


def _lines(figures: Mapping[str, Found]) -> Iterator[str]:
    """A line of text for each figure, and one for all kernels."""
    kernels = [name for name in figures if name in KERNELS and figures[name].values]
    if kernels:
        yield f"by themselves: {', '.join(kernels)}"
    for name, figure in figures.items():
        line = _described(name, figure.values) if figure.values else f"{name}: not measured"
        if name not in KERNELS or figure.rough:
            yield line + (f", rough: {figure.rough}" if figure.rough else "")


def _described(name: str, values: tuple[float, ...]) -> str:
    first, last = values[0], values[-1]
    if name == DTYPES[0]:
        of_half = f"; of those with dims of {last:.3g} an eighth of it"
        return f"matmuls in {name}: {first / 1e9:.4g} GFLOP/s a process{of_half}"
    if name in DTYPES:
        lacking = f", this processor has no {name} instructions" if lacks(name) else ""
        return f"matmuls in {name}: {first / 1e9:.4g} GFLOP/s a process{lacking}"
    if name == MEMORY:
        return f"memory: {first / 1e9:.3g} GB/s a process"
    if name == LAUNCH:
        return f"one small op: {first * 1e6:.3g} us forward, {last * 1e6:.3g} us backward"
    if name == MESSAGES:
        return f"between processes: {first * 1e6:.3g} us, {last / 1e9:.3g} GB/s"
    if name == COLLECTIVES:
        took = f"summed in {first * 1e3:.3g} ms, gathered in {last * 1e3:.3g} ms"
        return f"{WHOLE >> 20} MiB of all processes: {took}"
    return f"{name}: {values[2] * 1e6:.3g} us"


_FLAGS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
"""The words for a dtype's instructions in /proc/cpuinfo, of x86 and of ARM."""


def lacks(dtype: str) -> bool:
    """Whether this processor is known to have no instructions for a dtype."""
    try:
        flags = Path("/proc/cpuinfo").read_text().lower()
    except OSError:
        return False
    known = re.search(r"^(flags|features)\s*:(.*)$", flags, re.MULTILINE)
    return dtype in _FLAGS and known is not None and not {*_FLAGS[dtype]} & {*known[2].split()}
