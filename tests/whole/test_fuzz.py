"""Whatever order can run, runs: pipelines at random, each from one number, and what holds of all.

    ranks, stages on each, micro-batches     1 to 4, 1 to 3, 1 to 8; any stage on any rank
    order of compute                         any that the data allows; with B, or with I and W
    who sends what to whom                   skips, one tensor or two, with gradient or without
    receives and sends under way             windows of 1 to 4 at each boundary, 1 to 3 sends
    how fast each rank is                    see `shuffled`

The real executor runs each over the in-process transport. One process that takes the micro-batches
in turn is the oracle. `python -m tests.whole.test_fuzz 1234` runs number 1234 alone.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from autopipe.errors import ScheduleError
from autopipe.ir.graph import Ref
from autopipe.runtime.comm.threads import LocalTransport, local_network
from autopipe.runtime.step.engine import JointEngine
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.stage import Pool, StageRun, StepInput
from autopipe.schedules import deadlock as proof
from autopipe.schedules.instructions import Instruction, Kind, Program, Programs
from autopipe.schedules.peak_memory import fullest_moment
from autopipe.schedules.transfers import insert
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.step_programs import edges
from tests.support.inprocess import Unsummed
from tests.support.long import sampled, share
from tests.support.pipelines import VIEW, Case, at_random, batch, sizes

CASES = 5000
BLOCK = 250
"""Cases of one test."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Running one.

_OTHER_END = {Kind.WAIT: Kind.SEND, Kind.FREE: Kind.POST}


def shuffled(programs: Programs, rng: random.Random) -> Program | None:
    """All ranks' instructions in one row, as they may happen to fall; None if all come to wait.

    Each rank keeps its own order, and no WAIT or FREE stands where it would have to wait. So one
    thread runs all ranks, fast ones and slow ones, and the same number gives the same row.
    """
    position = [0] * len(programs)
    row: list[Instruction] = []
    done: set[tuple[object, ...]] = set()
    stays = rng.random()  # how often the rank that runs goes on

    def ready(rank: int) -> bool:
        if position[rank] == len(programs[rank]):
            return False
        kind, stage, k, flow, peer = programs[rank][position[rank]]
        return kind not in _OTHER_END or (_OTHER_END[kind], peer, k, flow, stage) in done

    rank = 0
    for _ in range(sum(map(len, programs))):
        if not (ready(rank) and rng.random() < stays):
            able = list(filter(ready, range(len(programs))))
            if not able:
                return None
            rank = rng.choice(able)
        row.append(programs[rank][position[rank]])
        done.add(row[-1])
        position[rank] += 1
    return tuple(row)


class Counted(Pool):
    """Knows how many of its buffers are out."""

    out = 0

    def take(self, boundary: CrossingTensor) -> Tensor:
        self.out += 1
        return super().take(boundary)

    def give(self, boundary: CrossingTensor, buffer: Tensor) -> None:
        self.out -= 1
        super().give(boundary, buffer)


@dataclass(frozen=True)
class Rank:
    """What a rank of a case runs with."""

    runs: Sequence[StageRun]
    transport: LocalTransport
    pool: Counted
    meter: Meter


def ready(case: Case, timeout: float) -> list[Rank]:
    found = []
    for rank, transport in enumerate(local_network(case.ranks, timeout)):
        pool, meter, runs = Counted(torch.device("cpu")), Meter(), []
        for stage in case.stages:
            if case.ranks[stage.index] == rank:
                engine, owned = case.engines[stage.index], [case.part(stage.index).weight]
                run = StageRun(stage, case.boundaries, engine, transport, owned, pool)
                run.meter = meter
                runs.append(run)
        found.append(Rank(runs, transport, pool, meter))
    return found


def step(case: Case) -> StepInput:
    return StepInput(
        lambda stage, k: [batch(k)] if stage.inputs else [], 1 / case.micro_batches, (0, 0, 0)
    )


def in_one_row(case: Case, ranks: Sequence[Rank], row: Program) -> list[tuple[Tensor, ...]]:
    """Run all ranks with one executor."""
    whole = Executor([run for rank in ranks for run in rank.runs], row, Unsummed())
    return [*whole.run(step(case)).values()]


def in_threads(
    case: Case, ranks: Sequence[Rank], threads: ThreadPoolExecutor
) -> list[tuple[Tensor, ...]]:
    """Run each rank with an executor of its own, all at once."""

    def work(rank: Rank, program: Program) -> list[tuple[Tensor, ...]]:
        try:
            return [*Executor(rank.runs, program, Unsummed()).run(step(case)).values()]
        except BaseException as error:
            rank.transport.abort(error)
            raise

    return [loss for losses in threads.map(work, ranks, case.programs) for loss in losses]


# What must hold.


def one_process(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """The losses of all micro-batches, and the gradient of each stage; nothing is left of them."""
    losses = []
    for k in range(case.micro_batches):
        made: dict[Ref, Tensor] = {}
        for stage in case.stages:
            arguments = [
                made[ref] if stage.index in case.boundaries[ref].gradients else made[ref].detach()
                for ref, _ in stage.receives
            ]
            results = case.part(stage.index)(*(arguments or [batch(k)]))
            made |= zip(stage.outgoing, results, strict=False)
        losses.append(results[-1].detach())
        results[-1].backward(torch.full_like(results[-1], 1 / case.micro_batches))
    return losses, gradients(case)


def gradients(case: Case) -> list[Tensor]:
    """Take them from the parameters: zeros where no path leads from the loss."""
    found = []
    for stage in case.stages:
        weight = case.part(stage.index).weight
        found.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        weight.grad = None
    return found


def check(case: Case, ranks: Sequence[Rank], losses: Sequence[tuple[Tensor, ...]]) -> None:
    """Hold what a run has left behind to one process, and to the prediction."""
    found = gradients(case)
    expected_losses, expected = one_process(case)
    assert [loss for (loss,) in losses] == expected_losses
    for stage, gradient in enumerate(found):
        if adds_in_turn(case, stage):
            assert torch.equal(gradient, expected[stage]), f"gradient of stage {stage}"
        else:
            difference = (gradient - expected[stage]).abs().max()
            assert difference <= 1e-12 * expected[stage].abs().max(), f"gradient of stage {stage}"
    for number, (rank, program) in enumerate(zip(ranks, case.programs, strict=True)):
        rank.transport.close()
        for run in rank.runs:
            tables = run._posted, run._sending, run._arrived, run._outgoing, run._unsent
            assert not any((*tables, run._gradients)), f"stage {run.stage.index} holds something"
            engine = case.engines[run.stage.index]
            assert not (engine._flights if isinstance(engine, JointEngine) else engine._kept)  # type: ignore[attr-defined]
        free = [id(buffer) for buffers in rank.pool.free.values() for buffer in buffers]
        assert rank.pool.out == 0 and len(free) == len(set(free)), f"buffers of rank {number}"
        weighed = {run.stage.index: sizes(case, run.stage) for run in rank.runs}
        predicted = fullest_moment(program, weighed).held
        assert +rank.meter.at_peak == +predicted, f"memory of rank {number}"
        assert rank.meter.now.total() == 0, f"rank {number} still holds something"


def adds_in_turn(case: Case, stage: int) -> bool:
    """Whether the stage adds up its gradient in the order of one process."""
    adding = {Kind.BACKWARD, Kind.BACKWARD_INPUT}
    if isinstance(case.engines[stage], JointEngine):
        adding = {Kind.BACKWARD_WEIGHT}
    program = case.programs[case.ranks[stage]]
    taken = [i.microbatch for i in program if i.stage == stage and i.kind in adding]
    return taken == sorted(taken)


@contextmanager
def numbered(seed: int) -> Iterator[random.Random]:
    """The random numbers of a case; a failure inside says how to have it again."""
    try:
        yield random.Random(seed)
    except Exception as error:
        error.add_note(f"again, alone: python -m tests.whole.test_fuzz {seed}")
        raise


def play(seed: int, threads: ThreadPoolExecutor | None = None) -> None:
    """Run a case: in one row, or if there are threads with one for each rank."""
    with numbered(seed) as rng:
        case = at_random(rng)
        proof.check(case.programs)
        run(case, rng, threads)


def run(case: Case, rng: random.Random, threads: ThreadPoolExecutor | None = None) -> None:
    ranks = ready(case, timeout=30 if threads else 0)
    if threads:
        losses = in_threads(case, ranks, threads)
    else:
        row = shuffled(case.programs, rng)
        assert row is not None, "the proof finds no deadlock, and there is one"
        losses = in_one_row(case, ranks, row)
    check(case, ranks, losses)


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("first", range(0, CASES - BLOCK, BLOCK))
def test_whatever_can_run_is_right(first: int) -> None:
    """4750 cases; 100 by default."""
    for seed in sampled(range(first, first + BLOCK), of=10):
        play(seed)


def test_so_it_is_with_a_thread_for_each_rank() -> None:
    """The last of the cases: the ranks do run at once, and the machine decides who is fast.

    250 of them; 50 by default.
    """
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        for seed in sampled(range(CASES - BLOCK, CASES), of=5):
            play(seed, threads)


def test_the_cases_are_of_all_sorts() -> None:
    """A tenth of them at least is of each."""
    found: Counter[str] = Counter()
    for seed in range(BLOCK):
        with numbered(seed) as rng:
            case = at_random(rng)
        ranks, stages = case.ranks, case.stages
        sent = [(s.index, ref, target) for s in stages for ref, target in s.sends]
        in_turn = [adds_in_turn(case, stage.index) for stage in stages]
        found["skips"] += any(target > source + 1 for source, _, target in sent)
        found["no gradient"] += any(t not in case.boundaries[ref].gradients for _, ref, t in sent)
        found["within a rank"] += any(ranks[source] == ranks[t] for source, _, t in sent)
        found["in turn" if all(in_turn) else "not in turn"] += 1
        found["leads nowhere"] += any(not stage.sends for stage in stages[:-1])
        found["joint engine"] += any(isinstance(engine, JointEngine) for engine in case.engines)
        found["a receive buffer goes on"] += any(
            len(stage.receives) == 1 and any(ref.output == VIEW for ref, _ in stage.sends)
            for stage in stages
        )
    assert all(count > BLOCK / 10 for count in found.values()), found


def test_what_breaks_at_random_is_refused_or_still_right() -> None:
    """Two instructions change places. The proof lets pass what can run, and no more.

    It calls a deadlock what comes to a stop, whatever the ranks' speeds. The rules that it refuses
    by besides are stricter than need be: what they refuse is not run. 500 cases; 100 by default.
    """
    found: Counter[str] = Counter()
    for seed in sampled(range(2 * BLOCK), of=5):
        with numbered(seed) as rng:
            case = at_random(rng)
            broken = replace(case, programs=swapped(case, rng))
            try:
                proof.check(broken.programs)
            except ScheduleError as error:
                deadlock = error.message.startswith("deadlock: ")
                if deadlock:
                    assert shuffled(broken.programs, rng) is None, error.message
                found["deadlock" if deadlock else "rule"] += 1
            else:
                run(broken, rng)
                found["right"] += 1
    assert min(found[kind] for kind in ("deadlock", "rule", "right")) > share(BLOCK // 10, of=5)


def swapped(case: Case, rng: random.Random) -> Programs:
    """The case's programs with two near instructions of one swapped, at times of compute alone."""
    programs, compute_alone = case.programs, rng.random() < 0.5
    if compute_alone:
        others = (Kind.REDUCE, Kind.STEP)
        programs = tuple(
            tuple(i for i in program if i.flow is None and i.kind not in others)
            for program in programs
        )
    rank = rng.randrange(len(programs))
    program = list(programs[rank])
    one = rng.randrange(len(program))
    other = min(one + rng.randint(1, 12), len(program) - 1)
    program[one], program[other] = program[other], program[one]
    programs = (*programs[:rank], tuple(program), *programs[rank + 1 :])
    if compute_alone:
        return insert(programs, edges(case.stages, case.boundaries), [2] * (len(case.stages) - 1))
    return programs


if __name__ == "__main__":
    torch.set_num_threads(1)
    play(int(sys.argv[1]))
