"""NCCL without a GPU: the order of its lanes, its transport over gloo, the warnings."""

import random
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopipe.runtime.comm.nccl import Lane, NcclTransport, few_queues, lanes
from autopipe.runtime.comm.threads import local_network
from autopipe.runtime.launch.world import World, start
from autopipe.schedules.instructions import Channel
from autopipe.schedules.transfers import Edge
from tests.support.transport_stories import IN_ORDER, B, F, Story, check, on, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return told("lanes", tmp_path_factory.mktemp("lanes"))


@pytest.mark.parametrize("story", IN_ORDER)
def test_story(story: Story, folder: Path) -> None:
    check(story, folder)


def test_it_closes(folder: Path) -> None:
    assert (folder / "code").read_text() == "0"


def test_a_v_on_two_ranks_has_four_lanes() -> None:
    edges = [Edge(0, 1, True), Edge(1, 2, True), Edge(2, 3, True)]
    assert lanes([0, 1, 1, 0], edges) == (
        Lane(0, 1, Channel(0, 1, F)),
        Lane(0, 1, Channel(3, 2, B)),
        Lane(1, 0, Channel(1, 0, B)),
        Lane(1, 0, Channel(2, 3, F)),  # and 1 -> 2 stays on its rank
    )


def test_no_lane_for_what_is_not_sent() -> None:
    """Masks have no gradient; two pairs of stages on the same ranks have a lane each."""
    edges = [Edge(0, 1, False), Edge(0, 2, False), Edge(2, 3, True)]
    assert lanes([4, 7, 4, 7], edges) == (
        Lane(4, 7, Channel(0, 1, F)),
        Lane(4, 7, Channel(2, 3, F)),
        Lane(7, 4, Channel(3, 2, B)),
    )


def test_lanes_are_made_without_a_deadlock() -> None:
    """Each rank makes its own lanes in turn, and each takes both ends at once: all get done.

    For random placements and edges, whatever the order in which the edges are named.
    """
    for seed in range(200):
        chance = random.Random(seed)
        stages = [chance.randrange(5) for _ in range(chance.randint(1, 12))]
        pairs = list(combinations(range(len(stages)), 2))
        edges = [Edge(*pair, chance.random() < 0.5) for pair in pairs if chance.random() < 0.4]
        order = lanes(stages, edges)
        assert order == lanes(stages, chance.sample(edges, len(edges)))
        assert len(order) == len(set(order))
        todo = {rank: [lane for lane in order if rank in lane[:2]] for rank in set(stages)}
        while any(todo.values()):
            ready = [
                lane
                for lanes_of_one in todo.values()
                for lane in lanes_of_one[:1]
                if todo[lane.source][0] == todo[lane.target][0] == lane
            ]
            assert ready, f"seed {seed}: {todo}"
            for lane in set(ready):
                todo[lane.source].pop(0)
                todo[lane.target].pop(0)


def test_slots_are_taken_in_order() -> None:
    """A lane has no tags; tensors without elements count, since both sides know of them."""
    empty = torch.empty(0)
    world = World(0, 1, 0, 1, 0, "127.0.0.1", 0)
    with start(world, timeout=30):
        groups = {Lane(0, 1, on(0, 1)): dist.group.WORLD}
        transport = NcclTransport([0, 1], 0, groups, local_network([0, 1])[0])
        for channel, slot in ((on(0, 1), 0), (on(0, 1), 1), (on(0, 1), 0)):
            transport.send(empty, channel, slot).wait()
        for channel, slot in ((on(0, 1), 2),):
            with pytest.raises(AssertionError, match=rf"slot {slot} comes after .*, 0\)"):
                transport.send(empty, channel, slot)


@pytest.mark.parametrize("queues", [None, "", "8", "1"])
def test_fewer_queues_than_streams(queues: str | None) -> None:
    """8 by default: 6 lanes, the computation and collectives fit."""
    environ = {} if queues is None else {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    assert (few_queues(6, environ) is None) == (queues != "1")
    assert few_queues(7, environ) is not None


def test_the_warning_says_what_to_export() -> None:
    assert few_queues(8, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == (
        "this rank has 10 streams (8 lanes, the computation, collectives), and "
        "CUDA_DEVICE_MAX_CONNECTIONS gives the GPU 1 queues: transfers posted ahead can stop the "
        "computation",
        "export CUDA_DEVICE_MAX_CONNECTIONS=10 before the start",
    )
