"""Add calls to a stage's code that gather parameters under ZeRO-3, and free them.

A *unit* is gathered at once: the parameters that the same parts of a stage read, such as those of a
block. In code that runs in one piece (a forward, or a half of a backward), a unit is whole from the
first part that reads it to the last one; meanwhile the next unit is on its way:

    unit 0    begin ready |embedding| let go
    unit 1          begin             ready |   h.0   | let go
    unit 2                                  begin       ready |   h.1   | let go

A *part* is a run of nodes of one block, or of none. An island is never divided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, fx

from autopipe.errors import PlanError
from autopipe.ir.dataflow import written_parameters
from autopipe.ir.graph import Graph
from autopipe.ir.torch_private import views
from autopipe.stages.op_tape import MADE, SEGMENT
from autopipe.stages.recompute import Recomputed

Unit = tuple[str, ...]
"""The names of parameters that are gathered together."""


class Gatherer(Protocol):
    """The calls in a stage's code, with the numbers of units."""

    def begin(self, unit: int) -> None:
        """Begin to gather; other work may be done meanwhile."""

    def ready(self, unit: int) -> None:
        """Return when the unit's parameters are whole."""

    def let_go(self, unit: int) -> None:
        """Free the memory of what was gathered."""


def begin(gathering: Gatherer, unit: int) -> None:
    """`Gatherer.begin`, in code."""
    gathering.begin(unit)


def ready(gathering: Gatherer, unit: int) -> None:
    """`Gatherer.ready`, in code."""
    gathering.ready(unit)


def let_go(gathering: Gatherer, unit: int) -> None:
    """`Gatherer.let_go`, in code."""
    gathering.let_go(unit)


CALLS = frozenset({begin, ready, let_go})
"""Functions in a stage's code that change which parameters have memory."""


class Stay(NamedTuple):
    """A unit is whole from one part of a code to another, both included."""

    first: int
    last: int
    unit: int


class GatherEvent(NamedTuple):
    """One of `CALLS`, of a unit, before the part of this number."""

    part: int
    call: Callable[[Gatherer, int], None]
    unit: int


def check_written(graph: Graph) -> None:
    """Refuse to gather a state that forward writes: it would write a copy that is freed.

    Raises:
        PlanError: names the user's line and the parameter.
    """
    for name, node in written_parameters(graph).items():
        raise PlanError(
            f"{node.place}: forward writes the parameter {name!r}, of which under ZeRO-3 each "
            "replica has some rows, and gathers the others where they are read",
            hint="ZeRO-2; or keep it in a buffer, which every replica has whole",
        )


def units_of(module: fx.GraphModule, parameters: Mapping[str, Tensor]) -> tuple[Unit, ...]:
    """The units of a stage: the parameters that the same parts read, in the order of the parts.

    Args:
        module: the stage, lowered for training.
        parameters: its own, by name.
    """
    together: dict[tuple[int, ...], list[str]] = defaultdict(list)
    read = _readers(module.graph, _memory(module, parameters))
    for name in parameters:
        together[tuple(sorted(read.get(name, ())))].append(name)
    return tuple(tuple(together[parts]) for parts in sorted(together))


def stays(
    module: fx.GraphModule, units: Sequence[Unit], parameters: Mapping[str, Tensor]
) -> list[Stay]:
    """For each unit that a code reads, from which part to which part it needs it; sorted."""
    return _stays(module.graph, units, _memory(module, parameters))


def _stays(graph: fx.Graph, units: Sequence[Unit], memory: _Memory) -> list[Stay]:
    read = _readers(graph, memory)
    found = []
    for number, unit in enumerate(units):
        parts = {part for name in unit for part in read.get(name, ())}
        if parts:
            found.append(Stay(min(parts), max(parts), number))
    return sorted(found)


def events(staying: Sequence[Stay]) -> list[GatherEvent]:
    """The calls before each part, in order; one unit is fetched ahead."""
    found = [GatherEvent(0, begin, staying[0].unit)] if staying else []
    for stay, after in zip_longest(staying, staying[1:]):
        found.append(GatherEvent(stay.first, ready, stay.unit))
        if after is not None:
            found.append(GatherEvent(stay.first, begin, after.unit))
    gone = [GatherEvent(stay.last + 1, let_go, stay.unit) for stay in staying]
    return sorted([*gone, *found], key=lambda event: event.part)  # stable: first let go


def most_bytes(
    staying: Sequence[Stay], whole: Sequence[int], shares: Sequence[int], ranks: int
) -> int:
    """The most bytes that are gathered at once.

    Args:
        whole: for each unit the bytes of its parameters as they are read.
        shares: for each unit the bytes of the first rank's share, which is the largest.
        ranks: the number of ranks with a share; while a unit is on its way, a rank holds room for
            all shares, and its own share.
    """
    now = most = 0
    for _, call, unit in events(staying):
        arriving = (ranks + 1) * shares[unit]
        change: dict[object, int] = {begin: arriving, ready: whole[unit], let_go: -whole[unit]}
        now += change[call]
        most = max(most, now)
        now -= arriving if call is ready else 0
    return most


def with_gathers(
    module: fx.GraphModule,
    units: Sequence[Unit],
    parameters: Mapping[str, Tensor],
    gathering: Gatherer,
) -> fx.GraphModule:
    """A stage's code with the calls that make its parameters whole.

    Args:
        module: the code; its parameters are the tensors of `parameters` themselves.

    Returns:
        code that computes the same; results in a parameter's memory become copies.
    """
    calls: dict[int, list[GatherEvent]] = defaultdict(list)
    memory = _memory(module, parameters)
    staying = _stays(module.graph, units, memory)
    for event in events(staying):
        calls[event.part].append(event)
    if not calls:
        return module
    graph, env, copies = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    copied = _copied_before(module.graph, units, memory, staying)
    setattr(module, _GATHERING, gathering)
    stage = graph.get_attr(_GATHERING)

    def call(part: int) -> None:
        for given in copied[part]:
            copies[given] = graph.call_function(torch.ops.aten.clone.default, (env[given],))
        for event in calls[part]:
            graph.call_function(event.call, (stage, event.unit))

    parts = list(_parts(module.graph))
    starts = {part[0]: number for number, part in enumerate(parts)}
    for node in module.graph.nodes:
        if node in starts:
            call(starts[node])
        if node.op == "output":
            call(len(parts))
            env |= copies
        env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(module, graph, type(module).__name__)


def _copied_before(
    graph: fx.Graph, units: Sequence[Unit], memory: _Memory, staying: Sequence[Stay]
) -> Mapping[int, list[fx.Node]]:
    """The results in parameters' memory, by the part before which each is copied: the first one
    without a unit that it may lie in. Whoever writes into a result has done so by then."""
    last = {name: stay.last for stay in staying for name in units[stay.unit]}
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for given in graph.output_node().all_input_nodes:
        if memory.owners[given]:
            found[1 + min(last[name] for name in memory.owners[given])].append(given)
    return found


_GATHERING = "autopipe_gathering"


def _parts(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The nodes of each part that compute."""
    computing = (n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output"))
    for _, part in groupby(computing, _block_of):
        yield list(part)


def _block_of(node: fx.Node) -> object:
    """The block of a node; None: it is in none."""
    return node.target if node.op == "call_module" else node.meta.get(SEGMENT)


def _readers(graph: fx.Graph, memory: _Memory) -> dict[str, set[int]]:
    """The numbers of the parts that read each parameter. One that is a result is read last."""
    found: dict[str, set[int]] = defaultdict(set)
    number = 0
    for number, part in enumerate(_parts(graph)):
        for name in _union(memory.reads[node] for node in part):
            found[name].add(number)
    for given in graph.output_node().all_input_nodes:
        for name in memory.owners[given] if given.op == "get_attr" else ():
            found[name].add(number)
    return found


_Names = frozenset[str]


class _Memory(NamedTuple):
    """The parameters in whose memory something may lie.

    Attributes:
        reads: for each node, those of its inputs.
        owners: for each node, those of its result.
        results: those of the code's results.
    """

    reads: dict[fx.Node, _Names]
    owners: dict[fx.Node, _Names]
    results: _Names


def _memory(module: fx.GraphModule, parameters: Mapping[str, Tensor]) -> _Memory:
    names = {id(tensor): name for name, tensor in parameters.items()}
    reads: dict[fx.Node, _Names] = {}
    owners: dict[fx.Node, _Names] = {}
    stored: dict[int, _Names] = {}  # names of the parameters in each storage of a trace
    results: _Names = frozenset()
    for node in module.graph.nodes:
        inputs = _union(owners[argument] for argument in node.all_input_nodes)
        reads[node], owners[node] = inputs, frozenset()
        if node.op == "get_attr":
            owner = names.get(id(attrgetter(str(node.target))(module)))
            owners[node] = frozenset() if owner is None else frozenset({owner})
        elif node.op == "call_module":
            submodule = module.get_submodule(str(node.target))
            inner = submodule.block if isinstance(submodule, Recomputed) else submodule
            within = _memory(cast(fx.GraphModule, inner), parameters)
            reads[node] = inputs.union(*within.reads.values())
            owners[node] = inputs | within.results
        elif node.op == "output":
            results = inputs
        elif MADE in node.meta and isinstance(node.target, _OP):
            owners[node] = _union(stored.get(key, frozenset()) for key in node.meta[MADE].storages)
        elif inputs and not _makes_memory(node):
            owners[node] = inputs
        if MADE in node.meta:
            stored |= dict.fromkeys(node.meta[MADE].storages, owners[node])
    return _Memory(reads, owners, results)


_OP = type(torch.ops.aten.clone.default)

_OWN_MEMORY = frozenset(
    "linear matmul mm addmm bmm baddbmm einsum embedding conv1d conv2d conv3d convolution "
    "layer_norm rms_norm group_norm batch_norm native_layer_norm softmax log_softmax "
    "scaled_dot_product_attention cross_entropy_loss mean sum cat stack clone _to_copy".split()
)
"""Ops of aten, beside pointwise ones, whose results lie in memory of their own. Of others it is not
certain: a dropout hands its argument back in an evaluation, and its schema does not say so."""


def _makes_memory(node: fx.Node) -> bool:
    """Whether a node's result surely lies in memory of its own."""
    op = next((value for value in (node.target, *node.args) if isinstance(value, _OP)), None)
    if op is None or views(op):
        return False
    return torch.Tag.pointwise in op.tags or op.overloadpacket.__name__ in _OWN_MEMORY


def _union(sets: Iterable[_Names]) -> _Names:
    return reduce(frozenset.union, sets, frozenset())
