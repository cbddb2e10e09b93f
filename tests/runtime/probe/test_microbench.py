"""From times to figures: on made-up times, of which the figures are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from autopipe.runtime.probe import microbench
from autopipe.runtime.probe.microbench import Budget

CPU = torch.device("cpu")


def test_the_fit_finds_the_device_that_made_the_times() -> None:
    """2 m k n operations at rate * m / (m + h) * k / (k + h) * n / (n + h)."""
    rate, half = 1e11, 16.0
    found = [
        (dims, 2 * math.prod(dims) / (rate * math.prod(dim / (dim + half) for dim in dims)))
        for dims in microbench.ON_CPU
    ]
    assert microbench.fit(found) == pytest.approx((rate, half))


class Clock:
    """Time that goes on only where something is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 0.0
        monkeypatch.setattr(microbench, "now", lambda device: self.time)
        monkeypatch.setattr(microbench.time, "thread_time", lambda: 0.0)

    def takes(self, seconds: float) -> Callable[[], float]:
        """An op of so many seconds, which it gives."""

        def run() -> float:
            self.time += seconds
            return seconds

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def layers_at(rate: float, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three matmuls a layer, of 2 operations for each of their products."""

    def layers(
        dims: microbench.Dims, dtype: object, device: object, layers: int, cold: bool = True
    ) -> Callable[[], float]:
        return clock.takes(layers * 3 * 2 * math.prod(dims) / rate)

    monkeypatch.setattr(microbench, "_layers", layers)


def test_a_layer_is_three_matmuls(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    layers_at(1e11, clock, monkeypatch)
    found = microbench.matmuls(torch.float32, Budget(2.0, CPU))
    assert found.values == pytest.approx((1e11, 0.0)) and not found.rough
    assert clock.time < 2.0


@pytest.mark.parametrize("rate", [1e8, 1e7])
def test_a_slow_matmul_keeps_to_its_budget(
    rate: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest layer would take 36 s, or 360: the rate is that of what was reached in time."""
    layers_at(rate, clock, monkeypatch)
    found = microbench.matmuls(torch.bfloat16, Budget(0.8, CPU), 0.0)
    assert found.values == pytest.approx((rate,))
    assert found.rough.startswith("out of time after ")
    assert clock.time < 1.2


def test_sizes_climb_as_long_as_the_next_one_fits(clock: Clock) -> None:
    """1 s, 2 s, 4 s: the next would take 8, and there are 6 for each. The first calls are three."""
    budget = Budget(100.0, CPU)
    assert microbench.climb(5, lambda step: clock.takes(2.0**step), 2, budget, 6.0) == (2, 4.0)


def test_turns_end_with_the_budget(clock: Clock) -> None:
    """1 + 3, 1 + 3, and 1 of the 9 s is left: the short op has one turn more. The first is left
    out."""
    assert microbench.in_turns([clock.takes(1.0), clock.takes(3.0)], Budget(9.0, CPU)) == [
        [1.0, 1.0],
        [3.0],
    ]


def test_one_turn_in_any_case_unless_it_is_expected_to_be_late(clock: Clock) -> None:
    budget = Budget(1.0, CPU)
    assert microbench.in_turns([clock.takes(5.0)], budget, [5.0]) == [[]]
    assert microbench.in_turns([clock.takes(5.0)], budget) == [[5.0]]


def test_a_busy_machine_has_three_times_as_long(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two processes a core, 2 s on the wall are 1 s of work; and so are 3 s without any."""
    own = 0.0
    monkeypatch.setattr(microbench.time, "thread_time", lambda: own)
    budget = Budget(10.0, CPU, crowd=2.0)
    clock.time, own = 4.0, 2.0
    assert budget.left == 6.0
    clock.time = 15.0
    assert budget.left == 5.0


def test_memory_is_that_of_an_addition_of_three_tensors(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        clock.time += 3 * left.nbytes / 1e9

    monkeypatch.setattr(microbench.torch, "add", add)
    assert microbench.memory(Budget(2.0, CPU)).values == pytest.approx((1e9,))
    late = microbench.memory(Budget(0.05, CPU))
    assert late.values == pytest.approx((1e9,)) and late.rough == "out of time after 4 MiB"


def test_layers_run_forward_and_backward_with_other_weights_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one call: gradients of what comes in, of the bias, and of every layer's weights."""
    places: list[int] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        places.append(weight.data_ptr())
        return x @ weight.T + bias

    monkeypatch.setattr(microbench.F, "linear", linear)
    run = microbench._layers((4, 8, 16), torch.float32, CPU, microbench.LAYERS)
    first, _ = run(), run()
    shapes = [(4, 8), (16,), *[(16, 8)] * microbench.LAYERS]
    assert [tuple(gradient.shape) for gradient in first] == shapes
    assert len({*places}) == 2 * microbench.LAYERS


def test_a_known_half_is_kept() -> None:
    found = [((64, 64, 64), 2 * 64**3 / 1e9)]
    assert microbench.fit(found, 64.0) == pytest.approx((8e9, 64.0))  # an eighth is reached
