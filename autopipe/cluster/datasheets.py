"""What datasheets say about devices and links; `cluster.efficiency` has the share that is reached.

In datasheets a TB is 1e12 bytes and a TFLOP 1e12 operations, never powers of two; the "80GB" of a
name are nearly 80 GiB. Peaks are dense: the figures printed for tensor cores are often twice as
high, for matrices half of which is zero. `autopipe probe` measures instead of reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from autopipe.cluster.cluster import Device
from autopipe.cluster.efficiency import (
    GIB,
    MATMUL_SHARE,
    STEADY,
    STEADY_A100,
    STEADY_NEWER,
    usable,
)


@dataclass(frozen=True)
class LinkSheet:
    """A kind of link: seconds of a step of a collective, datasheet bytes a second in one direction.

    `summing` and `gathering` are the bytes a second at most that all-reduces, and all-gathers and
    reduce-scatters were measured to reach; 0: no fewer than other transfers.
    """

    hop: float
    bandwidth: float
    source: str
    summing: float = 0.0
    gathering: float = 0.0

    @property
    def latency(self) -> float:
        """Seconds before the first byte of a message."""
        return _START + self.hop


@dataclass(frozen=True)
class Datasheet:
    """A kind of device, by its datasheet.

    `memory` is in bytes, as `torch.cuda.get_device_properties` reports it: 0.2 to 0.8 GiB below
    the nominal GiB, and another sixteenth below on GDDR6 with error correction (A10, L4, L40, T4).
    `flops` are peaks by dtype, where the device has the dtype; fp32 is without TF32, as torch
    computes unless told otherwise, and fp64 with tensor cores where they have it. GPUs for games
    and inference have 1/64 of fp32's rate (Turing 1/32), which their sheets leave out. `within` and
    `between` name the `LINKS` that join it to a device of its node and of another node in the
    machines it is usually sold in, `host` the one to its host's memory, its own plug.
    `matmul_share` is the share of the peaks that large matmuls reach, `steady` the share of that in
    a long run.
    """

    memory: float
    flops: dict[str, float]
    bandwidth: float
    within: str
    between: str
    host: str
    source: str
    matmul_share: float = MATMUL_SHARE
    steady: float = STEADY


# The seconds are NCCL's own model of a ring with its Simple protocol, the one that point-to-point
# transfers use: 8.4 us, and for each step 3.4 over NVLink, 5.7 over PCIe or 14.0 over a network.
# On A100 it takes no ring for faster than 235 GB/s.
_NCCL = "https://github.com/NVIDIA/nccl/blob/master/src/graph/tuning.cc (baseLat, hwLat, busBw)"
_START, _NVLINK, _PCIE, _NETWORK = 8.4e-6, 3.4e-6, 5.7e-6, 14.0e-6

LINKS: dict[str, LinkSheet] = {
    "NVLink 2": LinkSheet(
        _NVLINK, 150e9, f"https://www.nvidia.com/en-us/data-center/v100/; {_NCCL}"
    ),
    "NVLink 3": LinkSheet(
        _NVLINK,
        300e9,
        f"https://www.nvidia.com/en-us/data-center/a100/; {_NCCL}",
        summing=235e9,
        gathering=235e9,
    ),
    # An all-gather reached 350 GB/s, a reduce-scatter 360; switches sum for an all-reduce.
    "NVLink 4": LinkSheet(
        _NVLINK,
        450e9,
        "https://www.nvidia.com/en-us/data-center/h100/; "
        f"https://github.com/NVIDIA/nccl/issues/1281; {_NCCL}",
        gathering=355e9,
    ),
    "NVLink 5": LinkSheet(
        _NVLINK, 900e9, f"https://www.nvidia.com/en-us/data-center/hgx/; {_NCCL}"
    ),
    # Half of H100's, as reported of the export model.
    "NVLink 4, H800": LinkSheet(_NVLINK, 200e9, f"https://lenovopress.lenovo.com/lp1814; {_NCCL}"),
    "NVLink 3, A800": LinkSheet(_NVLINK, 200e9, f"https://lenovopress.lenovo.com/lp1813; {_NCCL}"),
    # A device's links to all of its node together.
    "Infinity Fabric 3": LinkSheet(
        _NVLINK, 350e9, f"https://www.amd.com/en/products/accelerators/instinct/mi200.html; {_NCCL}"
    ),
    # Three links of a bridge, to which four cards are plugged.
    "Infinity Fabric 3, MI210": LinkSheet(
        _NVLINK,
        150e9,
        f"https://www.amd.com/en/products/accelerators/instinct/mi200/mi210.html; {_NCCL}",
    ),
    "Infinity Fabric 4": LinkSheet(
        _NVLINK, 448e9, f"https://www.amd.com/en/products/accelerators/instinct/mi300.html; {_NCCL}"
    ),
    "Infinity Fabric 4, MI355X": LinkSheet(
        _NVLINK,
        535.5e9,
        f"https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html; {_NCCL}",
    ),
    "PCIe 5 x16": LinkSheet(_PCIE, 63e9, f"https://en.wikipedia.org/wiki/PCI_Express; {_NCCL}"),
    "PCIe 3 x16": LinkSheet(_PCIE, 15.75e9, f"https://en.wikipedia.org/wiki/PCI_Express; {_NCCL}"),
    "PCIe 4 x16": LinkSheet(_PCIE, 31.5e9, f"https://en.wikipedia.org/wiki/PCI_Express; {_NCCL}"),
    # To the memory of the host: 900 GB/s both ways together, of a GB200 for two devices.
    "NVLink-C2C": LinkSheet(
        _PCIE, 450e9, "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/"
    ),
    "NVLink-C2C, half": LinkSheet(
        _PCIE, 225e9, "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
    ),
    # One card a GPU, as in DGX-2 (EDR), DGX A100 (HDR) and DGX H100 (NDR).
    "InfiniBand EDR": LinkSheet(
        _NETWORK, 12.5e9, f"https://en.wikipedia.org/wiki/InfiniBand; {_NCCL}"
    ),
    "InfiniBand HDR": LinkSheet(
        _NETWORK, 25e9, f"https://en.wikipedia.org/wiki/InfiniBand; {_NCCL}"
    ),
    "InfiniBand NDR": LinkSheet(
        _NETWORK, 50e9, f"https://en.wikipedia.org/wiki/InfiniBand; {_NCCL}"
    ),
    "InfiniBand XDR": LinkSheet(
        _NETWORK, 100e9, f"https://en.wikipedia.org/wiki/InfiniBand; {_NCCL}"
    ),
    # One card a node.
    "100 GbE": LinkSheet(
        _NETWORK, 12.5e9, f"https://en.wikipedia.org/wiki/100_Gigabit_Ethernet; {_NCCL}"
    ),
}

DEVICES: dict[str, Datasheet] = {
    "A100-40GB": Datasheet(
        memory=39.4 * GIB,
        flops={"fp32": 19.5e12, "fp64": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        bandwidth=1.555e12,
        within="NVLink 3",
        between="InfiniBand HDR",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/a100/ (SXM)",
        matmul_share=271.2 / 312,
        steady=STEADY_A100,
    ),
    "A100-80GB": Datasheet(
        memory=79.1 * GIB,
        flops={"fp32": 19.5e12, "fp64": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        bandwidth=2.039e12,
        within="NVLink 3",
        between="InfiniBand HDR",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/a100/ (SXM)",
        matmul_share=271.2 / 312,
        steady=STEADY_A100,
    ),
    "A100-PCIe-40GB": Datasheet(
        memory=39.4 * GIB,
        flops={"fp32": 19.5e12, "fp64": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        bandwidth=1.555e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/a100/ (PCIe)",
        matmul_share=252.9 / 312,  # as with 80 GB, which has 300 W and not 250
        steady=STEADY_A100,
    ),
    "A100-PCIe-80GB": Datasheet(
        memory=79.1 * GIB,
        flops={"fp32": 19.5e12, "fp64": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        bandwidth=1.935e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/a100/ (PCIe)",
        matmul_share=252.9 / 312,
        steady=STEADY_A100,
    ),
    "H100-80GB": Datasheet(
        memory=79.1 * GIB,
        flops={"fp32": 67e12, "fp64": 67e12, "bf16": 989e12, "fp16": 989e12},
        bandwidth=3.35e12,
        within="NVLink 4",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.nvidia.com/en-us/data-center/h100/ (SXM)",
        matmul_share=794.5 / 989,
    ),
    "H200": Datasheet(
        memory=139.8 * GIB,
        flops={"fp32": 67e12, "fp64": 67e12, "bf16": 989e12, "fp16": 989e12},
        bandwidth=4.8e12,
        within="NVLink 4",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.nvidia.com/en-us/data-center/h200/ (SXM)",
        matmul_share=794.5 / 989,
    ),
    "V100-32GB": Datasheet(
        memory=31.7 * GIB,
        flops={"fp32": 15.7e12, "fp64": 7.8e12, "fp16": 125e12},
        bandwidth=0.9e12,
        within="NVLink 2",
        between="InfiniBand EDR",
        host="PCIe 3 x16",
        source="https://www.nvidia.com/en-us/data-center/v100/ (SXM2)",
    ),
    "L40S": Datasheet(
        memory=44.4 * GIB,
        flops={"fp32": 91.6e12, "fp64": 91.6e12 / 64, "bf16": 362e12, "fp16": 362e12},
        bandwidth=0.864e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    "L40": Datasheet(
        memory=44.4 * GIB,
        flops={"fp32": 90.5e12, "fp64": 90.5e12 / 64, "bf16": 181e12, "fp16": 181e12},
        bandwidth=0.864e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/l40/",
    ),
    "A10": Datasheet(
        memory=22.0 * GIB,
        flops={"fp32": 31.2e12, "fp64": 31.2e12 / 64, "bf16": 125e12, "fp16": 125e12},
        bandwidth=0.6e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/products/a10-gpu/",
    ),
    "L4": Datasheet(
        memory=22.0 * GIB,
        flops={"fp32": 30.3e12, "fp64": 30.3e12 / 64, "bf16": 121e12, "fp16": 121e12},
        bandwidth=0.3e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/l4/",
    ),
    "T4": Datasheet(
        memory=14.5 * GIB,
        flops={"fp32": 8.1e12, "fp64": 8.1e12 / 32, "fp16": 65e12},
        bandwidth=0.32e12,
        within="PCIe 3 x16",
        between="100 GbE",
        host="PCIe 3 x16",
        source="https://www.nvidia.com/en-us/data-center/tesla-t4/",
    ),
    "RTX4090": Datasheet(
        memory=23.6 * GIB,
        flops={"fp32": 82.6e12, "fp64": 82.6e12 / 64, "bf16": 165.2e12, "fp16": 165.2e12},
        bandwidth=1.008e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    "RTX5090": Datasheet(
        memory=31.3 * GIB,
        flops={"fp32": 104.8e12, "fp64": 104.8e12 / 64, "bf16": 209.5e12, "fp16": 209.5e12},
        bandwidth=1.792e12,
        within="PCIe 5 x16",
        between="100 GbE",
        host="PCIe 5 x16",
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
    ),
    "H100-PCIe-80GB": Datasheet(
        memory=79.1 * GIB,
        flops={"fp32": 51e12, "fp64": 51e12, "bf16": 756e12, "fp16": 756e12},
        bandwidth=2.0e12,
        within="PCIe 5 x16",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.nvidia.com/en-us/data-center/h100/ (PCIe)",
        steady=STEADY_NEWER,
    ),
    "H100-96GB": Datasheet(
        memory=94.5 * GIB,
        flops={"fp32": 67e12, "fp64": 67e12, "bf16": 989e12, "fp16": 989e12},
        bandwidth=2.4e12,
        within="NVLink 4",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://github.com/pytorch/torchtitan/tree/main/benchmarks (96GB HBM2e, 500 W)",
        # Power goes with the cube of the clock: 500 W of H100's 700.
        matmul_share=794.5 / 989 * (500 / 700) ** (1 / 3),
        steady=STEADY_NEWER,
    ),
    "H800-80GB": Datasheet(
        memory=79.1 * GIB,
        flops={"fp32": 67e12, "fp64": 1e12, "bf16": 989e12, "fp16": 989e12},
        bandwidth=3.35e12,
        within="NVLink 4, H800",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://lenovopress.lenovo.com/lp1814 (SXM)",
        matmul_share=794.5 / 989,
    ),
    "B200": Datasheet(
        memory=178.4 * GIB,
        flops={"fp32": 75e12, "fp64": 37e12, "bf16": 2250e12, "fp16": 2250e12},
        bandwidth=8e12,
        within="NVLink 5",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.nvidia.com/en-us/data-center/hgx/ (HGX B200)",
        matmul_share=1745 / 2250,
        steady=STEADY_NEWER,
    ),
    "GB200": Datasheet(
        memory=184.0 * GIB,
        flops={"fp32": 80e12, "fp64": 40e12, "bf16": 2500e12, "fp16": 2500e12},
        bandwidth=8e12,
        within="NVLink 5",
        between="InfiniBand NDR",
        host="NVLink-C2C, half",
        source="https://www.nvidia.com/en-us/data-center/gb200-nvl72/",
        matmul_share=1822 / 2500,
        steady=STEADY_NEWER,
    ),
    "GB300": Datasheet(
        memory=277.0 * GIB,
        flops={"fp32": 80e12, "fp64": 1.3e12, "bf16": 2500e12, "fp16": 2500e12},
        bandwidth=8e12,
        within="NVLink 5",
        between="InfiniBand XDR",
        host="NVLink-C2C, half",
        source="https://www.nvidia.com/en-us/data-center/gb300-nvl72/",
        matmul_share=1822 / 2500,  # that of GB200
        steady=STEADY_NEWER,
    ),
    "B300": Datasheet(
        memory=267.0 * GIB,
        flops={"fp32": 75e12, "fp64": 1.2e12, "bf16": 2250e12, "fp16": 2250e12},
        bandwidth=8e12,
        within="NVLink 5",
        between="InfiniBand XDR",
        host="PCIe 5 x16",
        source="https://www.nvidia.com/en-us/data-center/hgx/ (HGX B300)",
        matmul_share=1769 / 2250,
        steady=STEADY_NEWER,
    ),
    "V100-16GB": Datasheet(
        memory=15.8 * GIB,
        flops={"fp32": 15.7e12, "fp64": 7.8e12, "fp16": 125e12},
        bandwidth=0.9e12,
        within="NVLink 2",
        between="InfiniBand EDR",
        host="PCIe 3 x16",
        source="https://www.nvidia.com/en-us/data-center/v100/ (SXM2)",
    ),
    "A10G": Datasheet(
        memory=22.0 * GIB,
        flops={"fp32": 35e12, "fp64": 35e12 / 64, "bf16": 70e12, "fp16": 70e12},
        bandwidth=0.6e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://aws.amazon.com/ec2/instance-types/g5/",
    ),
    "RTX3090": Datasheet(
        memory=23.6 * GIB,
        flops={"fp32": 35.6e12, "fp64": 35.6e12 / 64, "bf16": 71e12, "fp16": 71e12},
        bandwidth=0.936e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://images.nvidia.com/aem-dam/en-zz/Solutions/geforce/ampere/pdf/NVIDIA-ampere-GA102-GPU-Architecture-Whitepaper-V1.pdf",
    ),
    "RTXA6000": Datasheet(
        memory=47.5 * GIB,
        flops={"fp32": 38.7e12, "fp64": 38.7e12 / 64, "bf16": 154.8e12, "fp16": 154.8e12},
        bandwidth=0.768e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/design-visualization/rtx-a6000/",
    ),
    "A40": Datasheet(
        memory=44.4 * GIB,
        flops={"fp32": 37.4e12, "fp64": 37.4e12 / 64, "bf16": 149.7e12, "fp16": 149.7e12},
        bandwidth=0.696e12,
        within="PCIe 4 x16",
        between="100 GbE",
        host="PCIe 4 x16",
        source="https://www.nvidia.com/en-us/data-center/a40/",
    ),
    "A800-80GB": Datasheet(
        memory=79.1 * GIB,
        flops={"fp32": 19.5e12, "fp64": 19.5e12, "bf16": 312e12, "fp16": 312e12},
        bandwidth=2.039e12,
        within="NVLink 3, A800",
        between="InfiniBand HDR",
        host="PCIe 4 x16",
        source="https://lenovopress.lenovo.com/lp1813 (SXM)",
        matmul_share=271.2 / 312,
        steady=STEADY_A100,
    ),
    "H20": Datasheet(
        memory=95.1 * GIB,
        flops={"fp32": 44e12, "fp64": 1e12, "bf16": 148e12, "fp16": 148e12},
        bandwidth=4.0e12,
        within="NVLink 4",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://github.com/pytorch/torchtitan/pull/2307 (148), "
        "https://github.com/zzc0721/torch-performance-test-data/issues/77 (142 reached)",
        matmul_share=142.25 / 148,
    ),
    "GH200": Datasheet(
        memory=94.5 * GIB,
        flops={"fp32": 67e12, "fp64": 67e12, "bf16": 989e12, "fp16": 989e12},
        bandwidth=4.0e12,
        within="NVLink 4",
        between="InfiniBand NDR",
        host="NVLink-C2C",
        source="https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/ (96 GB)",
        matmul_share=794.5 / 989,
    ),
    "MI250X": Datasheet(
        memory=64.0 * GIB,
        flops={"fp32": 47.9e12 / 2, "fp64": 95.7e12 / 2, "bf16": 383e12 / 2, "fp16": 383e12 / 2},
        bandwidth=3.28e12 / 2,
        within="Infinity Fabric 3",
        between="InfiniBand HDR",
        host="PCIe 4 x16",
        source="https://www.amd.com/en/products/accelerators/instinct/mi200.html (one of two dies)",
    ),
    "MI210": Datasheet(
        memory=64.0 * GIB,
        flops={"fp32": 22.6e12, "fp64": 45.3e12, "bf16": 181e12, "fp16": 181e12},
        bandwidth=1.6e12,
        within="Infinity Fabric 3, MI210",
        between="InfiniBand HDR",
        host="PCIe 4 x16",
        source="https://www.amd.com/en/products/accelerators/instinct/mi200/mi210.html",
    ),
    "MI300X": Datasheet(
        memory=191.7 * GIB,
        flops={"fp32": 163.4e12, "fp64": 163.4e12, "bf16": 1307e12, "fp16": 1307e12},
        bandwidth=5.3e12,
        within="Infinity Fabric 4",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.amd.com/en/products/accelerators/instinct/mi300.html",
        matmul_share=668.4 / 1307,
    ),
    "MI325X": Datasheet(
        memory=255.7 * GIB,
        flops={"fp32": 163.4e12, "fp64": 163.4e12, "bf16": 1307e12, "fp16": 1307e12},
        bandwidth=6.0e12,
        within="Infinity Fabric 4",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html",
        matmul_share=784.9 / 1307,
    ),
    "MI355X": Datasheet(
        memory=287.5 * GIB,
        flops={"fp32": 157.3e12, "fp64": 78.6e12, "bf16": 2500e12, "fp16": 2500e12},
        bandwidth=8.0e12,
        within="Infinity Fabric 4, MI355X",
        between="InfiniBand NDR",
        host="PCIe 5 x16",
        source="https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html",
        matmul_share=1565 / 2500,
        steady=STEADY_NEWER,
    ),
}


_OTHER_RATES = {"PCIE", "NVL", "MIG", "TI", "D", "LAPTOP"}
"""Words by which a device is another than the one of the same name without them."""


@cache
def sheet_of(kind: str) -> Datasheet | None:
    """The datasheet of a kind of device, which may be called as its driver calls it.

    NVIDIA A100-SXM4-80GB     A100-80GB          NVIDIA GeForce RTX 4090             RTX4090
    NVIDIA GH200 480GB        GH200              NVIDIA RTX A5000                    none
    NVIDIA A100 80GB PCIe     A100-PCIe-80GB     NVIDIA A100-SXM4-40GB MIG 1g.5gb    none
    """
    words = re.findall("[A-Z0-9]+", kind.upper())
    said, other = {*words, *map("".join, pairwise(words))}, _OTHER_RATES.intersection(words)
    for name, sheet in DEVICES.items():
        parts = name.upper().split("-")
        if said.issuperset(parts) and other.issubset(parts):
            return sheet
    return None


def peak(device: Device, dtype: str) -> float | None:
    """Operations a second in a dtype by the datasheet of the device's kind; None: it has none."""
    sheet = sheet_of(device.kind)
    return sheet.flops.get(dtype) if sheet is not None else None


def margin(device: Device) -> int | None:
    """Bytes that are kept from tensors (`efficiency.usable`): CUDA's context, fragments, what ops
    hold while they run. None: the device's memory is not that of its datasheet."""
    sheet = sheet_of(device.kind)
    if sheet is None or usable(sheet.memory) != device.memory:
        return None
    return round(sheet.memory) - device.memory
