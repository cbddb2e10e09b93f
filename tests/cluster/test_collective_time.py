"""How long ranks take to sum or to send: worked by hand on links of round numbers."""

from __future__ import annotations

import pytest

from autopipe.cluster import spec
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.cluster.collective_time import (
    Level,
    Topology,
    all_gather,
    all_reduce,
    gradient_sum,
    half_sum,
)

NEAR, FAR, WAN = Link(1e-6, 100.0), Link(1e-3, 10.0), Link(1.0, 1.0)
DEVICE = Device("made up", 1, {"fp32": 1.0}, 1.0, 0.0, "by hand")

# device   0 1 2 3    4 5 6 7    8 9 10 11    12 13 14 15
# node        0          1          2              3
# site             0                       1
CLUSTER = Cluster(
    "two sites",
    (NodeGroup(2, (Group(4, DEVICE),), 0), NodeGroup(2, (Group(4, DEVICE),), 1)),
    NEAR,
    FAR,
    WAN,
)
PLACES = Topology.of(CLUSTER)


def test_a_ring_moves_twice_all_but_a_share() -> None:
    # 4 ranks: 3 / 4 of 400 bytes, there and back, and 2 times min(3, log2 4) = 2 latencies.
    assert all_reduce(400, (Level(4, FAR),)) == pytest.approx(2 * (300 / 10 + 2 * 1e-3))
    # One round alone is a ring: nobody has all of it before the last hop.
    assert all_gather(400, (Level(4, FAR),)) == pytest.approx(300 / 10 + 3 * 1e-3)


def test_collectives_have_the_rate_that_was_measured_for_them() -> None:
    """gloo's ring copies; its reduce-scatter and all-gather more than its sum."""
    ring = (Level(2, Link(0.0, 100.0, summing=50.0, gathering=10.0)),)
    assert all_reduce(400, ring) == 2 * 200 / 50
    assert all_gather(400, ring) == 200 / 10


def test_gradients_are_copied_beside_the_wire() -> None:
    """Into a bucket, 2 times; under ZeRO-1 through two tables, 6 times, and over the wire as a
    reduce-scatter and an all-gather."""
    ring = (Level(2, Link(0.0, 100.0, summing=50.0, gathering=10.0)),)
    assert gradient_sum(400, ring, 1, zero=0, copying=1000.0) == 8.0 + 2 * 0.4
    assert gradient_sum(400, ring, 1, zero=1, copying=1000.0) == pytest.approx(40.0 + 6 * 0.4)
    assert gradient_sum(400, (), 1, zero=1, copying=1000.0) == 0.0


@pytest.mark.parametrize("ranks", [2, 16, 1024])
def test_zero_1_is_two_halves_of_which_no_tree_saves_latencies(ranks: int) -> None:
    """n - 1 latencies each, where an all-reduce of many ranks has 2 log2 n of them."""
    many = (Level(ranks, Link(1.0, 1e12)),)
    half = half_sum(0.0, many, 1, copying=1e12)
    assert half == ranks - 1
    assert gradient_sum(0.0, many, 1, zero=1, copying=1e12) == 2 * half
    assert all_reduce(0.0, many) <= 2 * half


def test_a_rank_alone_sends_nothing() -> None:
    assert all_reduce(400, ()) == 0 == all_gather(400, PLACES.levels([3]))


def test_all_levels_move_bytes_at_once() -> None:
    """4 rings through 2 nodes of 4 ranks: each rank passes 3 / 4 of 400 bytes on within its node,
    which take 3 s, and half of the 100 bytes of its ring to the other node, which take 5 s."""
    inside, between = Level(4, NEAR), Level(2, FAR)
    steps = 3 * 2 * 1e-6 + 1e-3
    assert all_gather(400, (inside, between)) == pytest.approx(max(3.0, 5.0) + steps)
    assert all_gather(400, (inside, Level(2, NEAR))) == pytest.approx(3.0 + 7e-6)
    # A tree has log2 4 and log2 2 steps, there and back.
    assert all_reduce(400, (inside, between)) == pytest.approx(2 * 5.0 + 2 * (2e-6 + 1e-3))


def test_a_collective_starts_once_where_its_steps_are_quicker_than_messages() -> None:
    """As NCCL's do: 8 of 10 us of a message within a node are its start, and 8 of 20 us between."""
    inside, between = Link(10e-6, 1e9, hop=2e-6), Link(20e-6, 1e9, hop=12e-6)
    assert all_gather(0.0, (Level(4, inside),)) == pytest.approx(8e-6 + 3 * 2e-6)
    both = Level(4, inside), Level(3, between)
    assert all_gather(0.0, both) == pytest.approx(8e-6 + 3 * 3 * 2e-6 + 2 * 12e-6)


@pytest.mark.parametrize("nodes, measured", [(4, 360e9), (32, 300e9), (128, 260e9)])
def test_a_reduce_scatter_of_many_h100_is_as_fast_as_it_was_measured(
    nodes: int, measured: float
) -> None:
    """Bytes a second on the wire of a large reduce-scatter (NVIDIA/nccl, issue 1229, which does not
    say of how many bytes: here of 4 GB, so that it is within a tenth)."""
    cluster = spec.parse(f"{nodes}x8xH100-80GB")
    assert isinstance(cluster, Cluster)
    ranks, size = 8 * nodes, 4e9
    seconds = all_gather(size, Topology.of(cluster).levels(range(ranks)))
    assert size * (ranks - 1) / ranks / seconds == pytest.approx(measured, rel=0.1)


def test_what_is_shared_is_not_multiplied_by_the_ranks_that_share_it() -> None:
    """Each of 4 ranks of a site sends a shard of 100 bytes, all 4 over one wire."""
    shared = Level(2, WAN, shared=True)
    assert all_reduce(400, (Level(4, NEAR), shared)) == pytest.approx(2 * (1.0 + 200), rel=1e-5)
    assert all_reduce(400, (shared,), streams=3) == pytest.approx(2 * (1.0 + 3 * 200))


@pytest.mark.parametrize(
    "devices, levels",
    [
        (range(4), (Level(4, NEAR),)),
        ((0, 1, 4, 5), (Level(2, NEAR), Level(2, FAR))),
        (range(0, 16, 4), (Level(2, FAR), Level(2, WAN, True))),
        (range(16), (Level(4, NEAR), Level(2, FAR), Level(2, WAN, True))),
        ((0, 1, 2, 4), (Level(4, FAR),)),  # three here and one there: as far as the farthest
        ((0, 1, 4, 8), (Level(4, WAN, True),)),
        ((0, 1, 4, 5, 8, 9, 10, 11), (Level(8, WAN, True),)),
    ],
)
def test_the_levels_of_a_group(devices: range, levels: tuple[Level, ...]) -> None:
    assert PLACES.levels(list(devices)) == levels


def test_a_pair_is_as_far_as_what_lies_between() -> None:
    links = [PLACES.pair(0, other) for other in (1, 4, 8)]
    assert links == [Level(2, NEAR), Level(2, FAR), Level(2, WAN, True)]


def test_some_of_the_devices_stand_for_those_beside_them() -> None:
    assert PLACES.at(range(0, 16, 4)).nodes == (0, 1, 2, 3)
    assert PLACES.at(range(0, 16, 2)).levels([0, 1, 2, 3]) == (Level(2, NEAR), Level(2, FAR))


def test_a_node_may_have_a_link_of_its_own() -> None:
    slow = Link(1e-5, 50.0)
    cluster = Cluster(
        "",
        (NodeGroup(1, (Group(2, DEVICE),)), NodeGroup(1, (Group(2, DEVICE),), 0, slow)),
        NEAR,
        FAR,
    )
    topology = Topology.of(cluster)
    assert [topology.pair(0, 1).link, topology.pair(2, 3).link] == [NEAR, slow]
    assert topology.levels([0, 1, 2, 3])[0] == Level(2, slow)
