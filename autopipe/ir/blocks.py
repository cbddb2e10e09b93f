"""Find the blocks of a graph: the model's repeated layers.

A block is a module call with parameters that has the same ops, edges and shapes as another one and
is not inside a larger such call. A call of a module without submodules (a norm) is a block only if
it and its equal are members of one numbered list (`h.0`, `h.1`, ...); if one member of such a list
is a block, all its members are. Blocks of one structure make a class.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Arg, Graph, Ref, State, Value, once


@dataclass(frozen=True)
class Visit:
    """One call of a module, as in `Node.scopes`: `shared@1` is the second call of `shared`."""

    module: str
    number: int = 0

    @classmethod
    def of(cls, path: str) -> Visit:
        """Parse a call from its text."""
        module, _, number = path.partition("@")
        return cls(module, int(number or 0))

    def __str__(self) -> str:
        return f"{self.module}@{self.number}" if self.number else self.module


@dataclass(frozen=True)
class Block:
    """The node positions [first, stop) of one module call, the call's path and its class's name.

    A class is named after its first member.
    """

    path: str
    first: int
    stop: int
    kind: str

    @property
    def module(self) -> str:
        """The path of the module, without the number of the call."""
        return Visit.of(self.path).module

    @property
    def prefix(self) -> str:
        """The prefix of the names of the module's states: `h.3.`."""
        return f"{self.module}."


def next_call(path: str, taken: Container[str]) -> str:
    """The name of a block's next call in a stage: `h.0`, then `h.0_again`."""
    while path in taken:
        path += "_again"
    return path


@once
def find_blocks(graph: Graph) -> tuple[Block, ...]:
    """Find the blocks of a graph, in its order; they do not overlap."""
    ranges = _calls(graph)
    shapes = {path: _structure(graph, path, *span) for path, span in ranges.items()}
    members: dict[str, list[str]] = defaultdict(list)
    for path, shape in shapes.items():
        members[shape].append(path)
    inner = {scope for node in graph.nodes for scope in node.scopes[:-1]}
    repeated = {
        path
        for path, shape in shapes.items()
        if any(
            other != path and (path in inner or _listed_together(path, other))
            for other in members[shape]
        )
    }
    lists = {_parent(path) for path in repeated if _is_numbered(path)}
    blocks = repeated | {p for p in ranges if _is_numbered(p) and _parent(p) in lists}
    outermost: list[str] = []
    stop = 0
    # Larger calls first; a module that only wraps another has its nodes and the shorter path.
    for path in sorted(blocks, key=lambda p: (ranges[p][0], -ranges[p][1], len(p))):
        if ranges[path][0] >= stop:
            outermost.append(path)
            stop = ranges[path][1]
    return tuple(
        Block(path, *ranges[path], kind=min(members[shapes[path]], key=lambda p: ranges[p]))
        for path in outermost
    )


def owners(blocks: Sequence[Block], first: int, stop: int) -> dict[int, Block]:
    """The block that each node position in [first, stop) is in; positions outside are left out."""
    return {
        position: block
        for block in blocks
        for position in range(max(block.first, first), min(block.stop, stop))
    }


def _calls(graph: Graph) -> dict[str, tuple[int, int]]:
    """The node positions of each module call with parameters whose nodes are consecutive."""
    positions: dict[str, list[int]] = defaultdict(list)
    owning: set[str] = set()
    for position, node in enumerate(graph.nodes):
        owns = any(
            isinstance(v, State) and graph.states[v.name].kind == "parameter" for v in node.values()
        )
        for scope in node.scopes:
            positions[scope].append(position)
            if owns:
                owning.add(scope)
    return {
        scope: (found[0], found[-1] + 1)
        for scope, found in positions.items()
        if scope in owning and len(found) > 1 and found[-1] - found[0] == len(found) - 1
    }


def _structure(graph: Graph, path: str, first: int, stop: int) -> str:
    """A hash of the nodes of one call with every name made relative to the call."""
    inside = {graph.nodes[p].name: p - first for p in range(first, stop)}
    outside: dict[Value, int] = {}
    module = f"{Visit.of(path).module}."

    def relative(arg: Arg) -> str:
        if isinstance(arg, tuple):
            return f"({','.join(relative(item) for item in arg)})"
        if isinstance(arg, Ref) and arg.node in inside:
            return f"%{inside[arg.node]}:{arg.output}"
        if isinstance(arg, State) and arg.name.startswith(module):
            return f"[{arg.name.removeprefix(module)} {graph.spec(arg)}]"
        if isinstance(arg, Value):
            return f"<{outside.setdefault(arg, len(outside))} {graph.spec(arg)}>"
        return repr(arg)

    digest = hashlib.sha256()
    for node in graph.nodes[first:stop]:
        kwargs = ",".join(f"{k}={relative(a)}" for k, a in sorted(node.kwargs.items()))
        outputs = ",".join(str(output) for output in node.outputs)
        digest.update(f"{node.op}({relative(node.args)},{kwargs})->{outputs};".encode())
    return digest.hexdigest()


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _listed_together(path: str, other: str) -> bool:
    return _is_numbered(path) and _is_numbered(other) and _parent(path) == _parent(other)


def _is_numbered(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def classes(blocks: tuple[Block, ...]) -> dict[str, tuple[str, ...]]:
    """The blocks of each class, in the graph's order, by the class's name."""
    found: dict[str, list[str]] = defaultdict(list)
    for block in blocks:
        found[block.kind].append(block.path)
    return {kind: tuple(paths) for kind, paths in found.items()}
