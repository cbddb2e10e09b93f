"""From times to figures: on made-up times, of which the figures are known."""

from __future__ import annotations

import math

import pytest
import torch

from autopipe import speeds
from autopipe.cluster import Pace

CPU = torch.device("cpu")


def test_the_fit_finds_the_device_that_made_the_times() -> None:
    """2 m k n operations at rate * m / (m + h) * k / (k + h) * n / (n + h)."""
    rate, half = 1e11, 16.0
    found = [
        (dims, 2 * math.prod(dims) / (rate * math.prod(dim / (dim + half) for dim in dims)))
        for dims in speeds.ON_CPU
    ]
    assert speeds.fit(found) == pytest.approx((rate, half))


def test_a_layer_is_three_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a second; 2 operations for each of a matmul's products."""
    monkeypatch.setattr(speeds, "seconds", lambda ops, device: [3.0 * speeds.LAYERS for _ in ops])
    monkeypatch.setattr(speeds, "ON_CPU", ((4, 8, 16),))
    assert speeds.matmuls(torch.float32, CPU, 0.0) == pytest.approx((2 * 4 * 8 * 16, 0.0))


def test_layers_run_forward_and_backward_with_other_weights_each_time() -> None:
    """Of one call: gradients of what comes in, of the bias, and of every layer's weights."""
    run = speeds._layers((4, 8, 16), torch.float32, CPU)
    first, second = run(), run()
    shapes = [(4, 8), (16,), *[(16, 8)] * speeds.LAYERS]
    assert [tuple(gradient.shape) for gradient in first] == shapes
    assert not torch.equal(first[0], second[0])


def test_a_known_half_is_kept() -> None:
    found = [((64, 64, 64), 2 * 64**3 / 1e9)]
    assert speeds.fit(found, 64.0) == pytest.approx((8e9, 64.0))  # an eighth is reached


def test_a_pace_goes_through_both_times() -> None:
    """3 s for 10 operations and 7 s for 30: 1 s to start, 5 a second."""
    found = speeds.pace(10, 3.0, 30, 7.0)
    assert (found.start, found.rate) == pytest.approx((1.0, 5.0))


def test_a_pace_never_runs_backwards() -> None:
    """Noise: 30 operations were quicker than 10. A tenth of the time is left to them."""
    found = speeds.pace(10, 7.0, 30, 6.0)
    assert found.rate == pytest.approx(20 / 0.6)
    assert found.start == pytest.approx(7.0 - 10 * 0.6 / 20)


def test_what_has_no_operations_is_all_start() -> None:
    assert speeds.pace(0, 3.0, 0, 7.0) == Pace(3.0)


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
    monkeypatch.setattr(speeds, "now", lambda device: Slow.clock)
    monkeypatch.setattr(speeds.F, "linear", Matmul.apply)
    chain = speeds.Chain(lambda x: Slow.apply(Slow.apply(x)), torch.ones(3), ops=4)
    assert speeds.chained([chain], CPU, 1.0) == [(2 * 2, 2 * 5)]


def test_a_queue_is_timed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "now", lambda device: Slow.clock)
    chain = speeds.Chain(Slow.apply, torch.ones(3), ops=4)
    assert speeds._queued(chain, CPU) == (4 * 2, 4 * 5)


def test_chains_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """a b, a b, a b: whatever slows one of the rounds slows both."""
    called: list[str] = []

    def named(name: str) -> speeds.Function:
        def run(x: torch.Tensor) -> torch.Tensor:
            called.append(name)
            return x * 2

        return run

    monkeypatch.setattr(speeds, "WINDOWS", 2)
    chains = [speeds.Chain(named(name), torch.ones(1), 2) for name in "ab"]
    found = speeds.chained(chains, CPU, 1e-9)  # once through a chain fills a window of a nanosecond
    assert "".join(called) == "aabb" * 3  # a round to warm up, and two
    assert len(found) == 2 and all(len(times) == 2 for times in found)
