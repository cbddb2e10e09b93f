"""A rank of a small run under the real watchdog, which comes to harm at an instruction.

    python watched.py RANK STEP INSTRUCTION HARM        once per rank, with torchrun's variables

Stage r is on rank r. The ranks run naive pipeline steps of two micro-batches over gloo, until rank
RANK in step STEP comes to INSTRUCTION and to HARM. When a rank ends by an exception, it prints its
number and the verdict that it was given ("None" without one), and ends with code 1.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopipe.runtime.launch import watchdog
from autopipe.runtime.launch.world import start, world_from
from autopipe.schedules.instructions import Flow, Instruction, Kind, parse

MICRO_BATCHES = 2
STEPS = 4


def program(rank: int, size: int) -> list[Instruction]:
    """`1WAIT_F0<0 1F0 1SEND_F0>2 ... 1WAIT_B0<2 1B0 1SEND_B0>0 ... 1REDUCE 1STEP`."""
    words = []
    for flow, before, after in (("F", rank - 1, rank + 1), ("B", rank + 1, rank - 1)):
        for k in range(MICRO_BATCHES):
            words += [f"{rank}WAIT_{flow}{k}<{before}"] if 0 <= before < size else []
            words += [f"{rank}{flow}{k}"]
            words += [f"{rank}SEND_{flow}{k}>{after}"] if 0 <= after < size else []
    return [parse(word) for word in (*words, f"{rank}REDUCE", f"{rank}STEP")]


def carry_out(instruction: Instruction) -> None:
    """Transfers and the sum as they are; a computation takes 2 ms."""
    kind, _, _, flow, peer = instruction
    tag = int(flow is Flow.GRADIENT)
    if kind is Kind.WAIT:
        dist.recv(torch.zeros(1), peer, tag=tag)
    elif kind is Kind.SEND:
        dist.send(torch.ones(1), peer, tag=tag)
    elif kind is Kind.STEP:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(0.002)


def fail() -> None:
    raise ZeroDivisionError("in the loss")


HARMS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": fail,
    # PyDLL keeps the GIL: no thread of this process runs for longer than the watchdog's patience.
    "hold the GIL": lambda: ctypes.PyDLL(None).sleep(12),
    "none": lambda: None,
}


def main(rank: int, step: int, instruction: str, harm: str) -> None:
    world = world_from(os.environ)
    assert world is not None
    with start(world, timeout=60) as dog:
        own = program(world.rank, world.size)
        watch = dog.learn(own)
        for now in range(STEPS):
            with dog.at(now):
                for position, current in enumerate(own):
                    watch(position)
                    if (world.rank, now, str(current)) == (rank, step, instruction):
                        print(f"harm at {time.monotonic()}", flush=True)
                        HARMS[harm]()
                    carry_out(current)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
    except Exception as error:
        # In one piece: ranks share the file, and `print` may write a line and its end apart.
        os.write(1, f"{os.environ['RANK']}: {watchdog.verdict(error)}\n".encode())
        sys.exit(1)
