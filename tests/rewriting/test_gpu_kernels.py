"""Which tensors are saved for backward where a GPU has one kernel and a CPU several ops."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.ir.torch_private import fake_mode
from autopipe.rewriting.for_gpus import for_gpus
from autopipe.rewriting.gpu_kernels import kernel_of
from tests.support.inprocess import machine
from tests.support.remembered import traces_remembered

aten = torch.ops.aten
FP32, BF16 = torch.float32, torch.bfloat16
B, H, S, T, D = 2, 4, 8, 16, 32


def kept(
    op: Callable[..., Tensor], *args: object, gpus: bool = True
) -> Counter[tuple[object, ...]]:
    """(dtype, *shape) of what a call saves beside tensors of no or two elements."""
    found: Counter[tuple[object, ...]] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() > 2:  # seeds of a kernel's random numbers
            found[tensor.dtype, *tensor.shape] += 1
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with for_gpus(gpus), hooks:
        made = kernel_of(op)(*args)
    made.sum().backward()  # the saved tensors are all that its backward wants
    return found


def leaf(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def heads(dtype: torch.dtype, width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value"""
    return leaf(B, H, S, D, dtype=dtype), leaf(B, H, T, D, dtype=dtype), leaf(B, H, T, width)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_dropout_keeps_a_byte_an_element(dtype: torch.dtype) -> None:
    with fake_mode():
        args = leaf(3, 5, dtype=dtype), 0.1, True
        assert kept(aten.dropout.default, *args) == {(torch.bool, 3, 5): 1}
        assert kept(aten.dropout.default, *args, gpus=False) == {(dtype, 3, 5): 1}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_rms_norm_keeps_its_argument_and_its_weight(dtype: torch.dtype) -> None:
    with fake_mode():
        args = leaf(3, 5, dtype=dtype), [5], leaf(5, dtype=dtype), None
        found = kept(aten.rms_norm.default, *args)
        assert {look: n for look, n in found.items() if look[1:] != (3, 1)} == {
            (dtype, 3, 5): 1,
            (dtype, 5): 1,
        }
        assert kept(aten.rms_norm.default, *args, gpus=False)[FP32, 3, 5] == 3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("case", ["dropout", "learned mask", "other width"])
def test_attention_keeps_no_scores(case: str, dtype: torch.dtype, causal: bool) -> None:
    """Its arguments, its result and a number a row: on a CPU at least two [b, h, s, t]."""
    with fake_mode():
        width = 2 * D if case == "other width" else D
        query, key, _ = heads(dtype)
        value = leaf(B, H, T, width, dtype=dtype)
        mask = leaf(1, H, S, T, dtype=dtype) if case == "learned mask" and not causal else None
        args = query, key, value, mask, 0.1 if case == "dropout" else 0.0, causal
        found = kept(aten.scaled_dot_product_attention.default, *args)
        rows = found[FP32, B, H, S] + found[FP32, B, H, 32]  # 32 is where one kernel rounds to
        assert found[dtype, B, H, S, width] >= 1 and rows == 1
        scores = [look for look in found if look[-2:] == (S, T)]
        assert len(scores) == (mask is not None)  # the mask itself
        if mask is not None or not causal:
            written_out = kept(aten.scaled_dot_product_attention.default, *args, gpus=False)
            assert sum(n for look, n in written_out.items() if look[-2:] == (S, T)) >= 1


class Net(nn.Module):
    """Attention with dropout over 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(128), nn.Linear(128, 384), nn.Linear(128, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(2, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(), dropout_p=0.1, is_causal=True)
        return self.out(self.drop(y.transpose(1, 2).flatten(2)))


def test_a_plan_counts_what_its_devices_keep() -> None:
    """4 x 64 tokens of 128 channels in fp32; compiled stages keep less on both."""
    batch = {"x": torch.randn(4, 64, 128)}

    def loss_of(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.square().mean()

    def planned(cluster: Any, compile: bool) -> int:
        with traces_remembered():
            found = autopipe.plan(
                Net,
                batch,
                loss=loss_of,
                cluster=cluster,
                precision="fp32",
                compile=compile,
                micro_batches=1,
            )
        return found.stages[0].predicted.memory.activations

    tensor, a_row = 4 * 64 * 128 * 4, 4 * 64 * 4  # bytes
    norm = 2 * a_row  # and its argument, which is the batch
    attention = 3 * tensor + tensor + 4 * a_row + 2 * 8  # the last a seed and an offset
    last = tensor // 4 + tensor  # dropout's mask, and its result
    loss = tensor // 16
    gpu = norm + tensor + attention + last + loss
    assert planned("1xH100-80GB", False) == gpu
    assert planned(machine(1), False) > gpu + 4 * 4 * 64 * 64 * 4  # the scores of four heads
    assert planned("1xH100-80GB", True) < planned(machine(1), True)
