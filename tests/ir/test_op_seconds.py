"""The roofline by hand: an op takes as long as its operations or its bytes, and its launches."""

from __future__ import annotations

import pytest
import torch

from autopipe.cluster.cluster import Device
from autopipe.ir.op_costs import NodeCost
from autopipe.ir.op_seconds import reached, seconds

DEVICE = Device("made up", 2**30, {"fp32": 1e9, "bf16": 4e9}, 1e8, 1e-3, "round numbers", half=64.0)


def forward(
    flops: int,
    size: int,
    dims: tuple[int, ...] = (),
    launches: int = 1,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Seconds of an op that computes and moves so much, on the device."""
    cost = NodeCost(flops, size, 0, 0, (launches, 0), dtype, dims)
    there, back = seconds([cost], 1, DEVICE)
    assert back == 0
    return float(there[0])


def test_a_dim_of_half_the_device_halves_the_rate_and_each_dim_counts() -> None:
    assert reached((), 64.0) == 1.0
    assert reached((64,), 64.0) == 1 / 2
    assert reached((64, 64, 64), 64.0) == 1 / 8
    assert reached((192, 64, 64), 64.0) == 3 / 16
    assert reached((5, 7, 9), 0.0) == 1.0, "a device whose tiles have no edges"
    assert reached((4, 0, 16), 0.0) == 1.0, "without a column nothing is multiplied"
    assert reached((64_000,) * 3, 64.0) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("flops", "size", "dtype", "expected"),
    [
        (10**9, 10**6, torch.float32, 1.0 + 1e-3),  # the operations: 1 s, the bytes 10 ms
        (10**9, 10**6, torch.bfloat16, 0.25 + 1e-3),
        (10**6, 10**8, torch.float32, 1.0 + 1e-3),  # the bytes: 1 s, the operations 1 ms
        (10**6, 10**8, torch.bfloat16, 1.0 + 1e-3),
        (0, 0, torch.float32, 1e-3),
    ],
)
def test_the_slower_of_both_and_a_launch(
    flops: int, size: int, dtype: torch.dtype, expected: float
) -> None:
    assert forward(flops, size, dtype=dtype) == pytest.approx(expected)


def test_a_small_matmul_is_slower_than_its_operations_and_no_more_bytes() -> None:
    """(64, 64) @ (64, 64): 2 * 64^3 operations at an eighth of the rate; bytes move as ever."""
    flops = 2 * 64**3
    found = forward(flops, 3 * 64 * 64 * 4, (64, 64, 64))
    assert found == pytest.approx(8 * flops / 1e9 + 1e-3)
    assert forward(flops, 10**8, (64, 64, 64)) == pytest.approx(1.0 + 1e-3)


def test_every_launch_counts() -> None:
    assert forward(10**9, 0, launches=5) == pytest.approx(1.0 + 5e-3)
