"""The figures of a plan as numbers, for programs."""

import json
from dataclasses import asdict, replace

import pytest

from autopipe.planfile import predict
from autopipe.report.as_json import of_plan
from tests.support.plans import chain, example_plan


def test_speed_and_seconds_of_a_plan() -> None:
    """96 tokens and 1.56 TFLOP in 15 ms, on two GPUs of 312 TFLOP/s each."""
    plan = predict.with_prediction(example_plan())
    found, step = of_plan(plan), plan.prediction.step_seconds
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"], rel=1e-12)
    assert found["mfu"] == pytest.approx(1.56e12 / (2 * 312e12 * step))
    assert found["seconds"]["matmuls_at_peak"] / step == pytest.approx(found["mfu"])
    assert found["flops_per_second"] == pytest.approx(1.56e12 / 2 / step)
    assert found["tokens_per_second"] == pytest.approx(96 / 2 / step)
    assert found["rows_per_second"] == pytest.approx(8 / 2 / step)
    assert found["hours_per_billion_tokens"] == pytest.approx(1e9 / (96 / 2 / step) / 3600)
    assert (found["tokens"], found["peak_dtype"], found["peak_measured"]) == (96, "bf16", False)
    assert found["stages"][0]["spent"] == asdict(plan.stages[0].predicted.spent or [])
    assert json.loads(json.dumps(found)) == found


def test_the_fullest_device() -> None:
    found = of_plan(example_plan())["fullest"]
    assert (found["rank"], found["stages"], found["at"]) == (0, [0], "0B0")
    assert sum(found["bytes"].values()) == found["peak_bytes"] == 18944
    assert found["margin_bytes"] == pytest.approx(4.8 * 2**30, rel=0.01)


def test_what_a_plan_does_not_say_is_null() -> None:
    plan = replace(chain(1, 2), work=None)
    found = of_plan(plan)
    unknown = ("mfu", "tokens_per_second", "hours_per_billion_tokens", "flops_per_second")
    assert [found[name] for name in unknown] == [None] * 4
    assert (found["tokens"], found["stages"][0]["spent"], found["fullest"]["at"]) == (0, None, None)
