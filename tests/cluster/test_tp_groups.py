"""Which devices make a tensor-parallel group, and which links join them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import parse
from autopipe.cluster.tp_groups import GroupKind, slowest_kind, tp_groups


def cluster(spec: str) -> Cluster:
    found = parse(spec)
    assert isinstance(found, Cluster)
    return found


@pytest.mark.parametrize(
    ("spec", "tp", "expected"),
    [
        ("4xA100-80GB", 1, "0 1 2 3"),
        ("8xA100-80GB", 3, "0-2 3-5"),  # two devices are in none
        ("2x6xA100-80GB", 4, "0-3 6-9"),  # within a node each, though twelve would do for three
        ("3xH100-80GB+2xRTX4090", 2, "0-1 3-4"),
        ("8xH100-80GB+2xRTX4090", 4, "0-3 4-7"),  # the second node has too few
        ("2x2xA100-80GB", 4, "0-3"),  # on both nodes, as neither has four
        ("3x2xA100-80GB", 4, "0-3"),
        ("2x2x2xA100-80GB@30ms,1Gbit/s", 4, "0-3 4-7"),  # a site each
        ("2x1x3xA100-80GB@30ms,1Gbit/s", 4, "0-3"),  # no site has four
        ("A100-80GB", 2, ""),
    ],
)
def test_teams_stand_as_near_as_there_is_room(spec: str, tp: int, expected: str) -> None:
    assert dealt(cluster(spec), tp) == expected


def dealt(machine: Cluster, tp: int, wanted: int = 1) -> str:
    """`0-1 3-4`: of each team its devices."""
    found = [list(dict.fromkeys(team.devices)) for team in tp_groups(machine, tp, wanted)]
    return " ".join(
        "-".join(map(str, dict.fromkeys((row[0], row[-1]))))
        if row == list(range(row[0], row[-1] + 1))
        else ",".join(map(str, row))
        for row in found
    )


def test_where_more_are_wanted_teams_are_made_of_what_nodes_leave_over() -> None:
    """At one site first; a team that is not beside itself says all its devices."""
    assert dealt(cluster("2x6xA100-80GB"), 4, wanted=3) == "0-3 6-9 4,5,10,11"
    assert dealt(cluster("4xA100-80GB+2x2xA100-80GB"), 4, wanted=2) == "0-3 4-7"
    far = cluster("2x1x3xA100-80GB@30ms,1Gbit/s")
    assert dealt(far, 2) == dealt(far, 2, wanted=2) == "0-1 3-4"
    assert dealt(far, 2, wanted=3) == "0-1 3-4 2,5"


def test_alone_a_device_exchanges_nothing() -> None:
    machine = cluster("A100-80GB")
    (team,) = tp_groups(machine, 1)
    assert team.kinds == (GroupKind(machine.row[0], None),)


def test_a_link_is_that_of_the_nodes_they_stand_on() -> None:
    """NVLink within the node of H100s, PCIe within that of RTX 4090s, a network between both."""
    machine = cluster("4xH100-80GB+4xRTX4090")
    fast, slow = (machine.link_of(node) for node in machine.nodes)
    h100, rtx = machine.row[0], machine.row[-1]
    assert [team.kinds for team in tp_groups(machine, 4)] == [
        (GroupKind(h100, fast),),
        (GroupKind(rtx, slow),),
    ]
    (team,) = tp_groups(machine, 8)
    assert team.kinds == (GroupKind(h100, machine.between), GroupKind(rtx, machine.between))


def test_teams_share_the_wire_of_a_site_that_both_leave() -> None:
    """Three sites of two: both teams of three are in part at the second one. Of sites of one each
    team has its own two."""
    for spec, tp, sharing in (
        ("3x1x2xA100-80GB@30ms,1Gbit/s", 3, [2, 2]),
        ("8x1x1xA100-80GB@30ms,1Gbit/s", 2, [1, 1, 1, 1]),
    ):
        machine = cluster(spec)
        assert machine.across is not None
        whole = machine.across.bandwidth
        links = [team.kinds[0].link for team in tp_groups(machine, tp)]
        assert links == [replace(machine.across, bandwidth=whole / n) for n in sharing]


def test_the_slowest_device_and_the_slowest_link_need_not_go_together() -> None:
    machine = cluster("2xA100-80GB+2xRTX4090")
    rates = {"bf16": "RTX4090", "fp32": "A100-80GB"}
    for dtype, kind in rates.items():
        found = slowest_kind(tp_groups(machine, 2), lambda device, of=dtype: 1 / device.flops[of])
        assert found.device.kind == kind
        assert found.link == machine.link_of(machine.nodes[1])
    alone = GroupKind(machine.row[2], None)
    assert slowest_kind(tp_groups(machine, 1), lambda device: 1 / device.flops["bf16"]) == alone
