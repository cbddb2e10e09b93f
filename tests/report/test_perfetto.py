"""The file for ui.perfetto.dev, read back by the rules by which Perfetto reads it."""

import gzip
import json
from pathlib import Path

import pytest

from autopipe.errors import AutopipeError
from autopipe.report import perfetto
from autopipe.report.tracks import Event, Track, TrackedStep
from autopipe.schedules.instructions import Kind, parse
from autopipe.schedules.registry import make
from autopipe.schedules.simulate import Costs, LinkTime, simulate
from autopipe.schedules.transfers import Edge, insert
from tests.support.perfetto_reader import Reader, Slice, read
from tests.support.plans import example_plan
from tests.support.tracked import from_timeline, step


def drawn(reader: Reader) -> list[str]:
    """The slices below the steps, `compute 0F0 0-1000`, in the order of their times."""
    return [
        f"{s.thread} {s.code} {s.start:g}-{s.end:g}" for s in reader.slices if s.thread != "steps"
    ]


FORWARD = (
    Track(0, (step(4, "0F0 10 10.001", "0SEND_F0>1 10.001 10.00101"),)),
    Track(1, (step(4, "1WAIT_F0<0 10 10.0015", "1F0 10.0015 10.0025"),)),
)
"""Rank 0 computes for 1 ms and sends for 10 us; rank 1 has it after .5 ms and computes for 1 ms."""


def test_the_file() -> None:
    """As it is written, less the names of threads: an event a line, in microseconds."""
    lines = perfetto.text(FORWARD, {"plan": "plan.json"}).splitlines()
    head = (
        '{"displayTimeUnit": "ms", "otherData": {"plan": "plan.json", '
        '"bubble of rank 0: stage 0, replica 0": "60.0%", '
        '"bubble of rank 1: stage 1, replica 0": "60.0%"}, "traceEvents": ['
    )
    rows = """\
{"ph": "M", "name": "process_name", "args": {"name": "rank 0: stage 0, replica 0"}, "pid": 1, "tid": 10},
{"ph": "M", "name": "process_name", "args": {"name": "rank 1: stage 1, replica 0"}, "pid": 2, "tid": 20},
{"ph": "X", "name": "step 4", "cat": "steps", "dur": 1010.0, "cname": "generic_work", "args": {"bubble": 0.6}, "ts": 0.0, "pid": 1, "tid": 10},
{"ph": "X", "name": "forward 0", "cat": "compute", "dur": 1000.0, "cname": "thread_state_running", "args": {"what": "forward of micro-batch 0", "stage": 0, "microbatch": 0, "instruction": "0F0"}, "ts": 0.0, "pid": 1, "tid": 11},
{"ph": "C", "name": "in flight, stage 0", "args": {"micro-batches": 1}, "ts": 0.0, "pid": 1, "tid": 11},
{"ph": "X", "name": "step 4", "cat": "steps", "dur": 2500.0, "cname": "generic_work", "args": {"bubble": 0.6}, "ts": 0.0, "pid": 2, "tid": 20},
{"ph": "X", "name": "wait for activations 0", "cat": "waits", "dur": 1500.0, "cname": "terrible", "args": {"what": "waiting for the activations of micro-batch 0 from stage 0", "stage": 1, "microbatch": 0, "instruction": "1WAIT_F0<0"}, "ts": 0.0, "pid": 2, "tid": 22},
{"ph": "X", "name": "send activations 0", "cat": "transfers", "dur": 10.0, "cname": "yellow", "args": {"what": "sending the activations of micro-batch 0 to stage 1", "stage": 0, "microbatch": 0, "instruction": "0SEND_F0>1"}, "ts": 1000.0, "pid": 1, "tid": 13},
{"ph": "s", "id": 1, "cat": "transfer", "name": "activations, stage 0 to 1", "ts": 1000.0, "pid": 1, "tid": 13},
{"ph": "b", "id": 1, "cat": "transfer", "name": "activations, stage 0 to 1", "args": {"microbatch": 0, "waited": true}, "ts": 1000.0, "pid": 2, "tid": 22},
{"ph": "f", "id": 1, "cat": "transfer", "name": "activations, stage 0 to 1", "ts": 1500.0, "pid": 2, "tid": 21},
{"ph": "X", "name": "forward 0", "cat": "compute", "dur": 1000.0, "cname": "thread_state_running", "args": {"what": "forward of micro-batch 0", "stage": 1, "microbatch": 0, "instruction": "1F0"}, "ts": 1500.0, "pid": 2, "tid": 21},
{"ph": "C", "name": "in flight, stage 1", "args": {"micro-batches": 1}, "ts": 1500.0, "pid": 2, "tid": 21},
{"ph": "e", "id": 1, "cat": "transfer", "name": "activations, stage 0 to 1", "ts": 1500.0, "pid": 2, "tid": 22}
]}"""  # noqa: E501
    assert lines[0] == head
    skipped = ("thread_name", "sort_index")
    assert [row for row in lines[1:] if not any(word in row for word in skipped)] == (
        rows.splitlines()
    )


def test_as_it_is_read() -> None:
    found = read(*FORWARD)
    send = Slice(
        "rank 0: stage 0, replica 0", "transfers", "send activations 0", 1000, 1010, "0SEND_F0>1"
    )
    compute = Slice("rank 1: stage 1, replica 0", "compute", "forward 0", 1500, 2500, "1F0")
    assert found.arrows == [(send, compute)]
    assert [(s.process, s.name, s.start, s.end) for s in found.under_way] == [
        ("rank 1: stage 1, replica 0", "activations, stage 0 to 1", 1000, 1500)
    ]
    assert drawn(found) == [
        "compute 0F0 0-1000",
        "waits 1WAIT_F0<0 0-1500",
        "transfers 0SEND_F0>1 1000-1010",
        "compute 1F0 1500-2500",
    ]


def test_threads_stand_in_order_under_their_rank() -> None:
    rows = json.loads(perfetto.text(FORWARD, {}))["traceEvents"]
    places = {
        (row["tid"], row["name"]): row["args"]["sort_index"]
        for row in rows
        if row["name"].endswith("sort_index")
    }
    assert [places[20 + number, "thread_sort_index"] for number in range(5)] == [0, 1, 2, 3, 4]
    assert (places[10, "process_sort_index"], places[20, "process_sort_index"]) == (1, 2)


SKIPPING = [Edge(s, t, True) for s, t in ((0, 1), (1, 2), (2, 3), (0, 2), (0, 3))]
"""A chain of four stages, and stage 0 sends to all: three SENDs in one moment."""


@pytest.mark.parametrize("latency", [0.0, 0.4])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_an_arrow_leads_to_the_computation_that_its_tensors_are_for(
    name: str, latency: float
) -> None:
    """`0SEND_F3>2` to `2F3`, and `2SEND_B3>0` to `0B3` or `0I3`; one for each SEND of the step.

    On a link that takes no time the SEND, the WAIT and the computation fall into one moment.
    """
    chunks = {"interleaved": 2, "zb-v": 2}.get(name, 1)
    compute = make(name, 4 // chunks, 4, chunks=chunks)
    programs = insert(compute, SKIPPING, [2, 2, 2])
    timeline = simulate(programs, Costs.even(4, 1e-3, 2e-3, LinkTime(latency * 1e-3)))
    found = read(*from_timeline(timeline))
    every = [i for program in programs for i in program]
    assert len(found.arrows) == sum(i.kind is Kind.SEND for i in every)
    for source, target in found.arrows:
        send, use = parse(source.code), parse(target.code)
        assert (use.stage, use.microbatch) == (send.peer, send.microbatch)
        assert use.kind.value in {"F": "F", "B": "BI"}[send.channel.flow.value]
    assert len(found.under_way) == len(found.arrows)
    computed = [s.code for s in found.slices if s.thread == "compute"]
    assert sorted(computed) == sorted(str(i) for program in compute for i in program)


def test_a_transfer_ends_when_it_is_there_if_that_is_known() -> None:
    """The receiver computes until 4 ms, and its WAIT then finds what has come 1 ms after 1 ms."""
    zero = step(0, "0F0 0 .001", "0SEND_F0>1 .001 .001")
    events = step(0, "1F1 0 .004", "1WAIT_F0<0 .004 .004", "1F0 .004 .005").events
    timeline = simulate(make("1f1b", 2, 1), Costs.even(2))
    (transfer,) = from_timeline(timeline)[1].steps[0].arrivals
    for arrivals, end in (({}, 4000), ({transfer: 0.002}, 2000)):
        found = read(Track(0, (zero,)), Track(1, (TrackedStep(0, events, arrivals=arrivals),)))
        assert [(s.start, s.end) for s in found.under_way] == [(1000, end)]


def test_only_waits_that_waited_are_drawn() -> None:
    found = read(
        Track(
            0,
            (
                step(
                    0,
                    "0POST_B0<1 0 1e-6",
                    "0WAIT_B0<1 1e-6 20e-6",  # 19 us
                    "0B0 20e-6 30e-6",
                    "0FREE_F0>1 30e-6 50e-6",  # 20 us
                    "0WAIT_B1<1 50e-6 90e-6",
                    "0STEP 90e-6 91e-6",
                ),
            ),
        )
    )
    assert drawn(found) == [
        "transfers 0POST_B0<1 0-1",
        "compute 0B0 20-30",
        "waits 0FREE_F0>1 30-50",
        "waits 0WAIT_B1<1 50-90",
    ]


def test_sums_of_a_run_last_from_reduce_to_the_end() -> None:
    """One by one they are not known: each stage's is under way until STEP has waited for all."""
    events = (
        *("2REDUCE 0 0", "2B3 0 .001", "0REDUCE .001 .001"),
        *("0B3 .001 .003", "0STEP .003 .004"),
    )
    assert [line for line in drawn(read(Track(0, (step(0, *events),)))) if "B3" not in line] == [
        "sums 2REDUCE 0-4000",
        "sums 0REDUCE 1000-4000",
        "waits 0STEP 3000-4000",
    ]


def test_sums_of_a_prediction_are_known_one_by_one() -> None:
    costs = Costs.of([1e-3] * 2, [2e-3] * 2, reduce=[0.5e-3, 4e-3])
    found = read(*from_timeline(simulate(make("1f1b", 2, 1), costs)))
    assert [line for line in drawn(found) if line.startswith("sums")] == [
        "sums 1REDUCE 4000-8000",
        "sums 0REDUCE 6000-6500",
    ]


def test_micro_batches_in_flight() -> None:
    """B lets go; where it is split in two, W does."""
    whole = step(0, "0F0 0 1e-3", "0F1 1e-3 2e-3", "0B0 2e-3 3e-3", "0B1 3e-3 4e-3")
    split = step(0, "1F0 0 1e-3", "1I0 1e-3 2e-3", "1F1 2e-3 3e-3", "1W0 3e-3 4e-3")
    assert read(Track(0, (whole,)), Track(1, (split,))).counts == {
        "in flight, stage 0": [(0, 1), (1000, 2), (3000, 1), (4000, 0)],
        "in flight, stage 1": [(0, 1), (2000, 2), (4000, 1)],
    }


def test_transfers_of_other_pipelines_steps_and_runs_do_not_mix() -> None:
    """Each SEND leads to the WAIT of its own replica, step and run, though all look alike."""
    ends = [
        (replica, number, run)
        for run in ("", "predicted")
        for replica in range(2)
        for number in range(2)
    ]
    tracks = []
    for replica, run in ((0, ""), (1, ""), (0, "predicted"), (1, "predicted")):
        starts = [ends.index((replica, number, run)) * 1e-3 + number for number in range(2)]
        sent = [step(n, f"0SEND_F0>1 {at} {at}") for n, at in enumerate(starts)]
        used = [step(n, f"1WAIT_F0<0 {at} {at}", f"1F0 {at} 5") for n, at in enumerate(starts)]
        tracks.append(Track(replica, tuple(sent), replica, run=run))
        tracks += [Track(2 + replica, (one,), replica, run=run) for one in used]
    found = read(*tracks)
    assert len(found.arrows) == len(ends)
    for source, target in found.arrows:
        assert source.start == target.start
        assert source.process.split("stage")[1][2:] == target.process.split("stage")[1][2:]


def test_what_was_not_kept_on_the_other_side_has_no_arrow() -> None:
    sent = step(0, "0SEND_F0>1 0 1e-6")
    found = read(Track(0, (sent,)), Track(1, (step(1, "1WAIT_F0<0 0 1", "1F0 1 2"),)))
    assert (found.arrows, found.under_way) == ([], [])


def test_clocks_that_disagree_a_little() -> None:
    """A transfer that seems to have been there 5 us before it was sent took no time."""
    sent = step(0, "0F0 0 .001", "0SEND_F0>1 .001 .00101")
    used = step(0, "1WAIT_F0<0 0 .000995", "1F0 .000995 .002")
    found = read(Track(0, (sent,)), Track(1, (used,)))
    assert found.arrows == []
    assert [(s.start, s.end) for s in found.under_way] == [(1000, 1000)]


def test_slices_still_follow_each_other_after_rounding() -> None:
    """Times of a machine that has been up for months, with ends that are the next one's start."""
    times = [9e6 + k * 1.234567891e-6 for k in range(2000)]
    events = tuple(
        Event(parse(f"0F{k}"), start, end)
        for k, (start, end) in enumerate(zip(times, times[1:], strict=False))
    )
    found = read(Track(0, (TrackedStep(0, events),)))
    slices = [s for s in found.slices if s.thread == "compute"]
    assert [s.end for s in slices[:-1]] == [s.start for s in slices[1:]]


def test_a_run_without_steps() -> None:
    assert read(Track(0, ())).slices == []


def test_what_it_says_of_the_plan() -> None:
    said = perfetto.about(example_plan(), "plans/two.json")
    assert said == {
        "plan": "plans/two.json",
        "schedule": "1f1b",
        "mesh": "pp=2 dp=1 tp=1",
        "micro-batches": "4",
        "version of torch": "2.13.0",
        "version of autopipe": "0.1.0",
    }


def test_a_saved_file(tmp_path: Path) -> None:
    """Plain or compressed, always the same bytes, and nothing besides."""
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    perfetto.save(plain, FORWARD, {"plan": "here"})
    perfetto.save(packed, FORWARD, {"plan": "here"})
    assert plain.read_text() == perfetto.text(FORWARD, {"plan": "here"})
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    first = packed.read_bytes()
    perfetto.save(packed, FORWARD, {"plan": "here"})
    assert packed.read_bytes() == first
    assert sorted(tmp_path.iterdir()) == [plain, packed]


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(AutopipeError, match="folder cannot be written: Is a directory") as refused:
        perfetto.save(tmp_path / "folder", FORWARD, {})
    assert refused.value.hint == "it is a folder: name a file in it"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(AutopipeError, match="No such file or directory"):
        perfetto.save(tmp_path / "none" / "trace.json", FORWARD, {})
