"""The farthest link of a cluster, faster and slower."""

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.collective_time import Topology, all_gather
from autopipe.cluster.spec import parse
from autopipe.planfile import predict
from autopipe.planfile.parts import Batch, Mesh, Place
from autopipe.scaling import links
from autopipe.scaling.expressions import value
from tests.support.plans import chain


def cluster(line: str) -> Cluster:
    found = parse(line)
    assert isinstance(found, Cluster)
    return found


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("4xA100-80GB", "within the node"),
        ("2x2xA100-80GB", "between nodes"),
        ("2x1x2xA100-80GB@30ms,1Gbit/s", "between sites"),
    ],
)
def test_the_farthest_link_is_the_one_that_changes(line: str, words: str) -> None:
    before = cluster(line)
    found = links.farthest(before)
    assert found.words == words
    after = links.with_bandwidth(before, 3 * found.link.bandwidth)
    faster = links.farthest(after).link
    assert faster.bandwidth == pytest.approx(3 * found.link.bandwidth)
    assert faster.latency == found.link.latency
    parts = ("within", "between", "across")
    same = [getattr(before, name) == getattr(after, name) for name in parts]
    assert same.count(False) == 1


def test_seconds_on_a_link_are_a_formula_in_its_bandwidth() -> None:
    found = links.on_farthest(
        cluster("2x2xA100-80GB"), lambda c: 0.5 + 3e9 / links.farthest(c).link.bandwidth
    )
    for bandwidth in (1e9, 7e9, 1e12):
        assert value(found, {"w": bandwidth}) == pytest.approx(0.5 + 3e9 / bandwidth)
    assert links.on_farthest(cluster("2x2xA100-80GB"), lambda c: 0.5) == 0.5


def test_a_nearer_link_may_be_what_is_waited_for() -> None:
    """Collectives move bytes over all links at once; 16 H100 gather at their cards' rate, and where
    cards are ten times as fast at that of NVLink."""
    found = links.on_farthest(
        cluster("2x8xH100-80GB"),
        lambda c: all_gather(2**30, Topology.of(c).levels(range(16))),
    )
    for bandwidth in (1e9, 4.4e10, 4.4e11):
        there = links.with_bandwidth(cluster("2x8xH100-80GB"), bandwidth)
        seconds = all_gather(2**30, Topology.of(there).levels(range(16)))
        assert value(found, {"w": bandwidth}) == pytest.approx(seconds)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_sums_of_gradients_are_formulas_too_with_what_the_last_backward_hides(zero: int) -> None:
    """From links on which it hides a part of a sum to those on which it hides all."""
    plan = chain(1, 2)
    places = tuple(Place(rank, 0, rank, 0, rank, 0, "cuda") for rank in range(2))
    stage = replace(plan.stages[0], zero=zero)
    stage = replace(stage, predicted=replace(stage.predicted, backward_seconds=5.0))
    plan = replace(plan, cluster=cluster("2x1xA100-80GB"), mesh=Mesh(1, 2, 1, places))
    plan = replace(plan, batch=Batch(4, 2), stages=(stage,))
    (found,) = links.sums(plan, [5.0])
    for bandwidth in (1e9, 4e9, 1e12):
        there = replace(plan, cluster=links.with_bandwidth(plan.cluster, bandwidth))
        seconds = predict.costs(there).reduce[0]
        assert value(found, {"w": bandwidth}) == pytest.approx(seconds)
