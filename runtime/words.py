"""What a rank says of itself, for a verdict: where it is, and what it has raised.

1WAIT_F5<0     waiting for the activations of micro-batch 5 from stage 0
"""

from __future__ import annotations

import re

from autopipe.schedule import Flow, Instruction, Kind

_CARRIED = {Flow.ACTIVATION: "the activations", Flow.GRADIENT: "the gradients"}

_WORDS = {
    Kind.FORWARD: "forward of micro-batch {k}",
    Kind.BACKWARD: "backward of micro-batch {k}",
    Kind.BACKWARD_INPUT: "backward for the inputs of micro-batch {k}",
    Kind.BACKWARD_WEIGHT: "backward for the weights of micro-batch {k}",
    Kind.POST: "making room for {what} of micro-batch {k} from stage {peer}",
    Kind.WAIT: "waiting for {what} of micro-batch {k} from stage {peer}",
    Kind.SEND: "sending {what} of micro-batch {k} to stage {peer}",
    Kind.FREE: "waiting for stage {peer} to take {what} of micro-batch {k}",
    Kind.REDUCE: "about to sum its gradients over the ranks",
    Kind.STEP: "waiting for the sums of its gradients",
}


def describe(instruction: Instruction) -> str:
    """What a rank is doing at `instruction`: `waiting for the activations of micro-batch 3 ...`."""
    what = _CARRIED[instruction.flow] if instruction.flow is not None else ""
    words = _WORDS[instruction.kind]
    return words.format(k=instruction.microbatch, what=what, peer=instruction.peer)


_ECHO = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|pair closure|Timed out waiting"
    "|remote process exited|NCCL communicator was aborted|timed out after .* waiting",
    re.IGNORECASE,
)
"""What gloo and NCCL say when a peer is gone or takes too long."""


def is_echo(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone, or late."""
    known: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in known:
        known.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(
        isinstance(error, RuntimeError) and _ECHO.search(str(error))
        or any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # torch's
        for error in known
    )  # fmt: skip


def sentence(error: BaseException) -> str:
    """`ZeroDivisionError: division by zero`; of a longer message the first line."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}"
