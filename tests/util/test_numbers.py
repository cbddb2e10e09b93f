"""Bytes, seconds, shares and counts as they are printed for people."""

from __future__ import annotations

from decimal import Decimal

import pytest

from autopipe.util.numbers import Amount, count, gigabytes, memory, percent, ranges, seconds

GIB = 2**30


def test_bytes_in_one_unit() -> None:
    assert Amount(16 * GIB).of(18.3 * GIB) == "18.3 GiB"
    assert Amount(900 * 2**20)(2**30) == "1024.0"
    assert Amount(100).of(101) == "101 bytes"


@pytest.mark.parametrize(
    "sizes, printed",
    [
        ((8.0, 1.25), ["8.0", "1.2"]),  # 9.25 is printed as 9.2
        ((0.04, 0.04, 0.04), ["0.1", "0.0", "0.0"]),  # 0.12 is printed as 0.1
        ((1.26, 1.29, 1.28, 0.0), ["1.2", "1.3", "1.3", "0.0"]),  # 3.83 is printed as 3.8
        ((2.0, 3.0), ["2.0", "3.0"]),
    ],
)
def test_parts_add_up_to_the_sum_as_it_is_printed(
    sizes: tuple[float, ...], printed: list[str]
) -> None:
    amount = Amount(GIB)
    parts = [size * GIB for size in sizes]
    assert amount.adding_up(parts) == printed
    assert sum(map(Decimal, printed)) == Decimal(amount(sum(parts)))


def test_bytes_in_the_unit_that_suits_them() -> None:
    sizes = (0, 1, 640, 7.5 * 2**20, 46351791917, 3 * 2**40)
    assert [memory(size) for size in sizes] == [
        *("0 bytes", "1 byte", "640 bytes", "7.5 MiB", "43.2 GiB", "3.0 TiB"),
    ]


def test_bytes_on_a_link_are_in_powers_of_ten() -> None:
    assert [gigabytes(size) for size in (350e6, 4.25e9)] == ["350.0 MB", "4.2 GB"]


def test_a_limit_is_rounded_up_so_that_what_is_printed_is_enough() -> None:
    assert Amount(16 * GIB).ceiling(17 * GIB + 1) == "17.1 GiB"
    assert Amount(16 * GIB).ceiling(17 * GIB) == "17.0 GiB"


def test_shares() -> None:
    assert [percent(ratio) for ratio in (0.004, 0.0994, 0.0999, 0.5, -1e-17)] == [
        *("0.4 %", "9.9 %", "10 %", "50 %", "0.0 %"),
    ]


def test_seconds() -> None:
    assert [seconds(s) for s in (0.0, 4.2e-7, 5e-6, 263e-6, 0.0015, 0.0123, 2.0, 2.343)] == [
        *("0 s", "0.42 us", "5 us", "263 us", "1.5 ms", "12.3 ms", "2 s", "2.34 s"),
    ]


def test_seconds_change_their_unit_before_they_have_four_digits() -> None:
    assert [seconds(s) for s in (0.0009994, 0.0009996, 0.9996, 999.4, 999.6, 123456.0)] == [
        *("999 us", "1 ms", "1 s", "999 s", "1,000 s", "123,456 s"),
    ]


def test_counts() -> None:
    assert count(1, "row") == "1 row"
    assert count(0, "row") == "0 rows"
    assert count(2, "micro-batch", "micro-batches") == "2 micro-batches"
    assert count(16000, "device") == "16,000 devices"


def test_numbers_that_follow_each_other_are_folded() -> None:
    assert ranges([0, 2, 3, 4, 5, 7]) == "0, 2-5, 7"
    assert (ranges([]), ranges([3]), ranges(range(31))) == ("", "3", "0-30")
