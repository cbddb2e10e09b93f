"""Which devices hold their parts of the same tensors, and what is between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster import Cluster, Link
from autopipe.spec import parse
from autopipe.teams import Kind, slowest, teams


def cluster(spec: str) -> Cluster:
    found = parse(spec)
    assert isinstance(found, Cluster)
    return found


@pytest.mark.parametrize(
    ("spec", "tp", "firsts"),
    [
        ("4xA100-80GB", 1, [0, 1, 2, 3]),
        ("8xA100-80GB", 3, [0, 3]),  # two devices are in none
        ("2x6xA100-80GB", 4, [0, 6]),  # within a node each, though twelve would do for three
        ("3xH100-80GB+2xRTX4090", 2, [0, 3]),
        ("8xH100-80GB+2xRTX4090", 4, [0, 4]),  # the second node has too few
        ("2x2xA100-80GB", 4, [0]),  # on both nodes, as neither has four
        ("3x2xA100-80GB", 4, [0]),
        ("2x2x2xA100-80GB@30ms,1Gbit/s", 4, [0, 4]),  # a site each
        ("2x1x3xA100-80GB@30ms,1Gbit/s", 4, [0]),  # no site has four
        ("A100-80GB", 2, []),
    ],
)
def test_teams_stand_as_near_as_there_is_room(spec: str, tp: int, firsts: list[int]) -> None:
    assert [team.first for team in teams(cluster(spec), tp)] == firsts


def test_alone_a_device_exchanges_nothing() -> None:
    machine = cluster("A100-80GB")
    (team,) = teams(machine, 1)
    assert team.kinds == (Kind(machine.row[0], None),)


def test_a_link_is_that_of_the_nodes_they_stand_on() -> None:
    """NVLink within the node of H100s, PCIe within that of RTX 4090s, a network between both."""
    machine = cluster("4xH100-80GB+4xRTX4090")
    fast, slow = (machine.link_of(node) for node in machine.nodes)
    h100, rtx = machine.row[0], machine.row[-1]
    assert [team.kinds for team in teams(machine, 4)] == [(Kind(h100, fast),), (Kind(rtx, slow),)]
    (team,) = teams(machine, 8)
    assert team.kinds == (Kind(h100, machine.between), Kind(rtx, machine.between))


def test_teams_from_site_to_site_share_the_wire() -> None:
    """Three sites of two: no site has three devices, and both teams cross."""
    machine = cluster("3x1x2xA100-80GB@30ms,1Gbit/s")
    found = teams(machine, 3)
    assert machine.across is not None
    half = replace(machine.across, bandwidth=machine.across.bandwidth / 2)
    assert [team.kinds[0].link for team in found] == [half, half]


def test_the_slowest_device_and_the_slowest_link_need_not_go_together() -> None:
    machine = cluster("2xA100-80GB+2xRTX4090")
    rates = {"bf16": "RTX4090", "fp32": "A100-80GB"}
    for dtype, kind in rates.items():
        found = slowest(teams(machine, 2), lambda device, of=dtype: 1 / device.flops[of])
        assert found.device.kind == kind
        assert found.link == machine.link_of(machine.nodes[1])
    alone = Kind(machine.row[2], None)
    assert slowest(teams(machine, 1), lambda device: 1 / device.flops["bf16"]) == alone
    assert isinstance(found.link, Link)
