"""What a run measures, and what it says, in one process."""

import json
import math
import re
from pathlib import Path

import pytest

from autopipe.planfile.parts import StagePrediction
from autopipe.runtime.telemetry.destinations import Destinations
from autopipe.runtime.train import WARM_UP, train
from tests.support.trained import Load, run


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_of_few_steps_is_measured_too(load: Load, steps: int) -> None:
    """Activations of a run of one step once were 0: bytes were counted in the second step alone."""
    pipe, file = load("")
    measured, _ = run(pipe, file, steps)
    (stage,) = measured.stages
    planned = pipe.plan.stages[0].predicted.memory
    # A run does not see what passes: a gradient on its way into its sum.
    assert stage.memory.peak == pytest.approx(planned.peak - planned.passing, rel=0.05)
    assert stage.memory.activations == planned.activations > 0
    assert stage.forward_seconds > 0 and stage.backward_seconds > 0
    assert measured.step_seconds > 2 * (stage.forward_seconds + stage.backward_seconds) * 0.5
    assert isinstance(stage, StagePrediction)


def test_an_overflow_of_fp16_is_said(load: Load) -> None:
    """Of the 1st, the 2nd, the 4th: a large scale takes several halvings."""
    pipe, file = load("", precision="fp16")
    assert pipe.loss_scale is not None
    pipe.loss_scale.scale = 2.0**40
    _, said = run(pipe, file, 40)
    overflows = [line for line in said if "overflowed" in line]
    assert overflows[0] == (
        "step 1: gradients overflowed in fp16, so it changes no weight; the loss scale is "
        f"{2.0**39:g} now"
    )
    assert overflows[2].startswith("step 4: ") and "as 4 steps so far" in overflows[2]
    assert len(overflows) < 6


def test_bytes_of_fp16_are_those_of_a_step_without_an_overflow(load: Load) -> None:
    """Bug: they were counted in the first two steps alone. Where both overflowed the run said that
    it had no gradients, and no optimizer state."""
    pipe, file = load("", precision="fp16")
    assert pipe.loss_scale is not None
    pipe.loss_scale.scale = 2.0**24
    measured, _ = run(pipe, file, 20)
    overflows = 24 - math.log2(pipe.loss_scale.scale)
    assert WARM_UP <= overflows < 19
    (stage,), planned = measured.stages, pipe.plan.stages[0].predicted.memory
    counters = 4 * len([*pipe.parameters()])  # AdamW's, of its steps
    assert stage.memory.gradients == planned.gradients > 0
    assert stage.memory.optimizer == planned.optimizer + counters


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_two_stages_on_one_rank_are_measured_apart(schedule: str, load: Load) -> None:
    pipe, file = load("", schedule=schedule)
    measured, _ = run(pipe, file, 3)
    assert len(measured.stages) == len(pipe.plan.stages) == 2
    for found, planned in zip(measured.stages, pipe.plan.stages, strict=True):
        assert found.forward_seconds > 0 and found.backward_seconds > 0
        memory = planned.predicted.memory
        assert found.memory.activations == memory.activations
        assert (found.memory.parameters, found.memory.gradients) == (
            memory.parameters, memory.gradients)  # fmt: skip


def test_a_trace_of_the_last_steps(load: Load, tmp_path: Path) -> None:
    """And with it how much of a step the rank did not compute."""
    pipe, file = load("")
    path = tmp_path / "run.json"
    measured = train(pipe, file, 3, lambda line: None, path)
    (bubble,) = measured.bubbles
    assert 0 < bubble < 1
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    steps = [name for name in names if name.startswith("step ")]
    assert steps == ["step 2", "step 3"]  # the first one allocates: it is left out
    assert names.count("forward 0") == names.count("backward 1") == 2
    assert run(pipe, file, 2)[0].bubbles == ()


def test_metrics_of_every_second_step(load: Load, tmp_path: Path) -> None:
    """Rates are those of the update itself: 0.1, 0.05, 0.025, 0.0125."""
    pipe, file = load(
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)\n"
        "def scheduler(optimizer): return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)\n"
    )
    to = Destinations(file=tmp_path / "m.jsonl")
    measured = train(pipe, file, 4, lambda line: None, log_every=2, metrics=to)
    second, fourth = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert (second["step"], fourth["step"]) == (2, 4)
    assert (second["loss"], fourth["loss"]) == (measured.losses[1], measured.losses[3])
    assert (second["learning_rate"], fourth["learning_rate"]) == (0.05, 0.0125)
    (stage,) = measured.stages
    for line in (second, fourth):
        assert line["peak_bytes"] == stage.memory.peak
        assert 0 < line["bubble"] < 1
        assert line["rows_per_second"] == pytest.approx(8 / line["seconds"])
        assert "tokens_per_second" not in line and "loss_scale" not in line


def test_the_loss_scale_is_among_the_metrics_of_fp16(load: Load, tmp_path: Path) -> None:
    pipe, file = load("", precision="fp16")
    path = tmp_path / "m.jsonl"
    train(pipe, file, 1, lambda line: None, metrics=Destinations(file=path))
    assert pipe.loss_scale is not None
    assert json.loads(path.read_text())["loss_scale"] == pipe.loss_scale.scale


def test_a_line_now_and_then_without_a_terminal(load: Load) -> None:
    pipe, file = load("")
    _, said = run(pipe, file, 3)
    assert len(said) == 3
    for step, line in enumerate(said, start=1):
        assert re.fullmatch(
            rf"step {step}/3  loss \d\.\d{{3,}}  [\d,]+\.\d rows/s  MFU [\d.]+ %", line
        ), line
