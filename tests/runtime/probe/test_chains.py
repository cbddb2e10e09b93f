"""From the times of a chain to the pace of an op: on a made-up clock."""

from __future__ import annotations

import pytest
import torch

from autopipe.cluster.cluster import Pace
from autopipe.cluster.measured import KERNELS
from autopipe.runtime.probe import chains, microbench
from autopipe.runtime.probe.microbench import Budget
from autopipe.runtime.probe.subjects import SUBJECTS

CPU = torch.device("cpu")


def test_the_table_of_ops() -> None:
    assert (*SUBJECTS,) == KERNELS


def test_a_pace_goes_through_both_times() -> None:
    """3 s for 10 operations and 7 s for 30: 1 s to start, 5 a second."""
    found = chains.pace(10, 3.0, 30, 7.0)
    assert (found.start, found.rate) == pytest.approx((1.0, 5.0))


def test_a_pace_never_runs_backwards() -> None:
    """Noise: 30 operations were quicker than 10. A tenth of the time is left to them."""
    found = chains.pace(10, 7.0, 30, 6.0)
    assert found.rate == pytest.approx(20 / 0.6)
    assert found.start == pytest.approx(7.0 - 10 * 0.6 / 20)


def test_what_has_no_operations_is_all_start() -> None:
    assert chains.pace(0, 3.0, 0, 7.0) == Pace(3.0)


def test_of_one_size_all_is_rate() -> None:
    """No time was left for more than the few."""
    assert chains.pace(10, 5.0, 10, 5.0) == Pace(0.0, 2.0)


class Slow(torch.autograd.Function):
    """Two ticks of a clock forward, five backward, whoever reads it."""

    clock = 0.0

    @staticmethod
    def forward(ctx, x):
        Slow.clock += 2
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Slow.clock += 5
        return gradient.clone()


class Matmul(torch.autograd.Function):
    """What stands between: a hundred ticks either way."""

    @staticmethod
    def forward(ctx, x, weight):
        Slow.clock += 100
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Slow.clock += 100
        return gradient, None


def test_the_matmuls_between_two_ops_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hooks on gradients: an op's backward is over when the matmul before it gets its own."""
    monkeypatch.setattr(chains, "now", lambda device: Slow.clock)
    monkeypatch.setattr(chains.F, "linear", Matmul.apply)
    chain = chains.Chain(lambda x: Slow.apply(Slow.apply(x)), torch.ones(3), ops=4)
    assert chains.repeat(chain, CPU, 1.0) == (2 * 2, 2 * 5)


def test_a_queue_is_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "now", lambda device: Slow.clock)
    chain = chains.Chain(Slow.apply, torch.ones(3), ops=4)
    assert chains._queued(chain, CPU) == (4 * 2, 4 * 5)


@pytest.mark.parametrize(
    ("budget", "rows", "rough"), [(600.0, 512, ""), (8.0, 16, "out of time after 16 of 512 rows")]
)
def test_an_op_has_as_many_rows_as_it_has_time_for(
    budget: float, rows: int, rough: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of a second a row, all in all. Chains are of one op where no more fit."""

    def run(chain: chains.Chain, device: torch.device) -> chains.Both:
        seconds = chain.ops * len(chain.x) / 10
        Slow.clock += seconds
        return seconds / 4, seconds * 3 / 4

    monkeypatch.setattr(microbench, "now", lambda device: Slow.clock)
    monkeypatch.setattr(chains, "now", lambda device: Slow.clock)
    monkeypatch.setattr(microbench.time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(chains, "run", run)
    before = Slow.clock
    found = chains.kernels(["gelu"], Budget(budget, CPU))["gelu"]
    each = 512 * 10
    assert found.values == pytest.approx((0.0, 4 * each, 0.0, 4 / 3 * each), abs=1e-9)
    assert found.rough == rough
    assert Slow.clock - before < 1.5 * budget
