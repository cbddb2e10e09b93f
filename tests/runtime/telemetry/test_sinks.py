"""Where metrics go: what a file holds, also after a run goes on; what other packages are given."""

import json
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopipe.errors import AutopipeError
from autopipe.runtime.telemetry.destinations import Destinations, check
from autopipe.runtime.telemetry.metrics import Metrics
from autopipe.runtime.telemetry.sinks import JsonLines, TensorBoard, WeightsAndBiases, opened
from tests.support.plans import example_plan

PLAN = example_plan()


def metrics(step: int) -> Metrics:
    return Metrics(step, 1 / step, 2.0, 4.0, mfu=0.375)


def write(path: Path, steps: range, after: int = 0) -> None:
    sink = JsonLines(path, after)
    for step in steps:
        sink.write(metrics(step))
    sink.close()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# --- a file


def test_a_line_is_there_as_soon_as_its_step_has_ended(tmp_path: Path) -> None:
    sink = JsonLines(path := tmp_path / "m.jsonl", 0)
    sink.write(metrics(1))
    (line,) = path.read_text().splitlines()
    assert json.loads(line) == {
        "step": 1, "loss": 1.0, "seconds": 2.0, "rows_per_second": 4.0, "mfu": 0.375,
    }  # fmt: skip
    sink.close()


def test_a_run_that_goes_on_has_no_step_twice(tmp_path: Path) -> None:
    """It was killed in step 5, whose line was half written; the checkpoint is of step 3."""
    path = tmp_path / "m.jsonl"
    write(path, range(1, 5))
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')
    write(path, range(4, 7), after=3)
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_begins_again_before_its_first_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, range(1, 5))
    write(path, range(1, 3), after=0)
    assert steps(path) == [1, 2]


@pytest.mark.parametrize("text", ["dear diary\n", '{"step": 1}\n[2]\n{"step": 3}\n'])
def test_a_file_of_something_else_is_not_touched(text: str, tmp_path: Path) -> None:
    path = tmp_path / "diary.txt"
    path.write_text(text)
    with pytest.raises(AutopipeError, match=r"line \d is none of metrics"):
        JsonLines(path, 0)
    assert path.read_text() == text


# --- checks before long work


def test_a_file_of_an_earlier_run_is_refused_unless_it_goes_on(tmp_path: Path) -> None:
    to = Destinations(file=tmp_path / "m.jsonl")
    check(to, resume=False)
    write(tmp_path / "m.jsonl", range(1, 3))
    check(to, resume=True)
    with pytest.raises(AutopipeError, match="has lines of an earlier run"):
        check(to, resume=False)


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(AutopipeError, match="expected a file, found a folder"):
        check(Destinations(file=tmp_path), resume=False)
    with pytest.raises(AutopipeError, match="there is no folder"):
        check(Destinations(file=tmp_path / "no" / "m.jsonl"), resume=False)


def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `wandb`, as W&B leaves one, is no package either."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, to in {
        "wandb": Destinations(wandb="project"),
        "tensorboard": Destinations(tensorboard=tmp_path),
    }.items():
        with pytest.raises(AutopipeError, match=f"by {name}, which is not installed") as refused:
            check(to, resume=False)
        assert refused.value.hint == f"pip install 'autopipe[{name}]'"


# --- several sinks


def test_a_sink_that_fails_is_told_of_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def log(self, values: object, step: int) -> None:
            raise ConnectionError("key 1234")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **how: Broken()))
    path, said = tmp_path / "m.jsonl", list[str]()
    with opened(Destinations(file=path, wandb="project"), PLAN, 0, said.append) as write_all:
        for step in (1, 2, 3):
            write_all(metrics(step))
    assert said == ["--wandb project failed, and gets no more metrics: ConnectionError"]
    assert steps(path) == [1, 2, 3]


@pytest.mark.parametrize("code", [0, 1])
def test_wandb_is_told_how_a_run_ended(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    run = SimpleNamespace(finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **how: run))
    with suppress(ZeroDivisionError), opened(Destinations(wandb="project"), PLAN, 0, print):
        assert 1 // (1 - code) == 1
    assert codes == [code]


# --- other packages


def test_what_tensorboard_reads(tmp_path: Path) -> None:
    """Of a run that went on from step 2, whose step 3 was made twice: the second one counts."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, loss in ((0, 5.0), (2, 6.0)):
        sink = TensorBoard(tmp_path, after)
        for step in range(after + 1, 4):
            sink.write(Metrics(step, loss, 2.0, 4.0))
        sink.close()
    assert len([*tmp_path.iterdir()]) == 2
    read = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(read.Tags()["scalars"]) == ["loss", "rows_per_second", "seconds"]
    assert [(point.step, point.value) for point in read.Scalars("loss")] == [
        (1, 5.0), (2, 5.0), (3, 6.0),
    ]  # fmt: skip


KEY = "0123456789abcdef" * 2 + "01234567"


def test_wandb_offline_leaves_a_run_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    for name, value in {"API_KEY": KEY, "MODE": "offline", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    sink = WeightsAndBiases("project", PLAN)
    sink.write(metrics(1))
    sink.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    assert KEY not in "".join(capfd.readouterr())


def test_what_wandb_says_of_a_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**how: object) -> None:
        raise ValueError(f"what a key: {KEY}")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(AutopipeError) as refused:
        WeightsAndBiases("project", PLAN)
    assert refused.value.message == "W&B did not begin a run of project 'project': ValueError"
    assert refused.value.__suppress_context__ and "WANDB_MODE=offline" in (refused.value.hint or "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_disk_that_is_full() -> None:
    """Training goes on; the sentence says why there are no more figures."""
    said = list[str]()
    with opened(Destinations(file=Path("/dev/full")), PLAN, 0, said.append) as write_all:
        for step in (1, 2):
            write_all(metrics(step))
    assert said == ["--metrics /dev/full failed, and gets no more metrics: No space left on device"]
