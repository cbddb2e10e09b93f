"""Write one fx graph as the lines of a `forward`: the same calls in order, with readable names.

    norm1_weight = self.norm1.weight             # model.py:31: y = self.up(self.norm1(x))
    layer_norm_default = layer_norm.default(     norm1_layer_norm = aten.layer_norm.default(
        h_2_add_1, (32,), norm1_weight, ...          x, (32,), self.norm1.weight, ...
    )                                            )
    up_weight = self.up.weight                   up_linear = aten.linear.default(
    linear_default = linear.default(                 norm1_layer_norm, self.up.weight
        layer_norm_default, up_weight            )  # [2, 12, 128]
    )

A value is named after its graph node, relative to the block it is in: `h.3.mlp.up/linear/0` is
`mlp_up_linear` in `h.3`. Comments give the user's line of a group of nodes, and the shape of a
result if no argument has it.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from os.path import basename, commonprefix
from typing import Any

import torch
from torch import fx

from autopipe.emit.pretty_print import (
    INDENT,
    WIDTH,
    Call,
    Expression,
    Names,
    behind,
    comment,
    flat,
    identifier,
    lay_out,
    literal,
    member,
    text,
)
from autopipe.emit.shape_notes import SPEC
from autopipe.ir.blocks import Visit
from autopipe.ir.graph import Graph, Node
from autopipe.ir.torch_private import in_code
from autopipe.planfile.node_names import NodeName
from autopipe.stages import node_calls, rng
from autopipe.stages.node_calls import NODE_NAME, take
from autopipe.stages.precision import low

WORDS = {
    rng.draw: "draw",
    node_calls.check_read: "check_read",
    node_calls.under_autocast: "under_autocast",
    node_calls.draw_under_autocast: "draw_under_autocast",
    node_calls.saturated: "saturated",
    node_calls.repeated: "repeated",
    low: "low",
    torch.ops.aten.detach.default: "detach",
}
"""autopipe's own functions in a stage's code, by their names in its source."""


@dataclass(frozen=True)
class _Statement:
    """`targets = value`; without targets the value alone.

    `node` is None for the call of a block. A value that is `packed` is a tuple of all targets.
    """

    targets: tuple[str, ...]
    value: Expression
    node: Node | None = None
    packed: bool = False
    remark: str = ""

    def lines(self) -> list[str]:
        before = "".join(f"{target} = " for target in self.targets)
        if self.packed:
            names = ", ".join(self.targets)
            before = f"{names} = " if len(self.targets) > 1 else f"({names},) = "
        found = lay_out(self.value, INDENT, before)
        if self.packed and max(map(len, found)) > WIDTH:
            *names_, end = lay_out(Call("", self.targets), INDENT)
            found = [*names_, *lay_out(self.value, INDENT, f"{end.strip()} = ")]
        if self.remark and len(found[-1]) + len(self.remark) + 4 <= WIDTH:
            found[-1] += f"  # {self.remark}"
        return found


@dataclass
class Body:
    """Writes the body of one `forward`.

    Args:
        graph: the graph that contains the code's nodes.
        path: the path of the block (`shared@1`); empty for a stage.
        callee: gives the name, in the source, of the module that a node calls.

    Attributes:
        results: the expressions that the code returns; set by `write`.
        draws: whether the code needs the block's path, for the names of random nodes.
        words: autopipe's own functions that the code uses.
        called: the arguments of each called module, by the node's name.
    """

    graph: Graph
    path: str = ""
    callee: Callable[[str], str] = member
    results: list[Expression] = field(default_factory=list)
    draws: bool = False
    words: set[str] = field(default_factory=set)
    called: dict[str, tuple[Expression, ...]] = field(default_factory=dict)

    @property
    def home(self) -> str:
        """The path of the module, without the number of the call."""
        return Visit.of(self.path).module

    def write(self, code: fx.Graph, arguments: Sequence[str], names: Names) -> list[str]:
        """The lines of the body, without its `return`.

        Args:
            arguments: the names of the code's arguments, known to `names`.
        """
        env: dict[fx.Node, Expression] = {}
        statements: list[_Statement] = []
        given = iter(arguments)
        for node in code.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                env[node] = member(str(node.target))
            elif node.op == "output":
                results: Any = node.args[0]
                self.results = [self._value(item, env) for item in results]
            elif node.target is not take:  # they were named when the tuple they take from was made
                self._call(node, env, names, statements)
        return _commented(statements, self.home)

    def name(self, node: str) -> str:
        """The preferred name of a graph node's value in this code.

        What only a rank's graph has is named after a node, `h.3/add/1>I`, `h.3/linear/0/[bias]>P`,
        or after an entry of the batch, `<labels>>S(1)`.
        """
        match = re.match(r"(.*?/\d+)(?!\w)(.*)", node)
        parsed = match and NodeName.of(match[1])
        if match is None or parsed is None:
            return identifier("_".join(re.findall(r"\w+", node)))
        call = self.path.removeprefix(self.home)
        parts = parsed.module.removeprefix(self.home).split(".")
        parts = [part.removesuffix(call) for part in parts]
        op = parsed.op.strip("_") if parsed.op.startswith("__") else parsed.op
        if Visit.of(parts[-1]).module != op:
            parts.append(op)
        if parsed.number:
            parts.append(str(parsed.number))
        parts += re.findall(r"\w+", match[2])
        return identifier("_".join(filter(None, parts)))

    def _call(
        self,
        node: fx.Node,
        env: dict[fx.Node, Expression],
        names: Names,
        statements: list[_Statement],
    ) -> None:
        """Add the statement of one call, and what it makes to `env`."""
        name = node.meta.get(NODE_NAME)
        items = [
            self._draws(arg) if isinstance(arg, str) and arg == name else self._value(arg, env)
            for arg in node.args
        ]
        takers = [user for user in node.users if user.target is take]
        if node.op == "call_module":
            made = None
            value = Call(self.callee(str(node.target)), tuple(items))
            self.called[node.name] = value.items
            base, count = identifier(str(node.target)), len(takers)
            packed = count > 1
        elif name is not None:
            made = self.graph.nodes[self.graph.index[name]]
            items += [flat(behind(f"{k}=", self._value(a, env))) for k, a in node.kwargs.items()]
            value = Call(self._function(node.target), tuple(items))
            base, packed, count = self.name(name), made.packed, len(made.outputs)
        else:  # of an argument: its copy in low precision, without its gradient, or to be written
            value = Call(self._function(node.target), tuple(items))
            env[node] = value
            source = node.args[0]
            if node.target is torch.ops.aten.clone.default and _is_whole_argument(source):
                env[node] = items[0]
                statements.append(_Statement((flat(items[0]),), value))
            return
        taken = {int(str(taker.args[1])): taker for taker in takers}
        if packed:
            wishes = [f"{base}_{part}" if part in taken else "_" for part in range(count)]
        else:
            wishes = [base] if node.users else []
        targets = [wish if wish == "_" else names.new(wish) for wish in wishes]
        if made is None and INDENT + len(f"{', '.join(targets)} = {value.head}(") > WIDTH:
            block = names.new("block")
            statements.append(_Statement((block,), value.head))
            value = Call(block, value.items)
        env |= {taker: targets[part] for part, taker in taken.items()}
        env[node] = targets[0] if targets else value
        remark = _remark(node) if targets else ""
        statements.append(_Statement(tuple(targets), value, made, packed, remark))

    def _draws(self, node: str) -> Expression:
        """The name of a random node, from which it draws."""
        if not self.home:
            return text(node)
        self.draws = True
        return "f" + text("{self._path}" + node.removeprefix(self.home))

    def _function(self, target: Any) -> str:
        if target in WORDS:
            self.words.add(WORDS[target])
            return WORDS[target]
        aten = target.namespace == "aten"
        return in_code(*str(target).split(".", 1)) if aten else in_code("torch.ops", str(target))

    def _value(self, arg: Any, env: dict[fx.Node, Expression]) -> Expression:
        if isinstance(arg, fx.Node):
            return env[arg]
        if isinstance(arg, tuple | list):
            return Call("", tuple(self._value(item, env) for item in arg))
        if isinstance(arg, torch.device):
            self.words.add("DEVICE")
        return self._function(arg) if callable(arg) else literal(arg)


def _is_whole_argument(source: Any) -> bool:
    """Whether a copy takes the place of an argument of the code, of which nothing else is read."""
    return isinstance(source, fx.Node) and source.op == "placeholder" and len(source.users) == 1


def _remark(node: fx.Node) -> str:
    """The shape of what a call makes, unless an argument has it."""
    found = node.meta.get(SPEC)
    specs = found if isinstance(found, list) else [found]
    shapes = {_shape(spec) for spec in specs}
    given = [source.meta.get(SPEC) for source in node.all_input_nodes if source.op != "get_attr"]
    if len(shapes) != 1 or None in specs or _shape(specs[0]) in {_shape(s) for s in given}:
        return ""
    return ("each " if isinstance(found, list) else "") + shapes.pop()


def _shape(spec: Any) -> str:
    return "[" + spec.partition("[")[2] if isinstance(spec, str) else ""


def _commented(statements: Sequence[_Statement], home: str) -> list[str]:
    """The lines of all statements; before those of one line of the user's, that line."""
    lines: list[str] = []
    for place, group in groupby(statements, lambda s: s.node.place if s.node else None):
        members = list(group)
        nodes = [s.node for s in members if s.node is not None]
        if place is not None:
            lines.append(comment(_place_and_line(place, nodes, home), INDENT))
        for statement in members:
            lines += statement.lines()
    return lines


def _place_and_line(place: str, nodes: Sequence[Node], home: str) -> str:
    """`mlp, model.py:31: x = self.up(x)`: the module, as seen from home, and the user's line."""
    scopes = [Visit.of(node.scopes[-1]).module if node.scopes else "" for node in nodes]
    common = commonprefix([scope.split(".") for scope in scopes])
    scope = ".".join(common).removeprefix(home)
    file, _, line = place.rpartition(":")
    words = [scope.strip("."), f"{basename(file)}:{line}" if file else ""]
    source = linecache.getline(file, int(line)).strip() if file else ""
    return ": ".join(filter(None, (", ".join(filter(None, words)), source)))
