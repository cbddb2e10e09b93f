"""Where a step goes, as bars; how fast a device is, in a sentence."""

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Group, NodeGroup
from autopipe.planfile import predict
from autopipe.planfile.work import Spent, Work
from autopipe.report.spending import bars, picture, speed
from tests.support.plans import chain, example_plan

BARS = """\
where a step goes, on the mean device (the optimizer's own is not counted):
matmuls at peak     ██████                                   1.5 ms   16.7 %
matmuls below peak        ███████████                        2.5 ms   27.8 %
other ops                            ████████               1.98 ms   22.0 %
warm-up, cool-down                           █████████████     3 ms   33.3 %
all else                                                 █    20 us    0.2 %
"""


def test_bars_from_the_peak_down_to_waiting() -> None:
    """Two stages of 3 ms, two micro-batches: 9 ms, of which each computes for 6. 3 GFLOP at 2
    TFLOP/s are 1.5 ms."""
    plan = chain(2, 2)
    parts = Spent(2e-3, 0.99e-3, 0.01e-3)
    stages = [replace(s, predicted=replace(s.predicted, spent=parts)) for s in plan.stages]
    work = Work(3e9, (1e12, 1e12), "bf16", measured=False)
    found = predict.with_prediction(replace(plan, stages=tuple(stages), work=work))
    assert "\n".join(picture(found, 76)) + "\n" == BARS


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_printed_shares_add_up_and_no_line_is_too_long(columns: int) -> None:
    title, *lines = picture(example_plan(), columns)
    assert max(map(len, lines)) == columns
    shares = [float(line.split()[-2]) for line in lines]
    assert sum(shares) == pytest.approx(100)
    assert sum(bar.seconds for bar in bars(example_plan())) == pytest.approx(
        predict.timeline(example_plan()).seconds
    )


def test_a_step_that_takes_no_time_has_no_bars() -> None:
    assert list(picture(chain(1, 4, lambda stage: 0.0), 80)) == []


@pytest.mark.parametrize(("zero", "word"), [(0, "gradient sums"), (1, "ZeRO-1 exchange")])
def test_what_replicas_exchange_is_called_by_the_zero_stage(zero: int, word: str) -> None:
    one = chain(1, 2)
    stages = tuple(replace(stage, zero=zero) for stage in one.stages)
    places = tuple(replace(one.mesh.places[0], rank=n, dp=n, local=n) for n in range(2))
    nodes = (NodeGroup(1, (Group(2, one.cluster.row[0]),)),)
    two = replace(one, cluster=replace(one.cluster, nodes=nodes), stages=stages)
    mesh, batch = replace(one.mesh, dp=2, places=places), replace(one.batch, rows=4)
    assert word in [bar.name for bar in bars(replace(two, mesh=mesh, batch=batch))]


def test_speed_of_a_device() -> None:
    """Each of two GPUs does half of 96 tokens and of 1.56 TFLOP in 1 ms, at a peak of 312 TFLOP/s.

    1e9 tokens at 48,000 a second take 20,833 s, or 5.79 hours.
    """
    plan = predict.with_prediction(example_plan())
    plan = replace(plan, prediction=replace(plan.prediction, step_seconds=1e-3))
    work = Work(0.312e12, (312e12, 312e12), "bf16", measured=False, tokens=96)
    assert speed(replace(plan, work=work)) == (
        "48,000 tokens/s/GPU; 156 TFLOP/s/GPU, an MFU of 50.0 % (bf16 datasheet: 312 TFLOP/s); "
        "5.79 GPU hours a billion tokens"
    )
    measured = replace(work, peaks=(0.2e12, 0.2e12), flops=1e8, measured=True, tokens=0)
    assert speed(replace(plan, work=measured)) == (
        "4,000 rows/s/GPU; 50 GFLOP/s/GPU, an MFU of 25.0 % (bf16 measured: 200 GFLOP/s)"
    )
    assert speed(replace(plan, work=None)) == "4,000 rows/s/GPU"
