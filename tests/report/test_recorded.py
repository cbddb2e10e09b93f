"""A run's folder: what a run leaves there is read back; what is damaged is named."""

import gzip
import json
from pathlib import Path

import pytest

from autopipe.errors import AutopipeError
from autopipe.planfile import predict
from autopipe.report import perfetto, recorded
from autopipe.report.tracks import Track
from tests.support.plans import chain
from tests.support.tracked import from_timeline


def folder(path: Path) -> Path:
    """A run of two stages: three logged steps, two traced ones, of which the first is longer."""
    plan = predict.with_prediction(chain(2, 2))
    recorded.begin(path, leads=True, resume=False)
    plan.save(path / recorded.PLAN)
    timeline = predict.timeline(plan)
    pipeline = [
        Track(track.rank, (*slow.steps, *track.steps))
        for slow, track in zip(
            from_timeline(timeline, number=1),
            from_timeline(timeline, start=10.0, number=2),
            strict=True,
        )
    ]
    perfetto.save(path / recorded.TRACE, pipeline, {})
    lines = [{"step": n, "loss": 5 - n, "seconds": 0.5} for n in (1, 2, 3)]
    (path / recorded.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded.end(path, [stage.predicted for stage in plan.stages], 0.5, (0.1, 0.2))
    return path


def test_what_a_run_leaves_is_read_back(tmp_path: Path) -> None:
    found = recorded.load(folder(tmp_path / "run"))
    assert [line["loss"] for line in found.metrics] == [4.0, 3.0, 2.0]
    assert found.measured is not None and found.measured.bubbles == (0.1, 0.2)
    timeline = predict.timeline(found.plan)
    assert found.lanes is not None and len(found.lanes) == 2
    first = [s for s in found.lanes[0] if str(s.instruction) == "0F0"]
    planned = next(span for span in timeline.spans if str(span.instruction) == "0F0")
    assert first[0].end - first[0].start == pytest.approx(planned.end - planned.start, abs=1e-6)
    last = max(s.end for lane in found.lanes for s in lane)
    assert last == pytest.approx(timeline.seconds, rel=1e-3)


def test_a_run_that_was_killed_has_its_plan_and_its_metrics(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    (run / recorded.MEASURED).unlink()
    (run / recorded.TRACE).unlink()
    path = run / recorded.METRICS
    path.write_text(path.read_text()[:-9])
    found = recorded.load(run)
    assert (found.measured, found.lanes, len(found.metrics)) == (None, None, 2)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (recorded.METRICS, "[1]\n{}\n", "metrics.jsonl:1: expected an object of numbers"),
        (recorded.TRACE, "{}", "is no trace that `autopipe run` has written"),
        (recorded.TRACE, '{"traceEvents": [7]}', "is no trace that"),
        (recorded.MEASURED, "{}", "measured.stages"),
        (recorded.PLAN, "{}", "plan"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    run = folder(tmp_path / "run")
    (run / name).write_text(text)
    with pytest.raises(AutopipeError) as refused:
        recorded.load(run)
    assert said in refused.value.message


def test_a_compressed_trace_is_kept_as_it_is_read(tmp_path: Path) -> None:
    """`run --trace t.json.gz --record run`. Bug: the report took its trace for damaged."""
    run = folder(tmp_path / "run")
    lanes = recorded.load(run).lanes
    compressed = tmp_path / "t.json.gz"
    compressed.write_bytes(gzip.compress((run / recorded.TRACE).read_bytes()))
    (run / recorded.TRACE).unlink()
    recorded.keep_trace(run, compressed)
    assert recorded.load(run).lanes == lanes is not None


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    run = folder(tmp_path / "run")
    with pytest.raises(AutopipeError, match="has an earlier run"):
        recorded.begin(run, leads=True, resume=False)
    recorded.begin(run, leads=True, resume=True)
    with pytest.raises(AutopipeError, match="expected a folder, found a file"):
        recorded.begin(run / recorded.PLAN, leads=False, resume=False)
    with pytest.raises(AutopipeError, match="no folder of a run's"):
        recorded.load(tmp_path)
