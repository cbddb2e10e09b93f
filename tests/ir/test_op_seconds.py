"""The roofline by hand: a kernel takes as long as its operations or its bytes, and its launch."""

from __future__ import annotations

import pytest

from autopipe.cluster.cluster import Device
from autopipe.ir.op_seconds import kernel_seconds, reached

DEVICE = Device("made up", 2**30, {"fp32": 1e9, "bf16": 4e9}, 1e8, 1e-3, "round numbers", half=64.0)


def test_a_dim_of_half_the_device_halves_the_rate_and_each_dim_counts() -> None:
    assert reached((), 64.0) == 1.0
    assert reached((64,), 64.0) == 1 / 2
    assert reached((64, 64, 64), 64.0) == 1 / 8
    assert reached((192, 64, 64), 64.0) == 3 / 16
    assert reached((5, 7, 9), 0.0) == 1.0, "a device whose tiles have no edges"
    assert reached((64_000,) * 3, 64.0) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("flops", "size", "dtype", "seconds"),
    [
        (1e9, 1e6, "fp32", 1.0 + 1e-3),  # the operations: 1 s, the bytes 10 ms
        (1e9, 1e6, "bf16", 0.25 + 1e-3),
        (1e6, 1e8, "fp32", 1.0 + 1e-3),  # the bytes: 1 s, the operations 1 ms
        (1e6, 1e8, "bf16", 1.0 + 1e-3),
        (0, 0, "fp32", 1e-3),
    ],
)
def test_the_slower_of_both_and_a_launch(
    flops: float, size: float, dtype: str, seconds: float
) -> None:
    assert kernel_seconds(DEVICE, dtype, flops, size) == pytest.approx(seconds)


def test_a_small_matmul_is_slower_than_its_operations_and_no_more_bytes() -> None:
    """(64, 64) @ (64, 64): 2 * 64^3 operations at an eighth of the rate; bytes move as ever."""
    flops = 2 * 64**3
    found = kernel_seconds(DEVICE, "fp32", flops, 3 * 64 * 64 * 4, (64, 64, 64))
    assert found == pytest.approx(8 * flops / 1e9 + 1e-3)
    assert kernel_seconds(DEVICE, "fp32", flops, 1e8, (64, 64, 64)) == pytest.approx(1.0 + 1e-3)


def test_every_launch_counts() -> None:
    assert kernel_seconds(DEVICE, "fp32", 1e9, 0, launches=5) == pytest.approx(1.0 + 5e-3)
