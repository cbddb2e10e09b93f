"""Bytes of a plan: low precision, blocks that run again, sharded states."""

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from torch import nn

from autopipe import AutopipeError
from autopipe.planners.costs import stage_memory
from autopipe.schedules.instructions import Kind
from tests.support.gpt_plans import CASE, parts, planned
from tests.support.inprocess import machine, traced
from tests.support.long import LONG
from tests.support.models import LENGTH, VOCABULARY

pytestmark = pytest.mark.usefixtures("traces_remembered")


def test_mixed_precision() -> None:
    """What matrix products make is kept and sent in two bytes; a step has copies of weights."""
    low, wide = (
        planned(pp=2, micro_batches=4, precision=precision, planner="uniform")
        for precision in ("bf16-autocast", "fp32")
    )
    assert low.precision == "bf16-autocast"
    for before, after in zip(wide.stages, low.stages, strict=True):
        one, other = before.predicted, after.predicted
        assert other.memory.activations < one.memory.activations
        # A copy in half the bytes of every weight that goes to a matrix product, of no embedding.
        copies = other.memory.copies
        assert 0 < copies < one.memory.parameters / 2
        assert (other.memory.gradients, other.memory.optimizer) == (
            one.memory.gradients, one.memory.optimizer,
        )  # fmt: skip
        assert other.forward_seconds < one.forward_seconds


def test_what_a_matrix_product_sends_is_sent_in_low_precision() -> None:
    """Cut where blocks.1 has widened: what crosses in bf16, and the residual stream in fp32."""
    plans = {
        precision: planned(pp=2, schedule="interleaved", micro_batches=4, precision=precision)
        for precision in ("fp32", "bf16-autocast", *["fp16-autocast"] * LONG)
    }
    dtypes = {
        precision: {t.name: t.dtype for stage in plan.stages for t in stage.sends}
        for precision, plan in plans.items()
    }
    assert set(dtypes["fp32"].values()) == {"float32"}
    for precision, low in (("bf16-autocast", "bfloat16"), ("fp16-autocast", "float16")):
        for name, dtype in dtypes.get(precision, {}).items():
            assert dtype == ("float32" if "/add/" in name or "norm" in name else low), name
    taken = {t.name: t.dtype for stage in plans["bf16-autocast"].stages for t in stage.receives}
    assert taken == dtypes["bf16-autocast"]


def test_blocks_that_run_again() -> None:
    """They keep their arguments alone, and backward takes a forward more."""
    usual = planned(pp=1, dp=1, micro_batches=4)
    for recompute in ("all", "blocks.0", [f"blocks.{n}" for n in range(4)]):
        again = planned(pp=1, dp=1, micro_batches=4, recompute=recompute)  # a class is all of them
        (stage,), (before,) = again.stages, usual.stages
        assert stage.recompute == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
        assert stage.predicted.memory.activations < before.predicted.memory.activations
        assert stage.predicted.forward_seconds == before.predicted.forward_seconds
        assert stage.predicted.backward_seconds > before.predicted.backward_seconds * 1.2
    some = planned(pp=2, dp=1, micro_batches=4, recompute=["blocks.1", "blocks.3"])
    assert {block for stage in some.stages for block in stage.recompute} == {"blocks.1", "blocks.3"}


def test_zero_1_deals_out_optimizer_state() -> None:
    """Rows are dealt out; each of this model's parameters has an even number of them."""
    shape: dict[str, Any] = {"cluster": machine(4), "pp": 2, "dp": 2, "planner": "uniform"}
    usual, dealt = (planned(**shape, zero=zero) for zero in (0, 1))
    assert dealt.zero == 1
    assert parts(dealt, "optimizer") == [size // 2 for size in parts(usual, "optimizer")]
    for name in ("parameters", "gradients", "buffers", "activations", "transfers"):
        assert parts(dealt, name) == parts(usual, name)


@pytest.mark.long
def test_zero_1_deals_out_masters() -> None:
    """All have what forward reads, in 16 bits, and each its rows of the masters."""
    shape: dict[str, Any] = {"cluster": machine(4), "pp": 2, "dp": 2, "planner": "uniform"}
    usual, dealt = (planned(**shape, zero=zero, precision="bf16") for zero in (0, 1))
    for name in ("parameters", "optimizer"):
        assert parts(dealt, name) == [size // 2 for size in parts(usual, name)]
    for name in ("copies", "gradients", "buffers", "activations", "transfers"):
        assert parts(dealt, name) == parts(usual, name)


def test_gradients_of_16_bits_are_half_as_large() -> None:
    """They are cast when activations are gone, which here were less; a sum sends half."""
    shape: dict[str, Any] = {"pp": 1, "micro_batches": 1, "precision": "bf16"}
    wide, low = (planned(**shape, dp=2, zero=0, grad_dtype=dtype) for dtype in ("fp32", "bf16"))
    assert (wide.grad_dtype, low.grad_dtype) == ("fp32", "bf16")
    assert parts(low, "gradients") == [size // 2 for size in parts(wide, "gradients")]
    for name in ("parameters", "optimizer", "copies", "activations"):
        assert parts(low, name) == parts(wide, name)
    few = planned(**shape, grad_dtype="bf16", cluster=machine(1), dp=1, batch_size=1).stages[0]
    assert few.predicted.fullest == "0STEP"
    memory = few.predicted.memory
    assert memory.passing + memory.activations == memory.gradients
    sent = sum(p.numel() for p in CASE.model().parameters()) * 2  # half of 2 (n - 1) / n of it
    steps = [plan.prediction.step_seconds for plan in (wide, low)]
    assert steps[0] - steps[1] > 0.9 * sent / 1e9


@pytest.mark.long
def test_an_optimizer_of_16_bits_has_no_masters() -> None:
    usual, low = (
        planned(pp=2, micro_batches=2, precision="bf16", optimizer_dtype=dtype)
        for dtype in ("fp32", "bf16")
    )
    assert (low.optimizer_dtype, low.grad_dtype, low.masters) == ("bf16", "bf16", False)
    for name in ("parameters", "gradients", "optimizer"):
        assert parts(low, name) == [size // 2 for size in parts(usual, name)]
    assert parts(low, "copies") == [0, 0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"precision": "bf16", "grad_dtype": "fp16"},
            "grad_dtype=fp16 was asked for under the precision bf16, which has fp32 or bf16",
        ),
        (
            {"precision": "bf16-autocast", "optimizer_dtype": "bf16"},
            "optimizer_dtype=bf16 was asked for under the precision bf16-autocast, which has fp32",
        ),
        (
            {"precision": "bf16", "optimizer_dtype": "bf16", "grad_dtype": "fp32"},
            "optimizer_dtype=bf16 and grad_dtype=fp32 were asked for: an optimizer takes gradients",
        ),
    ],
)
def test_dtypes_that_do_not_go_together(words: dict[str, str], sentence: str) -> None:
    with pytest.raises(AutopipeError, match=re.escape(sentence)):
        planned(**words)


def test_zero_3_deals_out_everything_and_gathers_what_runs() -> None:
    """A block, the table that the next one comes in, and a rank's rows of it: 2 1/2 blocks."""
    usual, dealt = (planned(pp=1, dp=2, micro_batches=2, zero=zero) for zero in (0, 3))
    assert dealt.zero == 3
    for name in ("gradients", "optimizer"):
        assert parts(dealt, name) == [size // 2 for size in parts(usual, name)]
    sizes = {n: p.numel() * 4 for n, p in CASE.model().named_parameters()}
    blocks = [sum(sizes[n] for n in sizes if n.startswith(f"blocks.{k}.")) for k in range(4)]
    assert parts(dealt, "parameters") == [sum(sizes.values()) // 2]
    assert parts(dealt, "copies") == [max(blocks) * 5 // 2]
    # Each forward gathers, each backward gathers and scatters: half a ring, and what a table takes.
    half = sum(sizes.values()) * (1 / 2 / 1e9 + 3 / dealt.cluster.copying) + 1e-4
    (before,), (after,) = usual.stages, dealt.stages
    more = after.predicted.forward_seconds - before.predicted.forward_seconds
    assert more == pytest.approx(half)
    more = after.predicted.backward_seconds - before.predicted.backward_seconds
    assert more == pytest.approx(2 * half)


def test_the_instruction_at_which_a_device_is_fullest() -> None:
    """Of one row less is kept than the bucket takes of summed gradients, of 8 rows more."""
    shape: dict[str, Any] = {"pp": 1, "dp": 2, "micro_batches": 1}
    few, many = (planned(batch_size=rows, **shape).stages[0].predicted for rows in (2, 16))
    assert (few.fullest, many.fullest) == ("0REDUCE", "0F0")
    assert few.memory.activations + few.memory.passing == few.memory.gradients  # one bucket
    assert many.memory.passing == 2 * 8 * LENGTH * VOCABULARY * 4  # gradients of the loss's logits
    (first, last) = planned(pp=2, micro_batches=4, schedule="1f1b").stages
    assert (first.predicted.fullest, last.predicted.fullest) == ("0F1", "1B1")


def test_a_parameter_larger_than_a_bucket_is_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a bucket for itself, beside what is left of the activations: nothing here."""
    plan, graph = planned(pp=1, dp=2, micro_batches=1), traced("gpt")[0].graph
    largest = max(4 * p.numel() for p in CASE.model().parameters())
    monkeypatch.setattr(stage_memory, "BUCKET_BYTES", largest - 1)
    found = stage_memory.passing(graph, graph.states, Counter(), 0, plan, compiled=False)
    assert found == (largest, Kind.REDUCE)


def test_zero_3_gathers_masters_in_sixteen_bits() -> None:
    """Half of the bytes that are scattered, which are of fp32."""
    usual, dealt = (
        planned(pp=1, dp=2, micro_batches=2, zero=zero, precision="bf16") for zero in (0, 3)
    )
    sizes = {n: p.numel() * 4 for n, p in CASE.model().named_parameters()}
    blocks = [sum(sizes[n] for n in sizes if n.startswith(f"blocks.{k}.")) for k in range(4)]
    whole = sum(sizes.values())
    assert parts(usual, "parameters") == [whole] and parts(usual, "copies") == [whole // 2]
    assert parts(dealt, "parameters") == [whole // 2]
    assert parts(dealt, "copies") == [max(blocks) // 2 * 5 // 2]
    assert parts(dealt, "activations") == parts(usual, "activations")
    (before,), (after,) = usual.stages, dealt.stages
    more = after.predicted.forward_seconds - before.predicted.forward_seconds
    of_a_byte = 1 / 2 / 1e9 + 3 / dealt.cluster.copying
    assert more == pytest.approx(whole / 2 * of_a_byte + 1e-4)
    more = after.predicted.backward_seconds - before.predicted.backward_seconds
    assert more == pytest.approx((whole / 2 + whole) * of_a_byte + 2e-4)


def test_without_replicas_zero_3_holds_what_zero_0_does() -> None:
    usual, dealt = (planned(pp=2, dp=1, micro_batches=4, zero=zero) for zero in (0, 3))
    assert [stage.predicted for stage in dealt.stages] == [s.predicted for s in usual.stages]
    assert min(parts(dealt, "passing")) > 0


@pytest.mark.long
def test_under_zero_3_copies_come_and_go_with_what_they_are_of() -> None:
    """A gathered parameter is let go of, and so is its copy in bf16, which no micro-batch keeps."""
    shape: dict[str, Any] = {"cluster": machine(4), "pp": 2, "dp": 2, "micro_batches": 4}
    low, sharded, wide = (
        planned(precision=precision, zero=zero, planner="uniform", **shape)
        for precision, zero in (("bf16-autocast", 0), ("bf16-autocast", 3), ("fp32", 3))
    )
    assert parts(sharded, "activations") == parts(low, "activations")
    layers = [part for part in CASE.model().blocks[0].modules() if isinstance(part, nn.Linear)]
    copied = sum(2 * p.numel() for layer in layers for p in layer.parameters())
    more = np.subtract(parts(sharded, "copies"), parts(wide, "copies"))
    assert more.tolist() == [copied, copied]
