"""The walk against the same graph written down edge by edge: how far it comes, and when."""

import random
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.deadlock import check
from autopipe.schedules.instructions import Channel, Kind, format_programs, holders
from autopipe.schedules.registry import make
from autopipe.schedules.simulate import Costs, LinkTime, simulate
from autopipe.schedules.transfers import Edge, insert
from tests.support.long import share

NAMES = ["naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v"]


def random_programs(rng):
    """Any schedule with its transfers: random skip connections, with gradients or not, windows."""
    name, ranks = rng.choice(NAMES), rng.randint(1, 4)
    chunks = {"interleaved": 2, "zb-v": 2}.get(name, 1)
    depths = [rng.randint(0, 2) for _ in range(ranks - 1)] if name == "eager-1f1b" else ()
    compute = make(name, ranks, rng.randint(1, 5), chunks=chunks, depths=depths)
    stages = ranks * chunks
    edges = [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]
    for i in range(stages):
        for j in range(i + 2, stages):
            if rng.random() < 0.3:
                edges.append(Edge(i, j, gradient=rng.random() < 0.7))
    return insert(compute, edges, [rng.randint(1, 3) for _ in range(stages - 1)])


def random_costs(rng, stages):
    links = defaultdict(lambda: LinkTime(rng.uniform(0, 2), 1.0, rng.uniform(0, 2)))
    seconds = [[rng.uniform(0.5, 2) for _ in range(stages)] for _ in range(5)]
    return Costs(*seconds, links=links.__getitem__)


def moved(programs, rng):
    """The same instructions, some of them in another place of their rank's program."""
    broken = [list(program) for program in programs]
    for _ in range(rng.randint(1, 3)):
        program = rng.choice(broken)
        instruction = program.pop(rng.randrange(len(program)))
        program.insert(rng.randrange(len(program) + 1), instruction)
    return tuple(map(tuple, broken))


def pair_of_ranks(programs):
    """The lane of a channel if the two directions between two ranks share one."""
    holder = holders(programs)
    return lambda channel: frozenset((holder[channel.source], holder[channel.target]))


class Transfer(NamedTuple):
    channel: Channel
    microbatch: int


def written_down(programs, lanes=None):
    """The predecessors of every event, an instruction's end or a transfer.

    Transfers of one channel follow each other as they are sent; on shared lanes, as each of the two
    ranks issues them.
    """
    holder = holders(programs)
    before = {}
    for program in programs:
        previous, last = None, {}
        for instruction in program:
            before.setdefault(instruction, set()).update([previous] if previous else [])
            previous = instruction
            if instruction.flow is None:
                continue
            transfer = Transfer(instruction.channel, instruction.microbatch)
            if instruction.kind in (Kind.WAIT, Kind.FREE):
                before[instruction].add(transfer)
                continue
            source, target, _ = transfer.channel
            shared = lanes and holder[source] != holder[target]
            lane = lanes(transfer.channel) if shared else (transfer.channel, instruction.kind)
            before.setdefault(transfer, set()).update([instruction, *last.get(lane, ())])
            last[lane] = [transfer]
    return before


def test_a_deadlock_is_a_cycle_of_the_graph_and_the_reverse():
    """Instructions are moved about at random; what the rules let pass goes to the oracle.

    Until there are 100 of each, by default 25.
    """
    rng = random.Random(1)
    seen = {True: 0, False: 0}
    while min(seen.values()) < share(100, of=4):
        programs = moved(random_programs(rng), rng)
        lanes = rng.choice([None, None, pair_of_ranks(programs)])
        try:
            check(programs, lanes)
            deadlock = False
        except ScheduleError as error:
            if not error.message.startswith("deadlock"):
                continue
            deadlock = True
        try:
            TopologicalSorter(written_down(programs, lanes)).prepare()
            cycle = False
        except CycleError:
            cycle = True
        assert cycle is deadlock, format_programs(programs)
        seen[deadlock] += 1


def longest_paths(programs, costs, wires):
    """When every event is over, and of transfers (ready, sent, arrived): the longest path to it.

    `wires` has the transfers of each wire in the order in which they take it.
    """
    holder, before = holders(programs), written_down(programs)
    for wire in wires.values():
        for one, other in pairwise(wire):
            before[other].add(one)
    seconds = {Kind.FORWARD: costs.forward, Kind.BACKWARD: costs.backward}
    seconds |= {
        Kind.BACKWARD_INPUT: costs.backward_input,
        Kind.BACKWARD_WEIGHT: costs.backward_weight,
    }
    summed = {
        last: one.stage for p in programs for one, last in pairwise(p) if one.kind is Kind.REDUCE
    }
    sums = defaultdict(float)
    over = {}
    for event in TopologicalSorter(before).static_order():
        transfers = [other for other in before[event] if isinstance(other, Transfer)]
        if isinstance(event, Transfer):
            stays = holder[event.channel.source] == holder[event.channel.target]
            link = LinkTime() if stays else costs.links(event.channel)
            issued = {other.kind: over[other] for other in before[event] - {*transfers}}
            ready = max(issued[Kind.SEND], issued[Kind.POST] + link.latency)
            sent = max([ready, *(over[other][1] for other in transfers)]) + link.carrying
            over[event] = ready, sent, sent + link.latency
            continue
        rank = holder[event.stage]
        time = max([0.0, *(over[other] for other in before[event] - {*transfers})])
        time += seconds[event.kind][event.stage] if event.kind in seconds else 0
        if event in summed:
            sums[rank] = max(sums[rank], time) + costs.reduce[summed[event]]
        if event.kind is Kind.STEP:
            time = max(time, sums[rank])
        moment = 1 if event.kind is Kind.FREE else 2
        over[event] = max([time, *(over[other][moment] for other in transfers)])
    return over


def test_every_time_is_the_longest_path_to_it():
    """Wires that several channels share are taken in the order in which transfers become ready."""
    rng = random.Random(2)
    shared = 0
    for _ in range(150):
        programs = random_programs(rng)
        holder = holders(programs)
        costs = random_costs(rng, len(holder))
        found = simulate(programs, costs)
        wires = defaultdict(list)
        for channel, k, *_ in sorted(found.transfers, key=lambda transfer: transfer.start):
            if holder[channel.source] != holder[channel.target]:
                wires[holder[channel.source], holder[channel.target]].append(Transfer(channel, k))
        oracle = longest_paths(found.programs, costs, wires)
        for program, ends in zip(found.programs, found.ends, strict=True):
            assert ends == pytest.approx([oracle[instruction] for instruction in program])
        for channel, k, _, *times in found.transfers:
            assert times == pytest.approx(oracle[Transfer(channel, k)][1:])
        for wire in wires.values():
            ready = [oracle[transfer][0] for transfer in wire]
            assert ready == pytest.approx(sorted(ready))
            shared += len({transfer.channel for transfer in wire}) > 1
    assert shared > 20
