"""Pipelines at random: a model of a few operations a stage, cut, placed and scheduled anyhow.

    at_random(random.Random(7))  ->  Case: who holds what, sends what to whom, computes what when

The stages are made by hand, not traced: thousands of them cost no more than their arithmetic.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.runtime.step.engine import AutogradEngine, Engine, JointEngine
from autopipe.schedules.instructions import Flow, Instruction, Kind, Programs
from autopipe.schedules.peak_memory import Sizes
from autopipe.schedules.transfers import Edge, insert
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.lower import Lowered
from autopipe.stages.step_programs import edges

PLAIN = Layout.dense((2, 4), torch.float64)
BYTES = 8 * 8
"""Every tensor has eight numbers; so few operations in 64 bits leave twelve places to trust."""

Y, VIEW = 0, 1
"""The two results that a stage may send; the `output` of a `Ref` is one of them."""


# The model: a few operations a stage, element by element, so that no layout changes a bit.


class Part(nn.Module):
    """A stage: x = r0 + r1 + ..., of which it sends y = tanh(x w), or x itself as a view, or both.

    Where one tensor comes in, the view is one of its receive buffer. The last stage's result is the
    loss, the sum of y squared.

    Args:
        takes: for each argument, which result of its stage it is.
        gives: which results it sends.
    """

    def __init__(self, takes: Sequence[int], gives: Sequence[int], last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 8, dtype=PLAIN.dtype).view(2, 4))
        self.takes = takes
        self.gives = gives
        self.last = last
        self.computes = last or Y in gives

    @property
    def kept(self) -> int:
        """Bytes kept for backward that nobody else owns: y for tanh, a sum x for the product."""
        return self.computes * (1 + (len(self.takes) > 1)) * BYTES

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        # A view in any case: in it the gradients of y and of x meet before they leave the stage,
        # as they would have to meet before they leave the rank.
        x, *others = (
            r.t() if which == VIEW else r.view(2, 4)
            for r, which in zip(arguments, self.takes, strict=True)
        )
        for other in others:
            x = x + other
        y = torch.tanh(x * self.weight) if self.computes else x
        results = tuple(y if which == Y else x.t() for which in self.gives)
        return (*results, y.square().sum()) if self.last else results


@cache
def joint(
    takes: tuple[int, ...], gives: tuple[int, ...], first: bool, last: bool, stage: int
) -> Engine:
    """A part traced for the joint engine; one for each look and stage does for all cases."""
    part = Part(takes, gives, last)
    seeds = [PLAIN] * len(gives) + [Layout.dense((), PLAIN.dtype)] * last
    arguments = [replace(PLAIN, gradient=not first)] * len(takes)
    return JointEngine(part, split(Lowered(None, part, 2), arguments, seeds))  # type: ignore[arg-type]


# Pipelines at random.


@dataclass(frozen=True)
class Case:
    """One pipeline: who holds what, computes what and runs when."""

    ranks: Sequence[int]
    stages: Sequence[Stage]
    boundaries: Mapping[Ref, CrossingTensor]
    engines: Sequence[Engine]
    micro_batches: int
    programs: Programs

    def part(self, stage: int) -> Part:
        module = self.engines[stage].module  # type: ignore[attr-defined]
        assert isinstance(module, Part)
        return module


def at_random(rng: random.Random) -> Case:
    """A pipeline of 1 to 4 ranks with 1 to 3 stages each, and 1 to 8 micro-batches, rather few."""
    counts = [rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
    ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(ranks)
    splits = [rng.random() < 0.5 for _ in ranks]
    traced = rng.random() < 0.25  # then split stages have the joint engine, and transfers are plain
    stages, boundaries = connections(len(ranks), rng, plain=traced)
    engines: list[Engine] = []
    for stage, halves in zip(stages, splits, strict=True):
        takes = tuple(ref.output for ref, _ in stage.receives) or (Y,)
        gives = tuple(ref.output for ref in stage.outgoing)
        last = stage is stages[-1]
        if traced and halves:
            engines.append(joint(takes, gives, not stage.receives, last, stage.index))
        else:
            engines.append(AutogradEngine(Part(takes, gives, last)))
    joined = edges(stages, boundaries)
    micro_batches = min(rng.randint(1, 8), rng.randint(1, 8))
    compute = order(joined, ranks, splits, micro_batches, rng)
    windows = [rng.randint(1, 4) for _ in stages[1:]]
    programs = insert(compute, joined, windows, sends_ahead=rng.randint(1, 3))
    return Case(ranks, stages, boundaries, engines, micro_batches, programs)


def connections(
    count: int, rng: random.Random, *, plain: bool
) -> tuple[list[Stage], dict[Ref, CrossingTensor]]:
    """Stages, nearly all of which feed the next one and some a later one; some feed none at all.

    With `plain`, all feed the next one, by y alone, and gradients come back.
    """
    receives: list[list[tuple[Ref, int]]] = [[] for _ in range(count)]
    boundaries: dict[Ref, CrossingTensor] = {}
    stages = []
    for source in range(count):
        reached = any(source in boundaries[ref].gradients for ref, _ in receives[source])
        sends = []
        for target in range(source + 1, count):
            neighbour = target == source + 1
            if rng.random() > (0.25, 0.9)[neighbour] and not (plain and neighbour):
                continue
            for which in (Y,) if plain else rng.choice([(Y,), (VIEW,), (Y, VIEW)]):
                ref = Ref(str(source), which)
                shape, strides, other = [((2, 4), (4, 1), (1, 2)), ((4, 2), (1, 4), (2, 1))][which]
                boundary = boundaries.setdefault(
                    ref, CrossingTensor(shape, strides, PLAIN.dtype, {})
                )
                if plain or (rng.random() < 0.8 and (which == Y or reached)):
                    back = {target: rng.choice([strides, other])}
                    boundaries[ref] = replace(boundary, gradients=boundary.gradients | back)  # type: ignore[operator]
                receives[target].append((ref, source))
                sends.append((ref, target))
        inputs = () if receives[source] else ("x",)
        here = tuple(receives[source])
        nodes = (source,)
        stages.append(
            Stage(source, source, source + 1, nodes, inputs, (), here, tuple(sends), frozenset())
        )
    return stages, boundaries


def order(
    joined: Sequence[Edge],
    ranks: Sequence[int],
    splits: Sequence[bool],
    micro_batches: int,
    rng: random.Random,
) -> Programs:
    """Compute in some order that the data allows; in half of all cases micro-batches go in turn."""
    in_turn = rng.random() < 0.5
    needs: dict[Instruction, set[Instruction]] = {}
    for k in range(micro_batches):
        forward = [Instruction(Kind.FORWARD, s, k) for s in range(len(ranks))]
        kinds = [Kind.BACKWARD_INPUT if halves else Kind.BACKWARD for halves in splits]
        backward = [Instruction(kind, s, k) for s, kind in enumerate(kinds)]
        for stage in range(len(ranks)):
            needs[forward[stage]] = set()
            needs[backward[stage]] = {forward[stage]}
            if splits[stage]:
                needs[Instruction(Kind.BACKWARD_WEIGHT, stage, k)] = {backward[stage]}
        for source, target, gradient in joined:
            needs[forward[target]].add(forward[source])
            # Outputs go before backward, so a stage that gets no gradient waits for its sends.
            needs[backward[source]].add(backward[target] if gradient else forward[target])
    waiting: dict[Instruction, list[Instruction]] = {i: [] for i in needs}
    for instruction, before in needs.items():
        if in_turn and instruction.microbatch > 0:
            before.add(instruction._replace(microbatch=instruction.microbatch - 1))
        for other in before:
            waiting[other].append(instruction)
    left = {instruction: len(before) for instruction, before in needs.items()}
    ready = [instruction for instruction, count in left.items() if count == 0]
    forwards_first = rng.random()
    programs: list[list[Instruction]] = [[] for _ in range(max(ranks) + 1)]
    while ready:
        forwards = [i for i in ready if i.kind is Kind.FORWARD]
        instruction = rng.choice(forwards if forwards and rng.random() < forwards_first else ready)
        ready.remove(instruction)
        programs[ranks[instruction.stage]].append(instruction)
        for other in waiting[instruction]:
            left[other] -= 1
            if left[other] == 0:
                ready.append(other)
    return tuple(map(tuple, programs))


def sizes(case: Case, stage: Stage) -> Sizes:
    """What a micro-batch weighs in a stage: each tensor the same."""
    arriving: dict[tuple[Flow, int], dict[Ref, int]] = {}
    leaving: dict[tuple[Flow, int], dict[Ref, int]] = {}
    for ref, source in stage.receives:
        arriving.setdefault((Flow.ACTIVATION, source), {})[ref] = BYTES
        if stage.index in case.boundaries[ref].gradients:
            leaving.setdefault((Flow.GRADIENT, source), {})[ref] = BYTES
    for ref, target in stage.sends:
        leaving.setdefault((Flow.ACTIVATION, target), {})[ref] = BYTES
        if target in case.boundaries[ref].gradients:
            arriving.setdefault((Flow.GRADIENT, target), {})[ref] = BYTES
    engine = case.engines[stage.index]
    if isinstance(engine, JointEngine):
        of = engine.joint
        return Sizes(of.kept, arriving, leaving, of.stash, of.fresh)
    return Sizes(case.part(stage.index).kept, arriving, leaving)


@cache
def batch(k: int) -> Tensor:
    """What a stage reads that receives nothing."""
    return torch.linspace(k - 4, 4, 8, dtype=PLAIN.dtype).view(2, 4)
