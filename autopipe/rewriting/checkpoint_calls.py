"""The calls of `torch.utils.checkpoint` in a graph: how far a function runs again in backward.

    h = checkpoint(block, x)      nodes of block have again = line, number, "last saved"

A trace writes each call as text into its nodes (`Node.again`). `second_writes` reads it, and leaves
only the line.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from autopipe.ir.graph import Node

Until = Literal["last saved", "end", "end if saved", "otherwise"]
"""Up to where backward runs a function again: the last op that saves something; its end, with
`use_reentrant=True`; its end, if backward reads what one of its ops saves, with
`early_stop=False`. "otherwise": `context_fn` may change or leave out what runs."""


@dataclass(frozen=True)
class CheckpointCall:
    """A call of a checkpoint, as `Node.again` has it until `with_second_writes` is done.

    Attributes:
        line: the user's; of a checkpoint within another one, the outer one's.
        number: tells calls of one line apart; that of the outer one.
        nested: whether the node is in a checkpoint within.
    """

    line: str
    number: str
    until: Until
    nested: bool = False

    def __str__(self) -> str:
        return "\t".join((self.line, self.number, self.until, "nested" * self.nested))

    @classmethod
    def of(cls, text: str) -> CheckpointCall:
        """The call that a node's text tells of."""
        line, number, until, nested = text.split("\t")
        return cls(line, number, cast(Until, until), bool(nested))


def like(one: str, other: str) -> bool:
    """Whether the calls of two texts ("": none) differ at most in their numbers."""
    if not (one and other):
        return one == other
    return replace(CheckpointCall.of(one), number="") == replace(
        CheckpointCall.of(other), number=""
    )


def moved(text: str, around: str, path: str) -> str:
    """The text of a node's call, of a node that is copied for another block.

    Args:
        around: the text of the call around the copy; "": none.
        path: the call of the other block.
    """
    if not text:
        return ""
    call = CheckpointCall.of(text)
    number = CheckpointCall.of(around).number if around else f"{call.number}@{path}"
    return str(replace(call, number=number))


def nodes_of_calls(nodes: Sequence[Node], copies: Container[Node]) -> Iterator[range]:
    """The positions of each checkpoint's nodes, those of checkpoints within it among them.

    Args:
        copies: copies of assigned buffers, which stand beside their sources.
    """
    first, around = 0, ""
    for position, node in enumerate(nodes):
        call = node.again and str(replace(CheckpointCall.of(node.again), nested=False))
        if call != around and node not in copies:
            if around:
                yield range(first, position)
            first, around = position, call
    if around:
        yield range(first, len(nodes))
