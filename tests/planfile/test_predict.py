"""A plan's own numbers to its predicted step: bytes, links, sums, and the longest path."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Group, Link, NodeGroup
from autopipe.cluster.efficiency import BESIDE
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Batch, Boundary, Mesh, Place, Transfer
from autopipe.planners.costs.eager_depths import pipeline
from autopipe.planners.model.eager_period import StageLink as Between
from autopipe.schedules.instructions import Channel, Flow
from tests.support.plans import chain, example_plan

ROW = 12 * 32 * 4
"""Bytes of a row of what the stages of `chain` send each other."""


def over(plan: Plan, within: Link, between: Link | None = None) -> Plan:
    """The plan with other links."""
    cluster = replace(plan.cluster, within=within, between=between or within)
    return replace(plan, cluster=cluster)


def placed(plan: Plan, dp: int, nodes: list[int]) -> Plan:
    """The plan with `dp` replicas and rank r on node `nodes[r]`, ascending."""
    device = plan.cluster.row[0]
    rows = plan.batch.micro_batches * dp
    return replace(
        plan,
        cluster=replace(
            plan.cluster,
            nodes=tuple(NodeGroup(1, (Group(count, device),)) for count in Counter(nodes).values()),
        ),
        mesh=Mesh(
            plan.mesh.pp,
            dp,
            1,
            tuple(
                Place(rank, *divmod(rank, dp), 0, node, nodes[:rank].count(node), "cpu")
                for rank, node in enumerate(nodes)
            ),
        ),
        batch=Batch(rows, plan.batch.micro_batches),
    )


def copies(times: int) -> float:
    """Seconds in which 20 GiB of gradients move so many times in a device's own memory."""
    return times * 20 * 2**30 / example_plan().cluster.row[0].bandwidth


def test_one_micro_batch_there_and_back() -> None:
    """F = 1 and B = 2 ms in each of two stages, 1 ms of latency, 2 ms for the bytes of a row.

    0      1            4     5            7            10        12
    |- F0 -|  1 ms + 2  |- F0 |---- B0 ----|  1 ms + 2   |-- B0 --|
    rank 0              rank 1                           rank 0
    """
    plan = over(chain(2, 1), Link(1e-3, ROW / 2e-3))
    found = predict.timeline(plan)
    assert found.seconds == pytest.approx(12e-3)
    assert found.bubbles == pytest.approx([1 - 3 / 12] * 2)
    with_it = predict.with_prediction(plan)
    assert with_it.prediction.step_seconds == found.seconds
    assert with_it.prediction.bubble == pytest.approx(0.75)
    assert replace(with_it, prediction=plan.prediction) == plan


def test_transfers_hide_behind_computing() -> None:
    """1F1B on a fast link: four micro-batches of 3 ms, and one stage's to fill and to drain."""
    assert predict.timeline(chain(2, 4)).seconds == pytest.approx(4 * 3e-3 + 3e-3, rel=1e-6)


def test_two_stages_of_one_rank_need_no_link() -> None:
    """zb-v on one rank takes 2 (F + B) a micro-batch, on two it is 1 s away from there and back.

    Besides, the first transfer waits for 1 s until notice of the receive has come.
    """
    plan = over(chain(1, 3, schedule="zb-v", chunks=2), Link(1.0, 1.0))
    assert predict.timeline(plan).seconds == pytest.approx(3 * 2 * 3e-3)
    two = over(chain(2, 1, schedule="zb-v", chunks=2), Link(1.0, 1e12))
    # Computing on the way: F of stages 1, 2 and 3, I of 3, I and W of 2, I of 1, I and W of 0.
    assert predict.timeline(two).seconds == pytest.approx(1.0 + 4 * 1.0 + 9e-3, rel=1e-6)


def test_only_what_has_a_gradient_comes_back() -> None:
    plan = example_plan()
    first = plan.stages[0]
    (sent,) = first.sends
    mask = Transfer("mask", ("b", 10), "bool", peer=1, gradient=False)
    plan = replace(plan, stages=(replace(first, sends=(sent, mask)), plan.stages[1]))
    costs = predict.costs(plan)
    there, back = Channel(0, 1, Flow.ACTIVATION), Channel(1, 0, Flow.GRADIENT)
    assert costs.links(there).bytes == 2 * ROW + 2 * 10
    assert costs.links(back).bytes == 2 * ROW


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        (("b", 12, 32), "float32", 3 * 12 * 32 * 4),
        (("b", 12), "bfloat16", 3 * 12 * 2),
        (("2*b + 1",), "int64", 7 * 8),
        (("b",), "bool", 3),
        (("b",), "uint8", 3),
        (("b",), "float8_e4m3fn", 3),
        (("b",), "complex128", 3 * 16),
        ((), "float64", 8),
    ],
)
def test_bytes_of_a_tensor_of_three_rows(
    shape: tuple[int | str, ...], dtype: str, size: int
) -> None:
    assert predict.transfer_bytes(Transfer("x", shape, dtype, 1, True), 3) == size


def test_a_boundary_is_as_slow_as_its_slowest_pair_of_ranks() -> None:
    """Of two pipelines, ranks 0 2 and 1 3, the second is on two nodes."""
    fast, slow = Link(1e-6, 1e11), Link(1e-3, 1e9)
    there = Channel(0, 1, Flow.ACTIVATION)
    for nodes, expected in (([0, 0, 0, 0], fast), ([0, 0, 0, 1], slow), ([0, 0, 1, 1], slow)):
        link = predict.costs(placed(over(chain(2, 2), fast, slow), 2, nodes)).links(there)
        assert (link.latency, link.bandwidth) == (expected.latency, expected.bandwidth)


def test_gradients_are_summed_in_a_ring() -> None:
    """20 GiB over three replicas: 2 * 2 / 3 of them, in 2 * 2 messages, over the slower link.

    Before that they are read and written once, into the buckets that are sent. On GPUs the sum
    begins while the last backward runs, which hides 2 ms of it.
    """
    fast, slow = Link(0.0, 1e11), Link(0.5, 2**30)
    alone = over(chain(1, 2), slow)
    assert predict.costs(alone).reduce == [0.0]
    one_node = predict.costs(placed(over(chain(1, 2), fast, slow), 3, [0, 0, 0]))
    assert one_node.reduce == [pytest.approx(4 / 3 * 20 * 2**30 / 1e11 + copies(2) - 2e-3)]
    plan = placed(over(chain(1, 2), fast, slow), 3, [0, 0, 1])
    assert predict.costs(plan).reduce == [pytest.approx(4 / 3 * 20 + 4 * 0.5 + copies(2) - 2e-3)]
    # Both micro-batches, the last backward without its 2 ms, and the sum of what it makes.
    seconds = 2 * 3e-3 - 2e-3 + 4 / 3 * 20 + 2 + copies(2)
    assert predict.timeline(plan).seconds == pytest.approx(seconds)


def test_a_sum_goes_by_levels_where_nodes_have_equally_many() -> None:
    """20 GiB over 2 x 2 replicas: a half in each node, and beside it, which takes longer, a quarter
    between the nodes, twice."""
    near, far = Link(0.0, 20 * 2**30), Link(0.5, 2**30)
    plan = placed(over(chain(1, 2), near, far), 4, [0, 0, 1, 1])
    wires = 2 * (1 / 2 * 10 + 0.5)
    assert predict.costs(plan).reduce == [pytest.approx(wires + copies(2) - 2e-3)]


def test_what_all_ranks_of_a_stage_send_takes_turns_on_a_link_between_sites() -> None:
    """Two pipelines from one site to another: each has half of the wire."""
    plan = placed(over(chain(2, 2), Link(0.0, 1e9)), 2, [0, 0, 1, 1])
    here, there = plan.cluster.nodes
    cluster = replace(plan.cluster, nodes=(here, replace(there, site=1)), across=Link(1.0, 100.0))
    link = predict.costs(replace(plan, cluster=cluster)).links(Channel(0, 1, Flow.ACTIVATION))
    assert (link.latency, link.bandwidth) == (1.0, 50.0)


def test_under_zero_1_the_ring_has_two_halves_and_under_zero_3_there_is_none() -> None:
    """Under ZeRO-1 gradients go into a table that was zeros, and parameters out of one."""
    plan = placed(over(chain(1, 2), Link(0.0, 2**30)), 2, [0, 0])
    one, two, three = (
        replace(plan, stages=tuple(replace(stage, zero=zero) for stage in plan.stages))
        for zero in (1, 2, 3)
    )
    # The last backward, 2 ms, hides of the whole sum, and of its first half.
    assert predict.costs(plan).reduce == [pytest.approx(20.0 + copies(2) - 2e-3)]
    assert predict.costs(one).reduce == [pytest.approx(20.0 + copies(6) - 2e-3)]
    # Under ZeRO-2 the second half is left, of twice the gradients: a rank has half of them.
    assert predict.costs(two).reduce == [pytest.approx(20.0 + copies(6))]
    assert predict.costs(three).reduce == [0.0]
    # With fp32 masters the second half has 16 bits.
    assert predict.costs(replace(one, precision="bf16")).reduce == [
        pytest.approx((20.0 + copies(6)) * 3 / 4 - 2e-3)
    ]


def test_gradients_of_tied_parameters_are_summed_over_all_that_have_them() -> None:
    """Of 20 GiB of two stages 4 are of a parameter that both have: once the first stage has run its
    last backward, and so with nothing to hide behind. Bug: they took no time at all."""
    far = Link(0.0, 2**30)

    def reduce(plan: Plan, zero: int = 0) -> list[float]:
        tied = (
            replace(stage, zero=zero, predicted=replace(stage.predicted, tied=4 * 2**30))
            for stage in plan.stages
        )
        found = predict.costs(replace(plan, stages=tuple(tied)))
        return [pytest.approx(seconds) for seconds in found.reduce]

    plan = over(chain(2, 2), far)
    assert reduce(plan) == [4.0 + copies(2) * 4 / 20, 0.0]
    both = placed(plan, 2, [0, 0, 0, 0])
    own = 16.0 + copies(2) * 16 / 20 - 2e-3
    assert reduce(both) == [own + 2 * 3 / 4 * 4 + copies(2) * 4 / 20, own]
    own += copies(4) * 16 / 20
    assert reduce(both, zero=1) == [own + 2 * 3 / 4 * 4 + copies(6) * 4 / 20, own]
    rows = 20.0 + copies(6)  # gathered; the two stages' of each replica are summed
    assert reduce(both, zero=2) == [rows + 2.0 + copies(2) * 2 / 20, rows]
    v = over(chain(2, 2, schedule="zb-v", chunks=2), far)  # stages 0 and 3 are on one rank
    assert reduce(v)[1:] == [0.0, 0.0, 0.0]


def test_a_short_sum_costs_what_computing_beside_it_loses() -> None:
    """A sum that ends within the last backward of GPUs takes a share of it; CPUs sum after it."""
    plan = placed(over(chain(1, 2), Link(0.0, 1e15)), 2, [0, 0])
    beside = copies(2) + 20 * 2**30 / 1e15
    slow = replace(plan.stages[0].predicted, backward_seconds=2 * beside)
    plan = replace(plan, stages=(replace(plan.stages[0], predicted=slow),))
    assert predict.costs(plan).reduce == [pytest.approx(BESIDE * beside)]
    assert predict.sums(plan) == [(pytest.approx(beside), 0.0)]
    node = plan.cluster.nodes[0]
    cpu = replace(node.groups[0], device=replace(node.groups[0].device, kind="cpu"))
    here = replace(plan.cluster, nodes=(replace(node, groups=(cpu,)),))
    assert predict.costs(replace(plan, cluster=here)).reduce == [pytest.approx(beside)]


def test_what_runs_ahead_is_chosen_from() -> None:
    plan = replace(over(chain(3, 5), Link(1e-3, 1e6)), boundaries=(Boundary(1, 0),) * 2)
    found = pipeline(plan, held=[7, 8, 9], room=[70, 80, 90])
    assert (found.forward, found.backward) == ([1e-3] * 3, [2e-3] * 3)
    assert found.boundaries == [Between(1e-3, 1e6, ROW, ROW, ROW)] * 2
    assert (found.micro_batches, found.held, found.room) == (5, [7, 8, 9], [70, 80, 90])


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ((), 1),
        ((7,), 7),
        (("b", 3), 30),
        (("12*b", "b"), 1200),
        (("b/2", 3), 15),
        (("b/4", 4), 10),  # no whole number by itself, and one together
        (("2*b + 1", 2), 42),
    ],
)
def test_bytes_of_a_crossing_tensor(shape: tuple[int | str, ...], elements: int) -> None:
    """Of 10 rows in float32: dims are numbers or expressions in b."""
    transfer = Transfer("x", shape, "float32", peer=1, gradient=False)
    assert predict.transfer_bytes(transfer, 10) == 4 * elements
