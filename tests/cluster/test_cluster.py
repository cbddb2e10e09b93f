"""Clusters: what a line means, which figures stand behind it, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopipe.cluster import datasheets
from autopipe.cluster.checks import check
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup, left_of
from autopipe.cluster.spec import parse
from autopipe.errors import AutopipeError, PlanError
from autopipe.util import codec

SMALL = Device("small", 10, {"fp32": 2.0, "bf16": 4.0}, 5.0, 0.0, "by hand")
LARGE = Device("large", 20, {"fp32": 1.0, "bf16": 8.0}, 5.0, 0.0, "by hand")

# rank     0 1     2 3     4 5 6
# device   S L     S L     L L L
# node     0 0     1 1     2 2 2
MIXED = Cluster(
    "mixed",
    (NodeGroup(2, (Group(1, SMALL), Group(1, LARGE))), NodeGroup(1, (Group(3, LARGE),))),
    within=Link(1e-6, 1e9),
    between=Link(1e-5, 1e8),
)


def cluster_of(spec: str) -> Cluster:
    cluster = parse(spec)
    assert isinstance(cluster, Cluster)
    return cluster


def test_ranks_run_through_the_nodes() -> None:
    found = [MIXED.device_at(rank) for rank in range(MIXED.num_devices)]
    assert [node for node, _, _ in found] == [0, 0, 1, 1, 2, 2, 2]
    assert [local for _, local, _ in found] == [0, 1, 0, 1, 0, 1, 2]
    assert [device.kind[0] for _, _, device in found] == list("slsllll")


@pytest.mark.parametrize("rank", [-1, 7])
def test_no_such_device(rank: int) -> None:
    with pytest.raises(AutopipeError, match=f"device {rank} of mixed, which has 7"):
        MIXED.device_at(rank)


@pytest.mark.parametrize("kind", datasheets.DEVICES)
def test_every_preset_makes_a_cluster_that_stands_the_check(kind: str) -> None:
    cluster = cluster_of(f"2x4x{kind}")
    check(cluster)
    assert "https://" in cluster.row[0].source
    assert cluster.between.bandwidth <= cluster.within.bandwidth


def test_a_link_is_latency_and_size_over_bandwidth() -> None:
    assert Link(1e-3, 1e6).seconds(2000) == pytest.approx(0.003)


def test_printed() -> None:
    assert str(cluster_of("2x8xA100-80GB")) == (
        "2x8xA100-80GB: 2 nodes, 16 devices\n"
        "  A100-80GB: 74.3 GiB, 1835 GB/s, TFLOP/s fp32 13.4, fp64 13.4, bf16 214, fp16 214, "
        "5 us an op\n"
        "  within a node: 11.8 us, 264 GB/s\n"
        "  between nodes: 22.4 us, 22 GB/s"
    )


def test_a_file_is_a_cluster_too(tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    mixed = parse("2xA100-80GB+4xA100-40GB")
    codec.save(mixed, path)
    assert parse(str(path)) == mixed


def test_a_file_without_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    data = json.loads(codec.dumps(MIXED))
    del data["nodes"][0]["groups"][0]["device"]["memory"]
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError) as caught:
        parse(str(path))
    assert caught.value.message == (
        "cluster.nodes[0].groups[0].device.memory: missing; expected an integer"
    )


@pytest.mark.parametrize(
    "device, sentence",
    [
        (replace(SMALL, memory=-1), "memory: expected more than 0, found -1"),
        (replace(SMALL, flops={}), "flops: expected at least one entry, found none"),
        (replace(SMALL, flops={"fp32": 0.0}), "flops.fp32: expected more than 0, found 0.0"),
        (replace(SMALL, bandwidth=0.0), "bandwidth: expected more than 0, found 0.0"),
        (replace(SMALL, host=-1.0), "host: expected at least 0, found -1.0"),
        (replace(SMALL, launch=-1e-6), "launch: expected at least 0, found -1e-06"),
        (replace(SMALL, memory=10**20), "memory: expected 1e-09 to 1e+18, found 1e+20"),
        (replace(SMALL, bandwidth=1e-300), "bandwidth: expected 1e-09 to 1e+18, found 1e-300"),
        (replace(SMALL, launch=1e300), "launch: expected at most 3600, found 1e+300"),
        (replace(SMALL, half=1e300), "half: expected at most 1e+06, found 1e+300"),
    ],
)
def test_impossible_figures_of_a_device(device: Device, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    codec.save(replace(MIXED, nodes=(NodeGroup(1, (Group(1, device),)),)), path)
    with pytest.raises(AutopipeError) as caught:
        parse(str(path))
    assert caught.value.message == f"cluster.nodes[0].groups[0].device.{sentence}"


@pytest.mark.parametrize(
    "cluster, sentence",
    [
        (replace(MIXED, nodes=()), "plan.cluster.nodes: expected at least one entry, found none"),
        (
            replace(MIXED, nodes=(NodeGroup(0, ()),)),
            "plan.cluster.nodes[0].count: expected more than 0, found 0",
        ),
        (
            replace(MIXED, nodes=(NodeGroup(1, ()),)),
            "plan.cluster.nodes[0].groups: expected at least one entry, found none",
        ),
        (
            replace(MIXED, between=Link(0.0, 0.0)),
            "plan.cluster.between.bandwidth: expected more than 0, found 0.0",
        ),
    ],
)
def test_impossible_clusters(cluster: Cluster, sentence: str) -> None:
    with pytest.raises(AutopipeError) as caught:
        check(cluster, "plan.cluster")
    assert caught.value.message == sentence


# --- what is left of one


@pytest.mark.parametrize(
    ("nodes", "row"),
    [
        ([2, 2, 3], "SL SL LLL"),
        ([2, 2], "SL SL"),
        ([3], "LLL"),
        ([1, 3], "S LLL"),
        ([4], "SLLL"),  # a node grew: more of its last device
    ],
)
def test_what_is_left(nodes: list[int], row: str) -> None:
    found = left_of(MIXED, nodes)
    check(found)
    names = iter("S" if device is SMALL else "L" for device in found.row)
    assert " ".join("".join(next(names) for _ in range(n)) for n in found.devices_per_node) == row
