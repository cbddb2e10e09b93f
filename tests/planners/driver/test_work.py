"""The model FLOPs in a plan, and the seconds of its stages by cause."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe import Plan
from autopipe.cluster import spec
from autopipe.cluster.cluster import Cluster, Device
from autopipe.planners.driver.work import work
from tests.support.zoo import ZOO

pytestmark = pytest.mark.usefixtures("traces_remembered")

B, S, H, V = 8, 16, 32, 64  # rows, tokens of a row, width, vocabulary


class Attending(nn.Module):
    """An embedding, one causal attention of two heads, and a vocabulary's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.qkv = nn.Linear(H, 3 * H)
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.embed(tokens)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(self.norm(y)).flatten(0, 1), tokens.flatten())


def tokens(rows: int = B) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(rows, S, dtype=torch.long)}


def planned(model: Any, inputs: Any, **options: Any) -> Plan:
    return autopipe.plan(model, inputs, **{"cluster": "1xA100-80GB", **options})


ATTENDING = 3 * (2 * B * S * H * 3 * H + 2 * B * S * H * V + 2 * (2 * B * S * S * H) // 2)
"""A forward and twice as much in backward: q, k, v; logits; scores and their sum, half of them."""


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("precision", "dtype", "peak"),
    [("bf16", "bf16", 312e12), ("fp16-autocast", "fp16", 312e12), ("fp32", "fp32", 19.5e12)],
)
def test_the_operations_of_a_small_model(precision: str, dtype: str, peak: float) -> None:
    """By hand. What attention's backward computes again is not counted, nor is a norm."""
    found = planned(Attending, tokens, batch_size=B, precision=precision).work
    assert found is not None
    assert (found.flops, found.tokens) == (ATTENDING, B * S)
    assert (found.dtype, found.peak, found.measured) == (dtype, peak, False)


class Flattening(Attending):
    """As GPT-2 and OPT begin: the embedding looks up a view of the tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.view(-1, tokens.shape[-1]))


def test_tokens_are_counted_that_are_looked_up_as_a_view() -> None:
    found = planned(Flattening, tokens, batch_size=B).work
    assert found is not None and found.tokens == B * S


@pytest.mark.long
def test_recomputation_adds_no_operations_of_the_model() -> None:
    case = ZOO["gpt"]
    plain, again = (
        planned(case.model, case.inputs, loss=case.loss, batch_size=8, recompute=what)
        for what in ("none", "all")
    )
    assert again.stages[0].recompute and plain.work == again.work


def test_tensor_parallel_ranks_change_no_operations_of_the_model() -> None:
    """All peaks together are those of two devices; the norm and what is not sharded count once."""
    found = planned(Attending, tokens, batch_size=B, cluster="2xA100-80GB", tp=2).work
    assert found is not None
    assert (found.flops, found.peaks) == (ATTENDING, (2 * 312e12,))


def test_rows_of_images_have_no_tokens() -> None:
    found = planned(
        lambda: nn.Conv2d(3, 4, 3),
        lambda rows: {"input": torch.ones(rows, 3, 16, 16)},
        loss=lambda outputs, batch: outputs.square().mean(),
        batch_size=4,
        precision="fp32",
    ).work
    assert found is not None and found.flops > 0
    assert found.tokens == 0


def test_peaks_are_measured_where_one_device_has_no_datasheet() -> None:
    a100 = spec.parse("1xA100-80GB")
    assert isinstance(a100, Cluster)
    (known,) = a100.devices
    own = Device("mine", 2**30, {"fp32": 2e12}, 1e12, 0.0, "measured")
    flops = Counter({"fp32": 10.0, "bf16": 1.0})
    found = work(flops, [[known], [own, own]], 0)
    assert found is not None
    assert found.measured
    assert found.peaks == (known.flops["fp32"], 4e12)
    assert (found.flops, found.dtype) == (11.0, "fp32")
    assert work(Counter(), [[own]], 0) is None, "a model that multiplies no matrices"


def test_a_peak_is_no_less_than_what_matmuls_reach() -> None:
    """Bug: with TF32 allowed an A100 had an MFU of 537 %, of the datasheet's 19.5 TFLOP/s."""
    device = Device("A100-80GB", 2**30, {"fp32": 1.2e14}, 1e12, 0.0, "measured")
    found = work(Counter({"fp32": 1.0}), [[device]], 0)
    assert found is not None and found.peaks == (1.2e14,) and found.measured


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize(
    "options",
    [
        {"cluster": "4xA100-80GB", "pp": 2, "tp": 2, "micro_batches": 2},
        {"cluster": "2xA100-80GB", "pp": 2, "micro_batches": 2, "recompute": "all"},
        {"cluster": "2xA100-80GB", "pp": 1, "dp": 2, "zero": 3},
        {"cluster": "1xA100-80GB+1xA100-40GB", "pp": 2, "precision": "bf16-autocast"},
    ],
)
def test_what_stages_spend_adds_up_to_their_seconds(options: dict[str, Any]) -> None:
    case = ZOO["gpt"]
    plan = planned(case.model, case.inputs, loss=case.loss, batch_size=8, **options)
    for stage in plan.stages:
        found = stage.predicted
        assert found.spent is not None
        both = found.forward_seconds + found.backward_seconds
        assert found.spent.seconds == pytest.approx(both, rel=1e-9)
        assert found.spent.matmuls > 0 and found.spent.other_ops > 0 and found.spent.launches > 0
        assert (found.spent.recompute > 0) == bool(stage.recompute)
        assert (found.spent.exchange > 0) == (plan.mesh.tp > 1)
        assert found.spent.gathering == 0 or plan.fully_sharded  # a GPU may hide it
