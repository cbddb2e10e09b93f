"""From a graph to the planner's `Problem`: units between cuts, their seconds, bytes and crossings.

    Costing --timed-----> Problem of seconds alone
            --profiled--> Problem with bytes

Seconds follow from formulas (`ir.op_costs`). Bytes saved for backward are observed in runs without
memory (`planners.saved.saved_tensors`). Of equal repeated blocks only a few are run and costed
(`ir.repeats`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autopipe.cluster.cluster import Link
from autopipe.cluster.tp_groups import GroupKind
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.blocks import Block, owners
from autopipe.ir.cut_points import Units
from autopipe.ir.dataflow import Dataflow, obstacle
from autopipe.ir.graph import Graph, Ref
from autopipe.ir.repeats import Short, Uneven, shortened
from autopipe.planners.costs.asked_ops import within_asked, words_of
from autopipe.planners.costs.by_units import block_units, by_unit, of_block
from autopipe.planners.costs.fused_costs import fused
from autopipe.planners.costs.loss_bytes import passing_of
from autopipe.planners.costs.precision_of import computed_in
from autopipe.planners.costs.unit_bytes import crossings_of, largest, states
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.problem import Again, Constraints, Problem, Profile
from autopipe.planners.saved.block_levels import BlockLevels, Times, levels_of, may_run_again
from autopipe.planners.saved.saved_tensors import KeptBytes, Saving

Sending = Callable[[Graph, int, Link], Sequence[tuple[float, float]]]
"""From a graph, the rows of a micro-batch and a link to each node's seconds of communication,
forward and backward."""


Formulas = tuple[Sequence[op_costs.NodeCost], Sequence[torch.dtype]]
"""The costs of a graph's nodes, and what each computes in."""


AMPLE = 4
"""So many times what a model and a batch keep is room for any division of them: stages add
transfers, gradients in another dtype, a copy of what they sum."""


class Profiled(NamedTuple):
    """A problem with its bytes, and the names behind its numbers.

    Attributes:
        recomputable: the paths of the blocks that can be recomputed, in the problem's order.
        levels: for each of these blocks and each of its levels, the positions of the nodes that run
            again.
        repeats_equal: whether repeated blocks make tensors of equal shapes and dtypes.
    """

    problem: Problem
    recomputable: tuple[str, ...]
    levels: tuple[tuple[tuple[int, ...], ...], ...]
    repeats_equal: bool


class _Timing(NamedTuple):
    """A problem without bytes; the short graph's forward seconds, by rows and kind of device."""

    problem: Problem
    forward: dict[int, list[Times]]


@dataclass(frozen=True, kw_only=True)
class Costing:
    """The problem of splitting a graph over a machine, in two steps: seconds, and then bytes.

    Seconds are enough to bound the step of each config. Bytes take runs of the graph, so they are
    computed only for the degrees that these bounds leave in the search.

    Args:
        units: the stretches of nodes between cuts.
        kinds: the kinds of devices of the machine.
        batch: rows of the whole batch.
        rows: the micro-batch sizes to consider, ascending.
        optimizer_factor: bytes of optimizer state per byte of trainable parameter.
        window: receives posted ahead per boundary.
        precision: the dtype of matrix products.
        recompute: paths of the blocks that run again whole, and words for ops that run again in
            the others (`asked_ops`); None: the planner chooses.
        offload: paths of the blocks that offload; None: the planner chooses.
        zeros: the ZeRO stages to choose from.
        tp: the tensor-parallel degree whose first rank runs the graph.
        sending: gives the exchanges of the graph's nodes, or of a part of it, with other ranks.
        compiled: whether stages run compiled: memory-bound ops fused, the least bytes kept.
        forwards: how often a step runs each micro-batch forward.
        dividing: the tensors of which each tensor-parallel rank may send a part.
    """

    flow: Dataflow
    blocks: Sequence[Block]
    units: Units
    machine: Machine
    kinds: Sequence[GroupKind]
    batch: int
    rows: Sequence[int]
    optimizer_factor: float
    window: int
    constraints: Constraints
    precision: str = "fp32"
    recompute: Collection[str] | None = None
    offload: Collection[str] | None = None
    zeros: tuple[int, ...] = (0,)
    tp: int = 1
    sending: Sending | None = None
    compiled: bool = False
    forwards: int = 1
    dividing: Collection[Ref] = ()

    @cached_property
    def timed(self) -> Problem:
        """The problem with seconds only: no bytes are saved, and none cross cuts."""
        return self._timed.problem

    def profiled(self, *, check: bool = True) -> Profiled:
        """The whole problem.

        Args:
            check: whether to check that bytes are a straight line in the rows. It is enough to
                check one tensor-parallel degree: the others run parts of the same model.
        """
        flow, units = self.flow, self.units
        longer = islice(shortened(flow, self.blocks), 1, None)
        for short in chain([self._short], longer):
            equal = short is self._short
            with suppress(Uneven):
                timed, forward = self._timed if equal else self._timed_by(short)
                kept = self._kept(short, forward, check=check)
                break
        inside = self._segments(short)
        parameters, frozen, constants, _ = states(flow, units, kept.low)
        crossings = crossings_of(flow, units, kept.made_in, self.dividing)
        passing = passing_of(flow.graph, units, compiled=self.compiled)
        levels = levels_of(short, inside, kept.levels, self.rows[0], self._recomputable)
        if self._asked_ops:  # all of these ops, and no choice
            levels = [replace(ops, found=ops.found[-1:]) for ops in levels]
        problem = replace(
            timed,
            constraints=self._constraints(levels),
            parameters=parameters,
            constants=constants,
            frozen=frozen,
            offloads=bool(kept.levels) and self._called_once,
            profiles=tuple(
                replace(
                    profile,
                    saved=kept.saved[profile.rows],
                    made=kept.made.get(profile.rows, ()),
                    waiting=kept.waiting.get(profile.rows, ()),
                    passing=passing(profile.rows),
                    crossings=crossings(profile.rows),
                    levels=tuple(
                        ops.at(profile.rows, forward[profile.rows], units) for ops in levels
                    ),
                )
                for profile in timed.profiles
            ),
        )
        paths = tuple(block.path for block in self._recomputable)
        return Profiled(problem, paths, tuple(ops.nodes() for ops in levels), equal)

    def _kept(self, short: Short, forward: Mapping[int, list[Times]], *, check: bool) -> KeptBytes:
        """The bytes that the graph keeps, from runs of a short graph.

        Args:
            forward: the forward seconds of the short graph's nodes, by rows and kind of device.

        Raises:
            Uneven: the runs do not tell of the blocks that the short graph leaves out.
        """
        alone = within_asked(self.flow, self.blocks, self._asked_ops, self._block_numbers)
        may = may_run_again(self.flow, short, alone, forward[self.rows[0]][0])
        saving = Saving(
            flow=self.flow,
            short=short,
            precision=self.precision,
            check=check,
            segments=self._segments(short),
            compiled=self.compiled,
            seconds=may,
            ample=self._ample,
        )
        return saving.at(self.units, self.rows, np.array(self._block_numbers))

    def parts(self, rows: int, kind: int) -> NDArray[np.float64]:
        """The units' seconds of a micro-batch by cause, on a kind of device: shape (3, units).

        The three causes are those of `op_seconds.parts`; exchanges between ranks are not included.
        """
        starts = np.array(self.units.starts)
        formulas, dtypes = self._formulas(self._short)
        found = op_seconds.parts(formulas, rows, self.kinds[kind].device, dtypes)
        return np.asarray(np.add.reduceat(found[:, self._short.like], starts, axis=1))

    @cached_property
    def _short(self) -> Short:
        return next(shortened(self.flow, self.blocks))

    @cached_property
    def _timed(self) -> _Timing:
        return self._timed_by(self._short)

    @cached_property
    def _recomputable(self) -> list[Block]:
        """The blocks that may run again, and those that the user wants to offload."""
        asked = {*(self.recompute or ()), *(self.offload or ())}
        return [
            block
            for block in self.blocks
            if block.path in asked
            or obstacle(self.flow, range(block.first, block.stop), block.prefix) is None
        ]

    @property
    def _ample(self) -> float:
        """Saved bytes of the fewest rows up to which memory is out of question.

        The smallest device then holds, `AMPLE` times, the model's states and what a batch saves.
        """
        if self._asked_ops or self.offload:
            return 0.0
        model = sum(int(state.spec.bytes) for state in self.flow.graph.states.values())
        held = (3 + self.optimizer_factor) * model
        return (min(self.machine.memory) / AMPLE - held) * self.rows[0] / self.batch

    @property
    def _called_once(self) -> bool:
        """Whether no two blocks are calls of one module, whose tensors are not told apart."""
        return len({block.module for block in self.blocks}) == len(self.blocks)

    @cached_property
    def _asked_ops(self) -> frozenset[str]:
        return words_of(self.recompute, self.blocks)

    def _constraints(self, levels: Sequence[BlockLevels]) -> Constraints:
        """The constraints with the blocks and ops that are asked to run again (ops only if that
        saves bytes) and the blocks that are asked to offload, whose ops do not run again.

        Args:
            levels: the levels of each block; empty: not known yet.
        """
        asked = self.constraints
        paths = [block.path for block in self._recomputable]
        away = [n for n, path in enumerate(paths) if path in (self.offload or ())]
        if self.offload is not None:
            asked = replace(asked, offload=tuple(away))
        if self.recompute is None:
            return asked
        whole = {n: Again(n) for n, path in enumerate(paths) if path in self.recompute}
        parts = {n: Again(n, 0) for n, own in enumerate(levels) if self._asked_ops and own.found}
        again = {n: each for n, each in {**parts, **whole}.items() if n not in away}
        return replace(asked, recompute=tuple(sorted(again.values())))

    def _segments(self, short: Short) -> list[str | None]:
        """The path of the block of each node of a short graph."""
        owner = owners(self.blocks, 0, len(self.flow.graph.nodes))
        return [owner[p].path if p in owner else None for p in short.kept]

    @property
    def _block_numbers(self) -> list[int]:
        """For each node the number of the block with which it may run again, or -1."""
        numbers = [-1] * len(self.flow.graph.nodes)
        for number, block in enumerate(self._recomputable):
            numbers[block.first : block.stop] = [number] * (block.stop - block.first)
        return numbers

    def _timed_by(self, short: Short) -> _Timing:
        """The problem, from the seconds of a short graph."""
        flow, units = self.flow, self.units
        parameters, frozen, constants, copies = states(flow, units, ())
        costs = self._formulas(short)
        made = [self._profile(short, costs, size) for size in self.rows]
        problem = Problem(
            units=len(units.starts),
            blocks=tuple(block_units(units, self.blocks)),
            parameters=parameters,
            constants=constants,
            optimizer_factor=self.optimizer_factor,
            profiles=tuple(profile for profile, _ in made),
            batch=self.batch,
            machine=self.machine,
            window=self.window,
            constraints=self._constraints(()),
            recomputable=tuple(
                (units.of(block.first), units.of(block.stop - 1) + 1)
                for block in self._recomputable
            ),
            zeros=self.zeros,
            tp=self.tp,
            copies=copies,
            frozen=frozen,
            largest=largest(flow, units),
            low_gradients=any(state.gradient for state in flow.graph.states.values()),
        )
        return _Timing(problem, {profile.rows: forward for profile, forward in made})

    def _formulas(self, short: Short) -> Formulas:
        """The cost formulas of a short graph's nodes, and the dtype in which each computes."""
        formulas = op_costs.costs(short.graph)
        dtypes = computed_in(short.graph, formulas, self.precision)
        if self.compiled:
            formulas = fused(short.graph, formulas, self._segments(short))
        return formulas, dtypes

    def _profile(self, short: Short, costs: Formulas, rows: int) -> tuple[Profile, list[Times]]:
        """A profile without bytes, and by kind the forward seconds of the short graph's nodes."""
        starts, graph = np.array(self.units.starts), short.graph
        formulas, dtypes = costs
        exchanges: list[NDArray[np.float64]] = []
        times, alone = [], []
        for device, link in self.kinds:
            seconds = np.stack(op_seconds.seconds(formulas, rows, device, dtypes))
            if self.sending is not None and link is not None:
                exchanges.append(np.array(self.sending(graph, rows, link)).T)
                seconds = seconds + exchanges[-1]
            alone.append(seconds[0])
            times.append(seconds[:, short.like])
        profile = Profile(
            rows,
            tuple(by_unit(self.forwards * forward, starts) for forward, _ in times),
            tuple(by_unit(backward, starts) for _, backward in times),
            saved=(),
            crossings=(),
            recompute=tuple(
                tuple(of_block(forward, block, self.units) for forward, _ in times)
                for block in self._recomputable
            ),
            exchange=tuple(
                by_unit(exchange.sum(axis=0)[short.like], starts) for exchange in exchanges
            ),
        )
        return profile, alone
