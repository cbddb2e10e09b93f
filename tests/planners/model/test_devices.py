"""The devices a planner deals out: kinds, groups, and the links between groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.cluster.collective_time import Level
from autopipe.cluster.spec import parse
from autopipe.cluster.tp_groups import GroupKind, tp_groups
from autopipe.planners.model.devices import machine_of
from tests.support.problems import machine

NEAR, MIDDLE, FAR = Link(1e-6, 1e11), Link(1e-5, 1e10), Link(1e-2, 1e8)
LINKS = (NEAR, MIDDLE, FAR)


def device(kind: str, memory: int, rate: float) -> Device:
    return Device(kind, memory, {"fp32": rate}, rate, 0.0, "made up for tests")


FAST, SLOW = device("fast", 100, 4.0), device("slow", 300, 1.0)

# rank     0 1     2 3     4 5
# device   S S     F S     F F
# node     0 0     1 1     2 2      node 2 stands at another site
MIXED = Cluster(
    "mixed",
    (
        NodeGroup(1, (Group(2, SLOW),)),
        NodeGroup(1, (Group(1, FAST), Group(1, SLOW))),
        NodeGroup(1, (Group(2, FAST),), site=1),
    ),
    within=NEAR,
    between=MIDDLE,
    across=FAR,
)


def test_kinds_are_numbered_from_the_fastest_whatever_the_order_of_nodes() -> None:
    found, kinds = machine_of(MIXED, tp_groups(MIXED, 1))
    assert kinds == (GroupKind(FAST, None), GroupKind(SLOW, None))
    assert found.kinds == (1, 1, 0, 1, 0, 0)
    assert found.memory == (300, 300, 100, 300, 100, 100)
    assert (found.devices, found.alike, found.copying) == (6, False, 1.0)


def test_which_is_faster_depends_on_what_is_done() -> None:
    """A group is as slow as its A100 in fp32, and as its RTX 4090 in bf16."""
    cluster = parse("1xA100-40GB+1xRTX4090")
    assert isinstance(cluster, Cluster)
    for dtype, slower in (("bf16", "RTX4090"), ("fp32", "A100-40GB")):
        found, kinds = machine_of(
            cluster,
            tp_groups(cluster, 1),
            seconds=lambda kind, to=dtype: 1 / kind.device.flops[to],
        )
        assert kinds[found.groups(2)[0].kind].device.kind == slower


def test_equal_devices_of_several_nodes_are_one_kind() -> None:
    cluster = parse("3x2xA100-80GB")
    assert isinstance(cluster, Cluster)
    found, kinds = machine_of(cluster, tp_groups(cluster, 1))
    assert (len(kinds), found.kinds, found.alike) == (1, (0,) * 6, True)
    assert found.topology.nodes == (0, 0, 1, 1, 2, 2)


def test_a_limit_is_at_most_what_a_device_has() -> None:
    found, _ = machine_of(MIXED, tp_groups(MIXED, 1), limits=(50, 400, 50, 400, 100, 1))
    assert found.memory == (50, 300, 50, 300, 100, 1)
    last = replace(MIXED, nodes=MIXED.nodes[2:])
    equal, _ = machine_of(last, tp_groups(last, 1), limits=(7, 8))
    assert not equal.alike, "one kind, but one of them holds less"


def test_tensor_parallel_ranks_are_as_fast_as_the_slower_and_hold_as_much_as_the_smaller() -> None:
    """Pairs S S, F S, F F; a seventh device would be in no pair."""
    found, _ = machine_of(MIXED, tp_groups(MIXED, 2))
    assert (found.kinds, found.memory, found.streams) == ((1, 1, 0), (300, 100, 100), 2)
    assert (found.topology.nodes, found.topology.sites) == ((0, 1, 2), (0, 0, 1))
    assert machine_of(MIXED, tp_groups(MIXED, 4))[0].kinds == (1,)


@pytest.mark.parametrize(
    ("dp", "groups"),
    [
        (1, [(1, 300), (1, 300), (0, 100), (1, 300), (0, 100), (0, 100)]),
        (2, [(1, 300), (1, 100), (0, 100)]),
        (3, [(1, 100), (1, 100)]),
        (4, [(1, 100)]),  # two devices are in none
    ],
)
def test_a_group_is_as_fast_as_its_slowest_and_holds_as_much_as_its_smallest(
    dp: int, groups: list[tuple[int, int]]
) -> None:
    found, _ = machine_of(MIXED, tp_groups(MIXED, 1))
    assert [(group.kind, group.memory) for group in found.groups(dp)] == groups


def test_a_group_sums_over_the_links_between_its_devices() -> None:
    """Of dp=3 the first group is on two nodes, unevenly: it is as far as its farthest pair."""
    found, _ = machine_of(MIXED, tp_groups(MIXED, 1))
    assert found.groups(1)[0].levels == ()
    assert [group.levels for group in found.groups(2)] == [(Level(2, NEAR),)] * 3
    near, far = found.groups(3)
    assert near.levels == (Level(3, MIDDLE),)
    assert far.levels == (Level(3, FAR, shared=True),)
    assert found.groups(4)[0].levels == (Level(2, NEAR), Level(2, MIDDLE))


def test_groups_are_linked_by_the_slowest_of_their_pairs() -> None:
    """Of dp=1 devices are linked one to one; of dp=2 devices 0 and 2, and 1 and 3."""
    found, _ = machine_of(MIXED, tp_groups(MIXED, 1))
    assert [found.link(1, 0, other) for other in (1, 2, 4)] == [
        Level(2, NEAR),
        Level(2, MIDDLE),
        Level(2, FAR, shared=True),
    ]
    assert found.link(2, 0, 1) == Level(2, MIDDLE)
    assert found.link(2, 1, 2) == Level(2, FAR, shared=True)
    # Device 0 with 3 on its node, 1 with 4 on another, 2 with 5: the farther one counts.
    six = machine(6, 1, LINKS, nodes=(0, 0, 1, 0, 1, 1), sites=(0,) * 6)
    assert six.link(3, 0, 1) == Level(2, MIDDLE)


def test_links_are_the_same_both_ways() -> None:
    found, _ = machine_of(MIXED, tp_groups(MIXED, 1))
    for dp in (1, 2, 3):
        for one in range(6 // dp):
            for other in range(one):
                assert found.link(dp, one, other) == found.link(dp, other, one)
