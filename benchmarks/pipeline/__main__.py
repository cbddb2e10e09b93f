"""The command line: starts the ranks of each case, on loopback or on a slow link.

python -m benchmarks.pipeline --ranks 2 --ms 1 10 --schedules 1f1b eager-1f1b
python -m benchmarks.pipeline --ranks 2 --delay-ms 5 --schedules 1f1b eager-1f1b
python -m benchmarks.pipeline --ranks 4 --compute matmul --memory
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace

from autopipe.runtime.comm.choose import VARIABLE
from autopipe.runtime.launch.spawn import spawn
from benchmarks.pipeline import link
from benchmarks.pipeline.case import COUNTERPARTS, Case


def main(argv: list[str] | None = None) -> int:
    """Run every case that the arguments name; the exit code is that of the first to fail."""
    parser = arguments()
    chosen = parser.parse_args(argv)
    if (chosen.delay_ms or chosen.mbit) and not link.available():
        parser.error("a slow link takes root and /dev/net/tun")
    if chosen.fifo and (os.geteuid() != 0 or chosen.compute != "sleep"):
        parser.error("--fifo takes root, and stages that sleep: others would starve the machine")
    if chosen.transport:
        os.environ[VARIABLE] = chosen.transport
    if not chosen.trim:
        os.environ.update(KEPT)
    for ranks in chosen.ranks:
        for micro_batches in chosen.micro_batches:
            for ms in chosen.ms:
                code = run(case_of(chosen, ranks, micro_batches, ms))
                if code:
                    return code
    return 0


def arguments() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description="autopipe's runtime against torch.distributed.pipelining, in one run.",
    )
    add = parser.add_argument
    add("--ranks", "-p", type=int, nargs="+", default=[2])
    add("--micro-batches", "-m", type=int, nargs="+", default=[16])
    add("--ms", type=float, nargs="+", default=[10.0], help="of a micro-batch on a rank, F + B")
    add("--compute", choices=["sleep", "matmul"], default="sleep")
    add("--schedules", nargs="+", choices=list(COUNTERPARTS), default=["1f1b"])
    add("--window", type=int, default=2, help="receives posted ahead")
    add("--depth", type=int, help="in flight besides at every boundary, eager-1f1b")
    add("--rounds", type=int, default=12)
    add("--delay-ms", type=float, default=0.0, help="one way")
    add("--transport", choices=["gloo", "direct"], help="autopipe's; else what it picks itself")
    add("--mbit", type=float, default=0.0, help="that leave a rank per second; 0: no limit")
    add("--rate", type=float, default=40e9, help="operations a second that matmul is sized by")
    add("--cores", type=int, default=1, help="of each rank; ranks share them where too few")
    add("--fifo", action="store_true", help="real-time priority: keeps other programs out")
    add(
        "--trim", action="store_true", help="let glibc give freed memory back, as it does by itself"
    )
    add("--memory", action="store_true", help="count bytes instead of seconds")
    return parser


def case_of(chosen: argparse.Namespace, ranks: int, micro_batches: int, ms: float) -> Case:
    """One case of those that the arguments name."""
    return Case(
        ranks=ranks,
        micro_batches=micro_batches,
        ms=ms,
        compute=chosen.compute,
        rate=chosen.rate,
        schedules=tuple(chosen.schedules),
        window=chosen.window,
        depths=() if chosen.depth is None else (chosen.depth,) * (ranks - 1),
        rounds=chosen.rounds,
        delay_ms=chosen.delay_ms,
        mbit=chosen.mbit,
        cores=chosen.cores,
        fifo=chosen.fifo,
        memory=chosen.memory,
        relay=None,
    )


KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
"""The ranks' environment: freed memory stays with the process. By itself glibc gives it back to the
kernel and takes it again page by page, on whichever side the history of the heap happens to hit: 70
page faults and 90 us a micro-batch, here today and there tomorrow."""


def run(case: Case) -> int:
    """Start the ranks and wait for them; rank 0 prints the rows."""
    print(f"p={case.ranks} m={case.micro_batches} {case.ms:g} ms {case.compute}", file=sys.stderr)
    with ExitStack() as stack:
        if case.delay_ms or case.mbit:
            rate = case.mbit * 1e6 / 8 if case.mbit else None
            path = stack.enter_context(link.relay(case.delay_ms / 1e3, rate, fifo=case.fifo))
            case = replace(case, relay=path)
        command = (sys.executable, "-m", "benchmarks.pipeline.rank")
        return spawn(case.ranks, [json.dumps(asdict(case))], command)


if __name__ == "__main__":
    sys.exit(main())
