"""Sizes as plans write them, and the dtypes beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch

from autopipe.errors import PlanError
from autopipe.ir.graph import BATCH, SEQUENCE
from autopipe.util import dims, dtypes


def test_a_size_as_graphs_have_it() -> None:
    assert dims.parse(5) == 5
    assert dims.parse("2*b") == 2 * BATCH
    assert dims.parse("b*s + 1") == BATCH * SEQUENCE + 1


@pytest.mark.parametrize(
    "entry, size",
    [(5, 5), ("5", 5), ("b", 7), ("2*b", 14), ("b + 1", 8), ("b**2", 49), ("floor(b/2)", 3)],
)
def test_a_size_at_seven_rows(entry: int | str, size: int) -> None:
    assert dims.size_at(entry, 7) == size


@pytest.mark.parametrize(
    "entry",
    [
        # as sympy writes what a graph has: an expression is read as it was written
        BATCH * SEQUENCE / 2 - 1,
        (BATCH + 1) ** 2 / BATCH,
        sympy.floor((BATCH - 3) / 2) + sympy.ceiling(BATCH / 3),
        sympy.Mod(BATCH, 8) * sympy.Max(BATCH, 4) - sympy.Min(3, BATCH),
        -sympy.Abs(BATCH - SEQUENCE) + 0.5 * BATCH,
    ],
    ids=str,
)
def test_an_expression_comes_back_as_it_was_written(entry: sympy.Expr) -> None:
    assert dims.parse(str(entry)) == entry


def test_a_size_executes_nothing(tmp_path: Path) -> None:
    """Plans are passed on: to look at one (`autopipe explain`) must be safe, whoever wrote it."""
    made = tmp_path / "made"
    for text in (
        f"__import__('pathlib').Path({str(made)!r}).touch() or b",
        f"open({str(made)!r}, 'w') and b",
        "b.__class__",
        "[b for b in (1, 2)][0]",
        "lambda: b",
    ):
        with pytest.raises(PlanError, match="is no expression in b"):
            dims.parse(text)
    assert not made.exists()


@pytest.mark.parametrize(
    "entry",
    ["rows", "2*", "", "b/2", "b*s", "b, 2", "None", "True", "9**9**9", "Mod(b, 0)", "-" * 5000],
)
def test_what_is_no_size_is_refused(entry: str) -> None:
    with pytest.raises(PlanError, match="is no expression in b, the rows of a micro-batch"):
        dims.size_at(entry, 7)


def test_a_size_is_read_in_no_time() -> None:
    """Bug: powers of powers were computed, and to read such a plan took hours."""
    with pytest.raises(PlanError, match="is no expression in b"):
        dims.parse("((((((9**64)**64)**64)**64)**64)**64)*b")
    assert dims.parse("b**2 * 9") == 9 * BATCH**2


def test_the_bytes_of_every_dtype_are_torchs() -> None:
    """Those with a kernel of their own; quantized ones and bare bits are in no graph."""
    found = {dtypes.name_of(d): d.itemsize for d in vars(torch).values() if type(d) is torch.dtype}
    few_bits = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    expected = {
        name: size
        for name, size in found.items()
        if not name.startswith(("q", "bits")) and name not in few_bits
    }
    assert {name: size for name, size in dtypes.BYTES.items() if name in found} == expected


def test_an_unknown_dtype_is_refused() -> None:
    assert dtypes.bytes_of("bfloat16") == 2
    with pytest.raises(PlanError, match="plan: 'float12' is no dtype whose size is known") as said:
        dtypes.bytes_of("float12")
    assert "float32" in (said.value.hint or "")
