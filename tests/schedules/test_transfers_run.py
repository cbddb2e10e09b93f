"""Whatever can run without transfers can run with them: every schedule, and orders at random."""

import random
from collections import defaultdict

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules import lanes, transfers
from autopipe.schedules.deadlock import check
from autopipe.schedules.generators import forward_only, gpipe, one_f_one_b
from autopipe.schedules.instructions import Instruction, Kind, holders, parse_programs
from autopipe.schedules.lanes import sends_under_way
from autopipe.schedules.registry import SCHEDULES, make
from autopipe.schedules.transfers import Edge, insert
from tests.support.edges import chain
from tests.support.long import sampled
from tests.support.operations import lines


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_bounds_hold_at_every_moment(ahead):
    """Counted instruction by instruction on a chain of five stages with a skip over all of it."""
    evaluation = forward_only(range(5), 12)
    for compute in gpipe(5, 12), one_f_one_b(5, 12), make("zb-h1", 5, 12), evaluation:
        edges = [*chain(5), Edge(0, 4, gradient=True)]
        for program in insert(compute, edges, [ahead] * 4):
            posted, sending = {}, {}
            for instruction in program:
                if instruction.flow is None:
                    continue
                channel = instruction.channel
                match instruction.kind:
                    case Kind.POST:
                        posted[channel] = posted.get(channel, 0) + 1
                    case Kind.WAIT:
                        posted[channel] -= 1
                    case Kind.SEND:
                        sending[channel] = sending.get(channel, 0) + 1
                    case Kind.FREE:
                        sending[channel] -= 1
                assert posted.get(channel, 0) <= ahead
                assert sending.get(channel, 0) <= sends_under_way(channel)
            assert not any(posted.values()) and not any(sending.values())


def some_edges(num_stages, rng):
    """A chain, and skip connections that are there or not, with gradient or not."""
    skips = [(i, j) for i in range(num_stages) for j in range(i + 2, num_stages)]
    return chain(num_stages) + [
        Edge(i, j, rng.random() < 0.7) for i, j in skips if rng.random() < 0.3
    ]


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("name", [*SCHEDULES, "evaluation"])
def test_every_schedule_runs_with_every_window_and_skip_connection(name):
    """With 1 to 10 micro-batches; with every third number by default."""
    rng = random.Random(name)
    for p in range(1, 7):
        for m in sampled(range(1, 11), of=3):
            if name == "interleaved":
                variants = [make(name, p, m, chunks=chunks) for chunks in (2, 3)]
            elif name == "eager-1f1b":
                depths = [[depth] * (p - 1) for depth in (0, 1, 3)]
                variants = [make(name, p, m, depths=each) for each in (*depths, range(p - 1))]
            elif name == "evaluation":
                ranks = range(p)
                variants = [forward_only([*ranks, *ranks], m)]
                variants += [forward_only([*ranks, *ranks[::-1]], m)]
            else:
                variants = [make(name, p, m, chunks=SCHEDULES[name].chunks)]
            for compute in variants:
                stages = len(holders(compute))
                for ahead in 1, 2, 4:
                    check(insert(compute, some_edges(stages, rng), [ahead] * (stages - 1)))
                windows = [rng.randint(1, 4) for _ in range(stages - 1)]
                check(insert(compute, some_edges(stages, rng), windows))


def at_random(edges, num_stages, num_ranks, m, rng):
    """Compute in some order that can run: stages anywhere, backwards whole or split."""
    ranks = [*range(num_ranks), *rng.choices(range(num_ranks), k=num_stages - num_ranks)]
    rng.shuffle(ranks)
    split = [rng.random() < 0.5 for _ in range(num_stages)]
    needs = {}
    for k in range(m):
        forward = [Instruction(Kind.FORWARD, stage, k) for stage in range(num_stages)]
        kinds = [Kind.BACKWARD_INPUT if halves else Kind.BACKWARD for halves in split]
        backward = [Instruction(kind, stage, k) for stage, kind in enumerate(kinds)]
        for stage in range(num_stages):
            needs[forward[stage]] = {forward[e.source] for e in edges if e.target == stage}
            needs[backward[stage]] = {forward[stage]} | {
                backward[e.target] if e.gradient else forward[e.target]
                for e in edges
                if e.source == stage
            }
            if split[stage]:
                needs[Instruction(Kind.BACKWARD_WEIGHT, stage, k)] = {backward[stage]}
    forwards_first = rng.random()
    programs = [[] for _ in range(num_ranks)]
    done = set()
    while len(done) < len(needs):
        ready = [i for i in needs if i not in done and needs[i] <= done]
        chosen = [i for i in ready if i.kind is Kind.FORWARD and rng.random() < forwards_first]
        instruction = rng.choice(chosen or ready)
        done.add(instruction)
        programs[ranks[instruction.stage]].append(instruction)
    return tuple(map(tuple, programs))


def test_every_order_runs_that_can():
    rng = random.Random(0)
    for _ in range(400):
        num_stages, m = rng.randint(1, 6), rng.randint(1, 6)
        edges = [edge for edge in some_edges(num_stages, rng) if rng.random() < 0.9]
        compute = at_random(edges, num_stages, rng.randint(1, num_stages), m, rng)
        check(insert(compute, edges, [rng.randint(1, 3) for _ in range(num_stages - 1)]))


def test_with_a_bound_that_does_not_know_the_schedule_stages_lock_each_other_up(monkeypatch):
    """Never more than two sends of a channel under way: ten stages waited for each other for good.

    Stage 0 would not send activation 8 to stage 9 before activation 6 was received, nor stage 9
    gradient 2 before gradient 0 was.
    """
    arguments = one_f_one_b(10, 10), [*chain(10), Edge(0, 9, gradient=True)], [2] * 9
    check(insert(*arguments))
    monkeypatch.setattr(lanes, "sends_under_way", lambda channel, ahead: 2)
    check(insert(*arguments))
    monkeypatch.setattr(transfers, "_starts", lambda programs, edges: defaultdict(list))
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0FREE_F"):
        check(insert(*arguments))


def test_compute_that_cannot_run_is_for_the_proof_to_refuse():
    programs = parse_programs("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1")
    with pytest.raises(ScheduleError, match="deadlock: rank 0 waits at 0WAIT_B0<1"):
        check(insert(programs, chain(2), [2]))


@pytest.mark.parametrize(("stages", "micro_batches"), [(16, 32), (16, 128), (32, 64)])
def test_an_instruction_is_prepared_in_the_same_time_in_any_step(stages, micro_batches):
    """15 lines of Python for each; a quadratic pass would take more the longer the step is."""
    compute, edges, windows = one_f_one_b(stages, micro_batches), chain(stages), [2] * (stages - 1)
    made = sum(map(len, insert(compute, edges, windows)))
    assert lines(lambda: insert(compute, edges, windows)) < 20 * made
