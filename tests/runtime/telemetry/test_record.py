"""What is kept of a run, clocks that are brought together, and one file of several processes."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopipe.report.tracks import Track, bubbles
from autopipe.runtime.telemetry.record import Recorder, by_stage, difference, gather, offset, write
from autopipe.schedules.instructions import Kind, parse
from tests.support import record_worker, warm
from tests.support.inprocess import ROWS, cut, ready
from tests.support.inprocess import step as run_step
from tests.support.perfetto_reader import Reader, read
from tests.support.plans import example_plan
from tests.support.record_worker import LAST, RANKS
from tests.support.tracked import step
from tests.support.zoo import ZOO


def recorded(steps: int, last: int) -> Recorder:
    """Step k is F0 from k to k + 0.5."""
    recorder = Recorder(last)
    for number in range(steps):
        recorder.begin(number)
        recorder.record(parse("0F0"), number, number + 0.5)
    return recorder


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (0, []),
        (1, [0]),  # the first one allocates, but there is no other
        (2, [1]),
        (3, [1, 2]),
        (4, [1, 2, 3]),
        (9, [6, 7, 8]),
    ],
)
def test_the_last_steps_are_kept(steps: int, kept: list[int]) -> None:
    assert [found.number for found in recorded(steps, last=3).steps()] == kept


def test_times_are_moved_to_another_clock() -> None:
    assert recorded(2, last=3).steps(100.0) == (step(1, "0F0 101 101.5"),)


def test_a_step_that_did_not_run_is_no_step() -> None:
    recorder = recorded(3, last=3)
    recorder.begin(3)
    assert [found.number for found in recorder.steps()] == [1, 2]


@dataclass
class Network:
    """This clock, and another one `ahead` of it that answers after `delays`: seconds there, back.

    What they say is all that takes time.
    """

    ahead: float
    delays: Sequence[tuple[float, float]]
    now: float = 50.0
    asked: int = 0

    def clock(self) -> float:
        return self.now

    def ask(self) -> float:
        there, back = self.delays[self.asked % len(self.delays)]
        self.asked += 1
        theirs = self.now + there + self.ahead
        self.now += there + back
        return theirs


def test_an_even_way_there_and_back_gives_the_difference() -> None:
    network = Network(7200.0, [(0.25, 0.25)])
    assert difference(network.ask, network.clock) == 7200.0


@pytest.mark.parametrize(("there", "back"), [(0.5, 0.0), (0.0, 0.5), (0.125, 0.375)])
def test_an_uneven_way_is_off_by_at_most_half_of_it(there: float, back: float) -> None:
    network = Network(-60.0, [(there, back)])
    assert difference(network.ask, network.clock) == -60.0 + (there - back) / 2


def test_the_fastest_round_counts() -> None:
    """The second of four met no delay on either way."""
    network = Network(3.0, [(1.0, 0.0), (0.001, 0.001), (0.0, 4.0), (0.5, 0.5)])
    assert difference(network.ask, network.clock, rounds=4) == pytest.approx(3.0, abs=1e-12)
    assert network.asked == 4


def test_alone() -> None:
    assert offset(None) == 0.0
    assert gather(recorded(2, last=3), example_plan(), 0, None) == [
        Track(0, (step(1, "0F0 1 1.5"),))
    ]


def test_the_bubble_of_a_stage() -> None:
    """The median of its replicas; stages of one rank share that one's.

    rank 0: stages 0, 2   busy .5 of 4     rank 1: stage 1   busy 3 of 4     replica 0
    rank 2: stages 0, 2   busy 1 of 4      rank 3: stage 1   busy 4 of 4     replica 1
    """
    tracks = [
        Track(0, (step(0, "0F0 0 .25", "2F0 3.75 4"),)),
        Track(1, (step(0, "1F0 0 3", "1WAIT_F1<0 3 4"),)),
        Track(2, (step(0, "0F0 0 .5", "2F0 3.5 4"),), replica=1),
        Track(3, (step(0, "1F0 0 4"),), replica=1),
    ]
    assert bubbles(tracks) == (0.875, 0.25, 0.75, 0.0)
    assert by_stage(tracks) == (0.8125, 0.125, 0.8125)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_pipeline_that_ran(schedule: str) -> None:
    """Recorded where it runs: every instruction, and each SEND leads to its computation."""
    chunks = {"1f1b": 1, "zb-v": 2}[schedule]
    split = cut("gpt", 2 * chunks)
    programs = split.programs(schedule, 3, chunks=chunks)
    executors, _ = ready(split, programs)
    recorders = [Recorder() for _ in executors]
    for number in range(3):
        for executor, recorder in zip(executors, recorders, strict=True):
            recorder.begin(number)
            executor.record = recorder.record
        run_step(executors, split, ZOO["gpt"].inputs(3 * ROWS), 1 / 3)
    tracks = [Track(rank, recorder.steps()) for rank, recorder in enumerate(recorders)]
    for track, program in zip(tracks, programs, strict=True):
        assert [found.number for found in track.steps] == [1, 2]
        for found in track.steps:
            assert tuple(event.instruction for event in found.events) == program
    assert all(0 < bubble < 1 for bubble in bubbles(tracks))
    found_file = read(*tracks)
    sends = sum(i.kind is Kind.SEND for program in programs for i in program)
    assert len(found_file.under_way) == 2 * sends
    for source, target in found_file.arrows:
        send, use = parse(source.code), parse(target.code)
        assert (use.stage, use.microbatch) == (send.peer, send.microbatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three processes with clocks of their own have written; see `record_worker`."""
    folder = tmp_path_factory.mktemp("record")
    assert warm.spawn(RANKS, [record_worker.__file__, str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def trace(folder: Path) -> Reader:
    return Reader(gzip.decompress((folder / "trace.json.gz").read_bytes()).decode())


def test_all_ranks_are_in_one_file(trace: Reader) -> None:
    assert {found.process for found in trace.slices} == {
        f"rank {rank}: stage {rank}, replica 0" for rank in range(RANKS)
    }
    assert trace.document["otherData"]["plan"] == "plan.json"


def test_clocks_that_are_hours_apart_come_out_aligned(trace: Reader, folder: Path) -> None:
    """On this machine all processes have one true clock: the file is off from it by one constant.

    So are the computations of every rank, but for a millisecond.
    """
    off = []
    for rank in range(RANKS):
        true = json.loads((folder / f"true.{rank}").read_text())
        drawn = [found.start for found in trace.slices if found.code == f"{rank}F0"]
        assert len(drawn) == LAST
        off += [at * 1e-6 - began for at, began in zip(drawn, true[-LAST:], strict=True)]
    assert max(off) - min(off) < 1e-3


def test_a_message_arrives_after_it_was_sent(trace: Reader) -> None:
    assert len(trace.under_way) == LAST * (RANKS - 1)
    assert all(0 <= found.end - found.start < 1e6 for found in trace.under_way)


def test_rank_0_reports(folder: Path) -> None:
    """Three stages one after the other, each 2 ms of a step: about two thirds each are bubble."""
    found = [json.loads((folder / f"bubbles.{rank}").read_text()) for rank in range(RANKS)]
    assert [len(stages) for stages in found] == [RANKS, 0, 0]
    assert all(0.5 < bubble < 1 for bubble in found[0])


def test_write_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert write(path, recorded(2, last=3), example_plan(), "plan.json", 0, None) == (0.0,)
    assert len(Reader(path.read_text()).slices) == 2
