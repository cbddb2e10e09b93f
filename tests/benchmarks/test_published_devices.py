"""Published runs: the devices and links that a row names, and what its software means for them."""

import pytest

from autopipe.cluster import datasheets, efficiency, spec
from autopipe.cluster.cluster import Cluster
from autopipe.ir.op_costs import CAUSAL_ATTENTION
from benchmarks.published.cluster import (
    FLASH1,
    ON_HOPPER,
    cluster_of,
    kind_of,
    with_early_kernels,
    with_flash1,
)
from benchmarks.published.rows import Unsupported, read
from tests.support.published_rows import row


@pytest.mark.parametrize(
    ("gpu", "kind"),
    [
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),  # not 10080 GB
        ("H100-96GB-HBM2e (500W, 2.4TB/s)", "H100-96GB"),
        ("H100 PCIe", "H100-PCIe-80GB"),
        ("A800-SXM4-80GB", "A800-80GB"),
        ("GeForce RTX 4090", "RTX4090"),
        ("GeForce RTX 5090", "RTX5090"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("A10G", "A10G"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("GB200", "GB200"),
        ("NVIDIA DGX-H100", "H100-80GB"),
        ("AMD Instinct MI250X", "MI250X"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("A6000", "RTXA6000"),
    ],
)
def test_a_device_is_found_by_any_of_its_names(gpu: str, kind: str) -> None:
    assert kind_of(gpu, None) == kind


def test_an_unknown_device_is_said() -> None:
    for name in ("TPU v4", "T40"):  # which is no T4
        with pytest.raises(Unsupported, match=f"device {name}"):
            kind_of(name, None)


def test_nvlink_joins_a_rack_of_gb200() -> None:
    assert cluster_of("GB200", None, 128, 4, "", "").devices_per_node == [64, 64]
    assert cluster_of("H200", None, 8, 4, "", "").devices_per_node == [4, 4]


def test_links_are_those_that_the_row_counts() -> None:
    """4 links of 25 GB/s between two devices, where a switch would give all 12; of a node's 4
    adapters of 100 Gbit/s a device has a share; 0.88 of a link is reached."""
    few = cluster_of("A100", None, 16, 8, "NVLink3 (4 links inter-GPU)", "4x100Gb/s")
    assert few.within.bandwidth == pytest.approx(0.88 * 4 * 25e9)
    assert few.between.bandwidth == pytest.approx(0.88 * 4 * 100e9 / 8 / 8)


def test_kernels_that_know_no_hopper_are_slower_there() -> None:
    """FlashAttention 1 has the same share of A100's peak as it had when it was measured there."""
    for kind, left in (("A100-80GB", 1.0), ("H100-80GB", ON_HOPPER)):
        cluster = spec.parse(f"1x{kind}")
        assert isinstance(cluster, Cluster)
        device = cluster.row[0]
        peak = datasheets.DEVICES[kind].flops["bf16"]
        pace = with_flash1(device).kernels[CAUSAL_ATTENTION].forward
        in_16_bits = pace.rate * device.flops["bf16"] / device.flops["fp32"]
        assert in_16_bits == pytest.approx(left * FLASH1[0] * peak)
        slower = with_early_kernels(device).flops["bf16"] / device.flops["bf16"]
        fitted = efficiency.STEADY_NEWER / efficiency.STEADY
        assert slower == pytest.approx(1.0 if left == 1.0 else fitted)


def test_what_nemo_does_is_known_of_its_rows() -> None:
    """Gradients in 16 bits, and exchanges beside the matmuls; Megatron-LM's sums are in fp32."""
    nemo, megatron = read(row(framework="NeMo 24.09")), read(row(framework="Megatron-LM"))
    assert nemo.low_gradients and nemo.software.overlaps
    assert not megatron.low_gradients and not megatron.software.overlaps
    assert read(row(notes="--tp-comm-overlap")).software.overlaps
    scaling = {"source": "NVIDIA/Megatron-LM README, weak scaling"}
    hopper = read(row(**scaling, gpu="H100-SXM5-80GB")).software
    assert hopper.sums and hopper.overlaps and not read(row(**scaling)).software.sums
    assert nemo.software.sums and not megatron.software.sums
    assert megatron.dropout and not read(row(model="Nemotron4-15B")).dropout


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("flash_attentionv1.0.8", "flash1"),
        ("FlashAttention 1", "flash1"),
        ("flash_attention2 + RMS kernel", "flash"),
        ("flash-attn 2.1", "flash"),
        ("flash (SDPA)", "flash"),
        ("unfused (pre-flash)", "fused"),
        ("torch", "composed"),
    ],
)
def test_what_is_said_of_attention(text: str, read_as: str) -> None:
    assert read(row(attention=text)).attention == read_as


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("", "none"),
        ("0", "none"),
        ("selective", "attention"),
        ("core_attn", "attention"),
        ("selective layer", "alternate"),
        ("selective op", "elementwise"),
        ("true", "full"),
        ("full, uniform 1", "full"),
    ],
)
def test_what_is_said_of_recomputation(text: str, read_as: str) -> None:
    assert read(row(recompute=text)).recompute == read_as
