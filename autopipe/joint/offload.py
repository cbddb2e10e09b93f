"""Find the tensors of a stage that wait for backward in host memory, and add calls to move them.

A *parcel* is the tensors that one block of a plan's `offload` makes in forward and keeps for
backward. It leaves when the block's forward is over, while the blocks after it compute, and comes
back one parcel ahead of the blocks that read it:

    forward     |  h.0  | send 0  |  h.1  | send 1, 0 has left  |  h.2  | settle: 1 has left
    backward    begin 1  |  h.2  | ready 1, begin 0  |  h.1  | let go 1, ready 0  |  h.0  | let go 0

So mostly at most two parcels are on the device at a time; `most_moving` counts their bytes.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx

from autopipe.joint.joint_graph import JointGraph, storages
from autopipe.stages import gathering
from autopipe.stages.gathering import Stay, events
from autopipe.stages.op_tape import MADE, SEGMENT

Parcel = list[fx.Node]
"""The values of one block that are moved together."""


class Offloader(Protocol):
    """The calls in a stage's code that move parcels; `sent` is the result of `send`."""

    def send(self, tensors: Sequence[Tensor]) -> Any:
        """Begin to copy a parcel's storages to the host, once the parcel before it has left."""

    def settle(self) -> None:
        """Return when all sent parcels have left the device."""

    def begin(self, sent: Any) -> None:
        """Begin to copy a parcel back."""

    def fetched(self, sent: Any) -> tuple[Tensor, ...]:
        """The parcel's tensors, as they were sent."""

    def let_go(self, sent: Any) -> None:
        """Nobody reads the parcel's tensors any longer."""


def send(offloader: Offloader, tensors: Sequence[Tensor]) -> Any:
    """`Offloader.send`, in code."""
    return offloader.send(tensors)


def settle(offloader: Offloader) -> None:
    """`Offloader.settle`, in code."""
    offloader.settle()


def begin(offloader: Offloader, sent: Any) -> None:
    """`Offloader.begin`, in code."""
    offloader.begin(sent)


def fetched(offloader: Offloader, sent: Any) -> tuple[Tensor, ...]:
    """`Offloader.fetched`, in code."""
    return offloader.fetched(sent)


def let_go(offloader: Offloader, sent: Any) -> None:
    """`Offloader.let_go`, in code."""
    offloader.let_go(sent)


CALLS = frozenset({send, settle, begin, fetched, let_go})
"""Functions in a stage's code that move tensors: no compiler may look inside."""


def parcels_of(
    graph: JointGraph, saved: Sequence[fx.Node], offload: Collection[str]
) -> list[Parcel]:
    """The values of forward that blocks offload, by block, in the order of the blocks.

    Args:
        saved: what backward reads.
        offload: paths of blocks.
    """
    inputs = *graph.states, *graph.arguments, *graph.copies
    results = *graph.results, *graph.of_arguments, *graph.of_parameters.values()
    stay = storages([*inputs, *(node for node in results if isinstance(node, fx.Node))])
    homes: dict[int, set[str | None]] = defaultdict(set)
    for call in graph.forward:
        for storage in storages([call, *call.all_input_nodes]):
            homes[storage].add(call.meta[SEGMENT])
    stay |= {
        storage for storage, blocks in homes.items() if len(blocks) > 1 or not blocks <= {*offload}
    }
    while True:  # a value stays if it shares a storage with one that stays
        going = [node for node in saved if storages([node]) and stay.isdisjoint(storages([node]))]
        sharing = storages(node for node in saved if node not in going) - stay
        if not sharing:
            break
        stay |= sharing
    by_block: dict[str | None, Parcel] = {}
    order = dict.fromkeys(call.meta[SEGMENT] for call in graph.forward)
    for node in going:
        storage = next(iter(storages([node])))
        block = next(iter(homes[storage]))
        by_block.setdefault(block, []).append(node)
    return [by_block[block] for block in order if block in by_block]


def parcel_bytes(parcel: Parcel) -> int:
    """Bytes of the storages of a parcel, each once."""
    return sum({s: n for node in parcel for s, n in node.meta[MADE].storages.items()}.values())


class Parcels(NamedTuple):
    """The places of a stage's parcels in the results of forward and the inputs of backward.

    Forward returns their values last; backward gets them after `kept` other values. For each parcel
    `sizes` is the number of its values, `bytes` the bytes of its storages.
    """

    kept: int
    sizes: tuple[int, ...]
    bytes: tuple[int, ...]

    def cut(self, nodes: Iterable[fx.Node]) -> list[Parcel]:
        """The nodes of all values, parcel by parcel."""
        left = iter(nodes)
        return [[next(left) for _ in range(size)] for size in self.sizes]


def most_moving(forward: fx.GraphModule, backward: fx.GraphModule, parcels: Parcels) -> int:
    """The most bytes of parcels that are on the device at once, on their way or back."""
    ends = _ends(forward, _returned(forward, parcels))
    leaving = [parcels.bytes[unit] for unit in sorted(range(len(ends)), key=ends.__getitem__)]
    most = max(map(sum, zip(leaving, [0, *leaving], strict=False)))
    now = 0
    for _, call, unit in events(_stays(backward, _values_given(backward, parcels))):
        if call is gathering.begin:
            now += parcels.bytes[unit]
        elif call is gathering.let_go:
            now -= parcels.bytes[unit]
        most = max(most, now)
    return most


def with_sends(module: fx.GraphModule, parcels: Parcels, offloader: Offloader) -> fx.GraphModule:
    """A forward that returns the results of `send` in the place of the parcels' values."""
    values, copying = _returned(module, parcels), _Copying(module, offloader)
    ends = _ends(module, values)
    sent: dict[int, fx.Node] = {}

    def before(part: int) -> None:
        for unit in (unit for unit, end in enumerate(ends) if end + 1 == part):
            tensors = tuple(copying.env[node] for node in values[unit])
            sent[unit] = copying.call(send, tensors)

    copying.run(before)
    copying.call(settle)
    results = copying.outputs[: len(copying.outputs) - sum(parcels.sizes)]
    return copying.finish((*results, *(sent[unit] for unit in range(len(values)))))


def with_fetches(module: fx.GraphModule, parcels: Parcels, offloader: Offloader) -> fx.GraphModule:
    """A backward that gets the results of `send` in the place of the parcels' values."""
    values, copying = _values_given(module, parcels), _Copying(module, offloader)
    calls: dict[int, list[tuple[Callable[..., Any], int]]] = defaultdict(list)
    for part, call, unit in events(_stays(module, values)):
        calls[part].append((call, unit))
    unit_of = {node: unit for unit, parcel in enumerate(values) for node in parcel}
    sent: dict[int, fx.Node] = {}

    def popped(node: fx.Node) -> None:
        """Copy a `pop` of the inputs' list; for all values of a parcel one, which gives `sent`."""
        unit = unit_of.get(node)
        if unit is None:
            copying.copy(node)
        elif unit not in sent:
            sent[unit] = copying.copy(node)

    def before(part: int) -> None:
        for call, unit in calls[part]:
            if call is gathering.begin:
                copying.call(begin, sent[unit])
            elif call is gathering.let_go:
                copying.call(let_go, sent[unit])
            else:
                tensors = copying.call(fetched, sent[unit])
                for number, node in enumerate(values[unit]):
                    value = copying.graph.call_function(operator.getitem, (tensors, number))
                    value.meta |= node.meta
                    copying.env[node] = value

    copying.run(before, popped)
    return copying.finish(copying.outputs)


OFFLOADER = "autopipe_offloader"
"""The name of the attribute of a stage's module that its code calls."""


class _Copying:
    """Copies a code node by node, with calls of an offloader between its parts."""

    def __init__(self, module: fx.GraphModule, offloader: Offloader) -> None:
        setattr(module, OFFLOADER, offloader)
        self._module = module
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self._offloader = self.graph.get_attr(OFFLOADER)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The copies of the values that the code returns, as far as they have been copied."""
        return tuple(
            self.env[value] if isinstance(value, fx.Node) else value
            for value in _outputs(self._module)
            if not isinstance(value, fx.Node) or value in self.env
        )

    def copy(self, node: fx.Node) -> fx.Node:
        """The copy of a node, whose inputs have been copied."""
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return self.env[node]

    def call(self, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        """Add a call of a function of the offloader."""
        return self.graph.call_function(function, (self._offloader, *arguments))

    def run(
        self,
        before: Callable[[int], None],
        popped: Callable[[fx.Node], None] | None = None,
    ) -> None:
        """Copy all but the output; `before` is called before each part, and after the last."""
        parts = _parts(self._module)
        starts = {part[0]: number for number, part in enumerate(parts)}
        for node in self._module.graph.nodes:
            if node in starts:
                before(starts[node])
            if node.op == "output":
                before(len(parts))
            elif popped is not None and _is_pop(node):
                popped(node)
            else:
                self.copy(node)

    def finish(self, outputs: Any) -> fx.GraphModule:
        """The module whose code is what has been copied, and returns `outputs`."""
        self.graph.output(outputs)
        return fx.GraphModule(self._module, self.graph, type(self._module).__name__)


def _is_pop(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "pop"


def _parts(module: fx.GraphModule) -> list[list[fx.Node]]:
    """Runs of consecutive nodes of one block, or of none, after the nodes that unpack inputs."""
    nodes = list(module.graph.nodes)
    given = max((number for number, node in enumerate(nodes) if _is_pop(node)), default=-1)
    computing = (n for n in nodes[given + 1 :] if n.op not in ("placeholder", "get_attr", "output"))
    return [[*part] for _, part in groupby(computing, lambda node: node.meta.get(SEGMENT))]


def _outputs(module: fx.GraphModule) -> Sequence[Any]:
    (output,) = module.graph.find_nodes(op="output")
    returned: Any = output.args[0]
    return tuple(returned)


def _returned(module: fx.GraphModule, parcels: Parcels) -> list[Parcel]:
    """The parcels' values among the results of a forward."""
    results = _outputs(module)
    return parcels.cut(results[len(results) - sum(parcels.sizes) :])


def _values_given(module: fx.GraphModule, parcels: Parcels) -> list[Parcel]:
    """The parcels' values in the list of a backward's inputs, which its code empties."""
    given = [node for node in module.graph.nodes if _is_pop(node)][::-1]
    return parcels.cut(given[parcels.kept :])


def _ends(module: fx.GraphModule, values: Sequence[Parcel]) -> list[int]:
    """For each parcel, the last part that makes or reads one of its values."""
    return [max(parts) for parts in _touching(module, values)]


def _stays(module: fx.GraphModule, values: Sequence[Parcel]) -> list[Stay]:
    """For each parcel, the first and the last part that read it; sorted."""
    found = enumerate(_touching(module, values))
    return sorted(Stay(min(parts), max(parts), unit) for unit, parts in found)


def _touching(module: fx.GraphModule, values: Sequence[Parcel]) -> list[list[int]]:
    """For each parcel, the numbers of the parts that make or read values in its storages."""
    found: list[list[int]] = [[] for _ in values]
    owner = {storage: unit for unit, parcel in enumerate(values) for storage in storages(parcel)}
    for number, part in enumerate(_parts(module)):
        near = [n for node in part for n in (node, *node.all_input_nodes) if MADE in n.meta]
        for unit in {owner[storage] for storage in storages(near) if storage in owner}:
            found[unit].append(number)
    return found
