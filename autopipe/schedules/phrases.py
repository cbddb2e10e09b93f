"""What an instruction does, in words, for the message about a dead rank and for pictures of a step.

1WAIT_F5<0     waiting for the activations of micro-batch 5 from stage 0     wait for activations 5
"""

from __future__ import annotations

from autopipe.schedules.instructions import Flow, Instruction, Kind

_CARRIED = {Flow.ACTIVATION: "activations", Flow.GRADIENT: "gradients"}

_WORDS = {
    Kind.FORWARD: "forward of micro-batch {k}",
    Kind.BACKWARD: "backward of micro-batch {k}",
    Kind.BACKWARD_INPUT: "backward for the inputs of micro-batch {k}",
    Kind.BACKWARD_WEIGHT: "backward for the weights of micro-batch {k}",
    Kind.POST: "making room for the {what} of micro-batch {k} from stage {peer}",
    Kind.WAIT: "waiting for the {what} of micro-batch {k} from stage {peer}",
    Kind.SEND: "sending the {what} of micro-batch {k} to stage {peer}",
    Kind.FREE: "waiting for stage {peer} to take the {what} of micro-batch {k}",
    Kind.REDUCE: "about to sum its gradients over the ranks",
    Kind.STEP: "waiting for the sums of its gradients",
}

_SHORT = {
    Kind.FORWARD: "forward {k}",
    Kind.BACKWARD: "backward {k}",
    Kind.BACKWARD_INPUT: "backward for inputs {k}",
    Kind.BACKWARD_WEIGHT: "backward for weights {k}",
    Kind.POST: "make room for {what} {k}",
    Kind.WAIT: "wait for {what} {k}",
    Kind.SEND: "send {what} {k}",
    Kind.FREE: "wait until {what} {k} are taken",
    Kind.REDUCE: "sum of gradients, stage {stage}",
    Kind.STEP: "wait for sums of gradients",
}


def describe(instruction: Instruction) -> str:
    """What a rank is doing at `instruction`: `waiting for the activations of micro-batch 3 ...`."""
    return _filled(_WORDS[instruction.kind], instruction)


def short(instruction: Instruction) -> str:
    """`describe` in few words: `wait for activations 3`."""
    return _filled(_SHORT[instruction.kind], instruction)


def _filled(words: str, instruction: Instruction) -> str:
    what = _CARRIED[instruction.flow] if instruction.flow is not None else ""
    kind, stage, k, _, peer = instruction
    return words.format(k=k, what=what, peer=peer, stage=stage)
