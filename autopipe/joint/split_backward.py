"""Split a stage's backward into two halves: for its inputs (I) and for its weights (W).

A linear layer y = x w' + b and what becomes of it:

    joint graph                         forward(x)              backward_input([dy])
      t  = w.t()                          t = w.t()               t = w.t()
      y  = addmm(b, x, t)                 y = addmm(b, x, t)      dx = mm(dy, t.t())
    --- backward ---                      return y, x             return dx, dy
      dx = mm(dy, t.t())      input
      dw = mm(dy.t(), x)      weight                            backward_weight([x, dy])
      db = sum(dy, 0)         weight                              return mm(dy.t(), x), sum(dy, 0)

*Input* is what the arguments' gradients need, *weight* the rest. Forward saves what either half
reads, and what only the first one reads goes with it. Nothing is computed twice, unless the least
bytes are wanted (`joint.run_again`). A backward that is wanted in one piece is all in the first.

A stage whose arguments need no gradient, as the first of a pipeline, does all of its backward in
the second half and nothing in the first; one without parameters the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from torch import fx

from autopipe.joint.fullest_call import Half
from autopipe.joint.graph_writer import GraphWriter
from autopipe.joint.halves import halves, leading_to
from autopipe.joint.joint_graph import (
    JointGraph,
    Layout,
    bytes_of,
    differentiate,
    is_of_state,
    one_of_each,
    storages,
)
from autopipe.joint.offload import (
    Offloader,
    Parcel,
    Parcels,
    most_moving,
    parcel_bytes,
    parcels_of,
    with_fetches,
    with_sends,
)
from autopipe.joint.run_again import chosen, run_again
from autopipe.joint.wanted import HALVES, Wanted
from autopipe.stages.lower import Lowered
from autopipe.stages.op_tape import ASKED, MADE


@dataclass(frozen=True)
class Joint:
    """A stage's forward and two backward graphs, and the tensors passed between them.

        forward(*arguments)                  -> (*results, *saved)
        backward_input([*saved, *seeds])     -> (*gradients of the arguments, *stash)
        backward_weight([*saved, *stash])    -> gradients of `parameters`

    A backward in one piece is all in the first of the two:

        backward_input([*saved, *seeds])     -> (*gradients of the arguments, *of `parameters`)

    The two backward graphs empty the list they are given, so that each tensor goes with its last
    use. States are attributes under the stage's own names. The graphs are for `torch.no_grad()`.

    Attributes:
        arguments: the layouts that the graphs were traced for.
        results: how many of forward's outputs are the stage's results.
        seeds: the layouts of the gradients that backward starts from, by the position of the
            result.
        unseeded: the positions of results that need a gradient and never get one.
        to_input, to_weight: the positions in `saved` of the tensors that each half takes.
        parameters: the names of parameters with a gradient, in the order of their gradients.
        counted, counted_weight: positions in `saved` of one tensor for each storage that nobody
            else owns (states and arguments do); of all, and of those for the second half.
        counted_stash: such positions in `stash`, without saved storages and seeds.
        kept: bytes held from forward on.
        stash: bytes held from the first half of backward to the second.
        fresh: of the stash, what the first half has made; the rest was kept from forward.
        made: the most bytes, in either half, of what it makes beyond those of what it has let go
            of by then (`joint.fullest_call`), but for the gradients that it returns. Only of what
            runs again if the graphs are not to be compiled.
        moving: the most bytes that are there at once on their way to the host, or back.
        parcels: what waits in the host's memory (`joint.offload`). Its values come last in `saved`,
            and after those of `to_input` for backward; they are not in `kept`.
    """

    forward: fx.GraphModule
    backward_input: fx.GraphModule
    backward_weight: fx.GraphModule | None
    arguments: tuple[Layout, ...]
    results: int
    seeds: Mapping[int, Layout]
    unseeded: tuple[int, ...]
    to_input: tuple[int, ...]
    to_weight: tuple[int, ...]
    parameters: tuple[str, ...]
    counted: tuple[int, ...]
    counted_weight: tuple[int, ...]
    counted_stash: tuple[int, ...]
    kept: int
    stash: int
    fresh: int
    made: int
    moving: int = 0
    parcels: Parcels | None = None

    def moved_by(self, offloader: Offloader) -> Joint:
        """A copy whose graphs move its parcels to the host and back.

        Its forward returns, and its backward takes, what was sent in place of the values.
        """
        assert self.parcels is not None
        return replace(
            self,
            forward=with_sends(self.forward, self.parcels, offloader),
            backward_input=with_fetches(self.backward_input, self.parcels, offloader),
        )

    def mapped(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> Joint:
        """A copy with `change` applied to each of its graphs."""
        weight = self.backward_weight
        return replace(
            self,
            forward=change(self.forward),
            backward_input=change(self.backward_input),
            backward_weight=None if weight is None else change(weight),
        )


@dataclass(frozen=True)
class Held:
    """Bytes of one micro-batch, as `Joint` has them."""

    kept: int
    stash: int
    fresh: int
    made: int
    moving: int = 0


def split(
    lowered: Lowered,
    arguments: Sequence[Layout],
    seeds: Sequence[Layout | None],
    precision: str = "fp32",
    wanted: Wanted = HALVES,
) -> Joint:
    """Split the joint graph of a stage in three; for the arguments, see `differentiate`.

    Raises:
        CannotSplit: the stage has no joint graph, or its halves would be in each other's way.
    """
    division = divide(differentiate(lowered, arguments, seeds, precision), wanted)
    graph, saved, stash = division.graph, division.saved, division.stash
    write = GraphWriter(lowered.module, graph)
    parcels = division.in_code
    moved = [node for parcel in division.parcels for node in parcel]
    for_input = [*(saved[n] for n in division.to_input), *moved, *graph.seeds.values()]
    for_weight = [*(saved[n] for n in division.to_weight), *stash]
    weights = list(graph.of_parameters.values())
    also_returned = stash if wanted.halves else weights
    forward = write.forward([*saved, *moved])
    backward = write.backward(for_input, division.first, graph.of_arguments, also_returned)
    sizes = division.held
    return Joint(
        forward=forward,
        backward_input=backward,
        backward_weight=write.backward(for_weight, division.second, weights)
        if wanted.halves
        else None,
        arguments=tuple(arguments),
        results=len(graph.results),
        seeds={n: seed for n, seed in enumerate(seeds) if seed is not None and n in graph.seeds},
        unseeded=tuple(graph.unseeded),
        to_input=division.to_input,
        to_weight=division.to_weight,
        parameters=tuple(graph.of_parameters),
        counted=division.counted,
        counted_weight=division.counted_weight,
        counted_stash=division.counted_stash,
        kept=sizes.kept,
        stash=sizes.stash,
        fresh=sizes.fresh,
        made=sizes.made,
        moving=most_moving(forward, backward, parcels) if parcels is not None else 0,
        parcels=parcels,
    )


def held(
    lowered: Lowered,
    arguments: Sequence[Layout],
    seeds: Sequence[Layout | None],
    precision: str = "fp32",
    wanted: Wanted = HALVES,
) -> Held:
    """The bytes that `split` would hold; it writes the graphs only if blocks offload.

    Raises:
        CannotSplit: as `split`.
    """
    if wanted.offload:
        joint = split(lowered, arguments, seeds, precision, wanted)
        return Held(joint.kept, joint.stash, joint.fresh, joint.made, joint.moving)
    return divide(differentiate(lowered, arguments, seeds, precision), wanted).held


@dataclass(frozen=True)
class Division:
    """A joint graph's nodes divided as in `Joint`; `first` and `second` are the halves' calls.

    The values of `parcels` wait in the host's memory, and are not in `saved`.
    """

    graph: JointGraph
    first: Sequence[fx.Node]
    second: Sequence[fx.Node]
    saved: Sequence[fx.Node]
    to_input: tuple[int, ...]
    to_weight: tuple[int, ...]
    stash: Sequence[fx.Node]
    counted: tuple[int, ...]
    counted_weight: tuple[int, ...]
    counted_stash: tuple[int, ...]
    parcels: Sequence[Parcel] = ()
    compiled: bool = False

    @property
    def in_code(self) -> Parcels | None:
        """How the parcels stand in the code of both graphs, if there are any."""
        if not self.parcels:
            return None
        sizes, bytes = tuple(map(len, self.parcels)), tuple(map(parcel_bytes, self.parcels))
        return Parcels(len(self.to_input), sizes, bytes)

    @property
    def held(self) -> Held:
        """The bytes of the counted tensors; not of those on their way."""
        fresh = bytes_of(self.stash[n] for n in self.counted_stash)
        kept = bytes_of(self.kept)
        for_weight = bytes_of(self.saved[n] for n in self.counted_weight)
        first, second = self.halves
        more = first.most() + for_weight - (kept + fresh), second.most() - (for_weight + fresh)
        return Held(kept, for_weight + fresh, fresh, max(0, *more))

    @property
    def kept(self) -> list[fx.Node]:
        """One value for each storage that forward keeps."""
        return [self.saved[n] for n in self.counted]

    @cached_property
    def halves(self) -> tuple[Half, Half]:
        """The two halves, each with the bytes that it frees.

        If they are not compiled, their made bytes count as in autograd, which is not looked at call
        by call: ops that run again, here; the largest gradient, in `planners.costs.stage_memory`.
        """
        how = self.compiled, not self.compiled
        graph = self.graph
        states = [*graph.states, *graph.copies, *graph.arguments, *graph.seeds.values()]
        returned = [node for node in graph.of_arguments if node is not None]
        sent = [node for parcel in self.parcels for node in parcel]
        others = storages([*states, *returned, *sent])
        away = storages(graph.of_parameters.values())
        stash = _sizes(self.stash[n] for n in self.counted_stash)
        for_weight = _sizes(self.saved[n] for n in self.counted_weight)
        kept = {s: n for s, n in _sizes(self.kept).items() if s not in for_weight}
        first = Half(self.first, kept, others | for_weight.keys(), away, stash, *how)
        return first, Half(self.second, for_weight | stash, others, away, (), *how)


def _sizes(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Bytes of the storages of nodes."""
    return {s: size for node in nodes for s, size in node.meta[MADE].storages.items()}


def divide(graph: JointGraph, wanted: Wanted) -> Division:
    """Divide a joint graph's nodes between forward and the halves."""
    assert not (wanted.halves and wanted.offload), "refused where it is asked for"
    weights = list(graph.of_parameters.values())
    if wanted.halves:
        first, second = halves(graph)
        first_out, second_out = list(graph.of_arguments), weights
    else:
        first, first_out = _in_one_piece(graph)
        second, second_out = [], []
    if wanted.least or any(ASKED in call.meta for call in graph.forward):
        needed = [*_inputs_of(graph, first, first_out), *_inputs_of(graph, second, second_out)]
        again = chosen(graph, needed, least=wanted.least)
        keys = count(-1, -1)  # those of storages are addresses
        first, second = (
            run_again(calls, out, again, keys)
            for calls, out in ((first, first_out), (second, second_out))
        )
    for_input = _inputs_of(graph, first, first_out)
    for_weight = _inputs_of(graph, second, second_out)
    read_in_backward = {*for_input, *for_weight}
    saved = [node for node in (*graph.arguments, *graph.forward) if node in read_in_backward]
    parcels = parcels_of(graph, saved, wanted.offload) if wanted.offload else []
    moved = {node for parcel in parcels for node in parcel}
    saved = [node for node in saved if node not in moved]
    to_weight = [n for n, node in enumerate(saved) if node in for_weight]
    saved_for_weight = [saved[n] for n in to_weight]
    stash = [node for node in for_weight if node not in saved_for_weight]
    owned = storages([*graph.states, *graph.arguments])
    others = owned | storages([*graph.seeds.values(), *saved_for_weight])
    return Division(
        graph=graph,
        first=first,
        second=second,
        saved=saved,
        to_input=tuple(n for n, node in enumerate(saved) if node in for_input),
        to_weight=tuple(to_weight),
        stash=stash,
        counted=tuple(one_of_each(saved, owned)),
        counted_weight=tuple(to_weight[n] for n in one_of_each(saved_for_weight, owned)),
        counted_stash=tuple(one_of_each(stash, others)),
        parcels=parcels,
        compiled=wanted.least,
    )


def _in_one_piece(graph: JointGraph) -> tuple[list[fx.Node], list[fx.Node | None]]:
    """The useful calls of a backward in one piece, and what it returns."""
    outputs = [*graph.of_arguments, *graph.of_parameters.values()]
    useful = leading_to([node for node in outputs if node is not None], graph.backward)
    return [call for call in graph.backward if call in useful], outputs


def needed(graph: JointGraph) -> list[fx.Node]:
    """The values of forward that a backward in one piece reads."""
    return [*_inputs_of(graph, *_in_one_piece(graph))]


def _inputs_of(
    graph: JointGraph, calls: Sequence[fx.Node], outputs: Iterable[fx.Node | None]
) -> dict[fx.Node, None]:
    """The inputs of a half: values that its calls read, without those that it makes and states."""
    inside = set(calls)
    read = [node for call in calls for node in call.all_input_nodes]
    read += [node for node in outputs if node is not None]
    return dict.fromkeys(n for n in read if n not in inside and not is_of_state(graph, n))
