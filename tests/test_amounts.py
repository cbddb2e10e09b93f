"""Bytes, shares and seconds as they are printed for people."""

from __future__ import annotations

from autopipe.planners.amounts import Amount, duration, percent

GIB = 2**30


def test_bytes_are_printed_in_one_unit() -> None:
    assert Amount(16 * GIB).of(18.3 * GIB) == "18.3 GiB"
    assert Amount(900 * 2**20)(2**30) == "1024.0"
    assert Amount(100).of(101) == "101 bytes"


def test_a_limit_is_rounded_up_so_that_what_is_printed_is_enough() -> None:
    assert Amount(16 * GIB).ceiling(17 * GIB + 1) == "17.1 GiB"
    assert Amount(16 * GIB).ceiling(17 * GIB) == "17.0 GiB"


def test_shares() -> None:
    assert [percent(ratio) for ratio in (0.004, 0.0994, 0.0999, 0.5, -1e-17)] == [
        *("0.4 %", "9.9 %", "10 %", "50 %", "0.0 %"),
    ]


def test_seconds() -> None:
    assert [duration(s) for s in (2.0, 0.0123, 5e-6, 0.0)] == ["2 s", "12.3 ms", "5 us", "0 us"]
