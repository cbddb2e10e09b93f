"""Write a lowered stage as a Python module: one class per block class, and one for the stage.

    class Block(States):                          blocks of one structure come out as the same
        def __init__(self) -> None: ...           text, and share a class
        def forward(self, x: Tensor) -> Tensor: ...

    class Stage0(States):
        def __init__(self) -> None:
            self.blocks = States({"0": Block(), "1": Block()})

        def forward(self, tokens: Tensor) -> tuple[Tensor, ...]: ...

Parameters and buffers are declared under the model's own names; the runtime fills in the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopipe.emit.declarations import assignments, constructor, declared
from autopipe.emit.forward_code import WORDS, Body
from autopipe.emit.pretty_print import (
    INDENT,
    WIDTH,
    Call,
    Expression,
    Names,
    flat,
    lay_out,
    member,
    table,
    text,
)
from autopipe.emit.shape_notes import observe, piece_of, specs_of
from autopipe.ir.blocks import Block, Visit
from autopipe.ir.graph import Graph, Ref
from autopipe.ir.torch_private import in_graph_module
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.lower import Lowered
from autopipe.stages.node_calls import NODE_NAME
from autopipe.stages.recompute import Recomputed

HELPERS = "autopipe.runtime.emitted"
"""The module from which a stage's source imports its functions."""


@dataclass(frozen=True)
class Surroundings:
    """Facts about a stage for its docstring and comments.

    Attributes:
        stages: the number of stages.
        rank: the pipeline rank that runs this stage.
        class_of: gives the class name of the model's module at a path.
    """

    graph: Graph
    blocks: Sequence[Block]
    boundaries: Mapping[Ref, CrossingTensor]
    precision: str
    stages: int
    rank: int
    class_of: Callable[[str], str]


def stage_code(lowered: Lowered, around: Surroundings) -> str:
    """The Python text of a stage's module; its class is `Stage0` for stage 0.

    Args:
        lowered: a stage lowered with fake states and with the recorded reads.
    """
    observe(lowered, around.graph, around.boundaries, around.precision)
    return _Writer(lowered, around).source()


@dataclass
class _Part:
    """A block of the stage.

    Attributes:
        target: what the lowered stage calls it.
        path: the block's; `home` is that of its module.
        owns: whether its states are declared with it. Those of a module that is called again are
            with the first call.
        given: the arguments it is called with.
    """

    target: str
    path: str
    code: fx.Graph
    recomputed: Recomputed | None
    owns: bool = True
    given: tuple[Expression, ...] = ()

    @property
    def home(self) -> str:
        return Visit.of(self.path).module


@dataclass
class _Class:
    """Blocks whose code is the same up to the names of its arguments."""

    name: str
    draws: bool
    parts: list[_Part] = field(default_factory=list)


class _Writer:
    """Writes one stage's module; the stage's code comes first, as it has the blocks' arguments."""

    def __init__(self, lowered: Lowered, around: Surroundings) -> None:
        self.lowered, self.around = lowered, around
        self.stage, self.code = lowered.stage, lowered.module.graph
        self.words = {"States"}
        self.names = Names(_RESERVED)
        self.title = self.names.new(f"Stage{self.stage.index}")
        self.parts = list(self._parts())
        self.classes: dict[object, _Class] = {}
        self.instances: dict[tuple[str, bool, object], tuple[str, Expression]] = {}
        self.called = {part.target: self._instance(part) for part in self.parts}

    def source(self) -> str:
        """The whole module."""
        head, body = self._stage_class()
        classes = [line for cls in self.classes.values() for line in self._block_class(cls)]
        constants = [f"ROWS = {self.lowered.rows}"]
        if "DEVICE" in self.words:
            constants += ['DEVICE = torch.device("cpu")  # or the GPU of the rank that runs this']
        helpers = sorted(self.words - {"DEVICE"})
        imports = f"from {HELPERS} import {', '.join(helpers)}"
        if len(imports) > WIDTH:
            imports = "\n    ".join([f"from {HELPERS} import (", *(f"{name}," for name in helpers)])
            imports += "\n)"
        head += ["", "import torch", "from torch import Tensor", "", imports, ""]
        head += ["aten = torch.ops.aten", "", *constants]
        return "\n".join([*head, *classes, *body]) + "\n"

    # --- Which blocks share a class, and which an instance ---------------------------------------

    def _parts(self) -> Iterator[_Part]:
        graph, module = self.around.graph, self.lowered.module
        owner = {p: block.path for block in self.around.blocks for p in _positions(block)}
        homes: set[str] = set()
        for node in self.code.find_nodes(op="call_module"):
            called = module.get_submodule(str(node.target))
            code = piece_of(called).graph
            first = next(n.meta[NODE_NAME] for n in code.nodes if NODE_NAME in n.meta)
            path = owner[graph.index[first]]
            again = called if isinstance(called, Recomputed) else None
            part = _Part(str(node.target), path, code, again)
            part.owns = part.home not in homes
            homes.add(part.home)
            yield part

    def _instance(self, part: _Part) -> str:
        """The path of the module that runs a block: an equal one with its states, or a new one."""
        body = Body(self.around.graph, part.path)
        lines = body.write(part.code, *_arguments(["x"] * len(_placeholders(part.code))))
        states = self._assignments(part.home) if part.owns else []
        same = tuple(lines), flat(Call("", tuple(body.results)))
        known = part.home, part.recomputed is not None, same
        if known in self.instances:
            return self.instances[known][0]
        key = same, tuple(states)
        if key not in self.classes:
            name = self.names.new(self.around.class_of(part.home) + "Again" * (not part.owns))
            self.classes[key] = _Class(name, body.draws)
        cls = self.classes[key]
        cls.parts.append(part)
        made: Expression = Call(cls.name, (text(part.home),) if cls.draws else ())
        if not part.owns:
            made = Call(f"{flat(made)}.sharing", (member(in_graph_module(part.home)),))
        if part.recomputed is not None:
            self.words.add("Recomputed")
            made = Call("Recomputed", (made, *map(text, part.recomputed.statistics)))
        self.instances[known] = part.target, made
        return part.target

    # --- The stage -------------------------------------------------------------------------------

    def _stage_class(self) -> tuple[list[str], list[str]]:
        """The lines of the module's docstring, and of the stage's class."""
        stage, graph = self.stage, self.around.graph
        body = Body(graph, callee=lambda target: member(self.called[target]))
        received = [_name_of(ref, body) for ref in stage.incoming]
        inputs = [f"input_{path}" if path[:1].isdigit() else path for path in stage.inputs]
        arguments, names = _arguments([*received, *inputs])
        lines = body.write(self.code, arguments, names)
        self.words |= body.words
        for part, arguments_given in zip(self.parts, body.called.values(), strict=True):
            part.given = arguments_given

        states = self._states("")
        again: list[str] = []
        homes = [f"{in_graph_module(module)}." for module, _, _ in self.instances]
        for (module, _, _), (path, value) in self.instances.items():
            home = in_graph_module(module)
            if path == home and not home.startswith(tuple(homes)):  # in the place of its states
                below = f"{home}."
                states = {home if n.startswith(below) else n: x for n, x in states.items()}
                states[home] = value
                continue
            parent, _, leaf = path.rpartition(".")
            add = Call(f"{member(parent) if parent else 'self'}.add_module", (text(leaf), value))
            again += lay_out(add, INDENT)
        code = [
            *("", "", f"class {self.title}(States):"),
            *constructor([*assignments(states), *again], draws=False),
            *_signature(arguments, "tuple[Tensor, ...]"),
            *lines,
            *lay_out(Call("", tuple(body.results)), INDENT, "return "),
        ]
        return self._docstring(arguments, body), code

    def _docstring(self, arguments: Sequence[str], body: Body) -> list[str]:
        stage, around = self.stage, self.around
        argument_specs, result_specs = specs_of(self.code)
        rows = []
        for name, spec, ref in zip(arguments, argument_specs, stage.incoming, strict=False):
            back = stage.index in around.boundaries[ref].gradients
            peers = [str(source) for value, source in stage.receives if value == ref]
            sender = f"from stage{'s' * (len(peers) > 1)} {', '.join(peers)}"
            rows.append((name, spec, f"{sender}{', gradient back' * back}"))
        for name, spec in list(zip(arguments, argument_specs, strict=True))[len(rows) :]:
            rows.append((name, spec, "from the batch"))
        num_arguments = len(rows)
        for result, spec, ref in zip(body.results, result_specs, stage.outgoing, strict=False):
            peers = [str(target) for value, target in stage.sends if value == ref]
            to = f"to stage{'s' * (len(peers) > 1)} {', '.join(peers)}"
            alias = _name_of(ref, body)
            rows.append((flat(result), spec, to + f" as {alias}" * (alias != result)))
        for number, result in enumerate(body.results[len(stage.outgoing) :]):
            spec = result_specs[len(stage.outgoing) + number]
            rows.append((flat(result), spec, "the count" if number else "the loss"))
        sides = ["gives" * (n == num_arguments) or "takes" * (n == 0) for n in range(len(rows))]
        lines = table([(side, *row) for side, row in zip(sides, rows, strict=True)], 4)
        return [
            f'"""Stage {stage.index} of {around.stages}, run by rank {around.rank} of a pipeline.',
            "",
            *([*lines, ""] if lines else []),
            "Sizes are those of a micro-batch of ROWS rows. Whoever runs this puts the parameters",
            "and buffers of the model in place; they are declared under the model's names.",
            '"""',
        ]

    # --- A block ---------------------------------------------------------------------------------

    def _block_class(self, cls: _Class) -> list[str]:
        first = cls.parts[0]
        wishes_of_parts = [[_wish(argument) for argument in part.given] for part in cls.parts]
        wishes = [_common(wishes) for wishes in zip(*wishes_of_parts, strict=True)]
        arguments, names = _arguments(wishes if len(wishes) > 1 else ["x"] * len(wishes))
        body = Body(self.around.graph, first.path)
        lines = body.write(first.code, arguments, names)
        self.words |= body.words
        specs = [specs_of(part.code) for part in cls.parts]
        takes = [_common_spec(same) for same in zip(*(args for args, _ in specs), strict=True)]
        gives = [_common_spec(same) for same in zip(*(made for _, made in specs), strict=True)]
        results = body.results
        rows = [("takes" * (not n), arguments[n], spec) for n, spec in enumerate(takes)]
        rows += [("gives" * (not n), flat(results[n]), spec) for n, spec in enumerate(gives)]
        single = len(results) == 1
        returned = results[0] if single else Call("", tuple(results))
        kind = "Tensor" if single else f"tuple[{', '.join(['Tensor'] * len(results)) or '()'}]"
        states = self._assignments(first.home) if first.owns else []
        return [
            *("", "", f"class {cls.name}(States):"),
            *_listed([part.path for part in cls.parts]),
            *table(rows, 4),
            '    """',
            "",
            *constructor(states, draws=cls.draws),
            *_signature(arguments, kind),
            *lines,
            *lay_out(returned, INDENT, "return "),
        ]

    def _states(self, home: str) -> dict[str, Expression]:
        """How the stage's states below a path are declared, by name."""
        below = f"{home}." if home else ""
        names = [name for name in self.stage.states if name.startswith(below)]
        found = {name: declared(self.around.graph.states[name]) for name in names}
        self.words |= {place.head for place in found.values()}
        return {in_graph_module(name): place for name, place in found.items()}

    def _assignments(self, home: str) -> list[str]:
        return assignments(self._states(home), in_graph_module(home))


_RESERVED = (
    "Recomputed",
    "States",
    "Tensor",
    "ROWS",
    "DEVICE",
    "parameter",
    "buffer",
    *WORDS.values(),
)


def _positions(block: Block) -> range:
    return range(block.first, block.stop)


def _placeholders(code: fx.Graph) -> list[fx.Node]:
    return list(code.find_nodes(op="placeholder"))


def _arguments(wishes: Iterable[str]) -> tuple[list[str], Names]:
    """The names of arguments, and what is free beside them."""
    names = Names(_RESERVED)
    return [names.new(wish) for wish in wishes], names


def _name_of(ref: Ref, body: Body) -> str:
    return body.name(ref.node) + (f"_{ref.output}" if ref.output else "")


def _wish(given: Expression) -> str:
    """A name for an argument, derived from the expression that is passed for it."""
    while isinstance(given, Call):
        given = given.items[0]
    return given.removeprefix("self.")


def _common(wishes: Sequence[str]) -> str:
    return wishes[0] if len(set(wishes)) == 1 else "x"


def _common_spec(specs: Sequence[str]) -> str:
    """The spec of the same value in several blocks; in mixed precision its dtype may differ."""
    return specs[0] if len(set(specs)) == 1 else "[" + specs[0].partition("[")[2]


def _listed(paths: Sequence[str]) -> list[str]:
    """The beginning of the docstring of a class of blocks."""
    few, more = ", ".join(paths[:3]), len(paths) - 3
    word = "Module" if len(paths) == 1 else "Modules"
    return [f'    """{word} {few}{f" and {more} more" * (more > 0)} of the model.', ""]


def _signature(arguments: Sequence[str], gives: str) -> list[str]:
    items = ("self", *(f"{name}: Tensor" for name in arguments))
    return lay_out(Call("def forward", items), 4, after=f" -> {gives}:")
