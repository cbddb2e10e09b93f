"""Bytes of units that do not depend on the schedule: states, the largest gradient, crossings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace

from autopipe.ir.cut_points import Units
from autopipe.ir.dataflow import Dataflow, gradient_values
from autopipe.ir.graph import Ref, State, TensorSpec, bytes_at
from autopipe.planners.model.problem import Crossing, Shared
from autopipe.planners.saved.saved_tensors import Made
from autopipe.stages.precision import copy_bytes


def states(
    flow: Dataflow, units: Units, lowered: Collection[str]
) -> tuple[tuple[Shared, ...], ...]:
    """Bytes of trainable parameters, of frozen ones, of other held states, and of masters' copies.

    Args:
        lowered: the parameters of which a step has copies; copies that autocast makes are held.
    """
    trainable, frozen, other, copies = (Counter[tuple[int, ...]]() for _ in range(4))
    for name, state in flow.graph.states.items():
        used = tuple(sorted({units.of(position) for position in flow.users[State(name)]}))
        kind = trainable if state.trainable else frozen if state.kind == "parameter" else other
        kind[used] += bytes_at(state.held, 1)
        if state.master is not None:
            copies[used] += copy_bytes(state)
        elif name in lowered:
            other[used] += copy_bytes(state)
    return tuple(
        tuple(Shared(size, used) for used, size in sizes.items())
        for sizes in (trainable, frozen, other, copies)
    )


def largest(flow: Dataflow, units: Units) -> tuple[int, ...]:
    """For each unit the bytes of the largest gradient that it makes."""
    found = [0] * len(units.starts)
    for name, state in flow.graph.states.items():
        for unit in {units.of(position) for position in flow.users[State(name)] if state.trainable}:
            found[unit] = max(found[unit], bytes_at(state.summed, 1))
    return tuple(found)


def crossings_of(
    flow: Dataflow, units: Units, made_in: Made, dividing: Collection[Ref]
) -> Callable[[int], tuple[Crossing, ...]]:
    """The tensors that leave the unit in which they are made, at a number of rows. Tensors with the
    same units at both ends count as one.

    Args:
        dividing: the tensors of which each tensor-parallel rank may send a part.
    """
    carrying = gradient_values(flow.graph)
    ways: dict[tuple[int, tuple[int, ...], bool, bool], Counter[TensorSpec]] = defaultdict(Counter)
    for value, users in flow.users.items():
        if not isinstance(value, Ref) or flow.local[flow.position(value)]:
            continue
        producer = units.of(flow.position(value))
        later = tuple(sorted({units.of(user) for user in users} - {producer}))
        if later:
            spec = replace(flow.graph.spec(value), dtype=made_in[value])
            ways[producer, later, value in carrying, value in dividing][spec] += 1

    def at(rows: int) -> tuple[Crossing, ...]:
        return tuple(
            Crossing(sum(bytes_at(spec, rows) * n for spec, n in specs.items()), *way)
            for way, specs in ways.items()
        )

    return at
