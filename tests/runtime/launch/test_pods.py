"""What Kubeflow tells the container of a node, and the ranks that are started from it."""

import sys
from pathlib import Path

import pytest

from autopipe.errors import LaunchError
from autopipe.runtime.launch.pods import Pod, environments, pod_from
from autopipe.runtime.launch.world import World, world_from
from tests.support.shell import TORCHRUN, end, free_port, save_plans, start

# The second of two pods, as Kubeflow's trainer has it.
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}

# An older operator says these too, and means the pod.
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "1"}


def test_a_pod() -> None:
    expected = Pod(2, 1, 4, "train-node-0-0.train", 29500)
    assert pod_from(POD) == expected
    assert pod_from({**POD, **PYTORCHJOB}) == expected


def test_no_pod() -> None:
    assert pod_from({}) is None
    assert pod_from({**POD, "LOCAL_RANK": "0"}) is None  # a rank that torchrun has started in it


def test_a_pod_that_is_alone() -> None:
    assert pod_from({"PET_NNODES": "1"}) == Pod(1, 0, None, "127.0.0.1", 29500)


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_as_many_processes_as_the_plan_has(word: str) -> None:
    pod = pod_from({**POD, "PET_NPROC_PER_NODE": word})
    assert pod is not None and pod.processes is None
    assert len(environments(pod, [1, 3])) == 3


def test_its_ranks() -> None:
    """Counted node by node: the second of 4 + 4 begins with rank 4."""
    pod = pod_from(POD)
    assert pod is not None
    worlds = [world_from({**POD, **PYTORCHJOB, **own}) for own in environments(pod, [4, 4])]
    assert worlds == [
        World(4 + local, 8, local, 4, 1, "train-node-0-0.train", 29500) for local in range(4)
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES is '1:4' in the environment, expected a number: a "),
        ({"PET_NNODES": "two"}, "PET_NNODES is 'two' in the environment, expected a number"),
        ({"PET_NODE_RANK": ""}, "PET_NODE_RANK is '' in the environment, expected a number"),
        ({"PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2 in the environment, of 2 nodes from 0"),
        ({"PET_MASTER_ADDR": ""}, "PET_NNODES is '2' in the environment, but PET_MASTER_ADDR is "),
        ({"PET_MASTER_PORT": "x"}, "PET_MASTER_PORT is 'x' in the environment, expected a number"),
        ({"PET_NPROC_PER_NODE": "-1"}, "PET_NPROC_PER_NODE is '-1' in the environment, expected "),
    ],
)
def test_what_no_pod_says(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(LaunchError) as error:
        pod_from({**POD, **change})
    assert error.value.message.startswith(sentence)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ([4], "the plan is for 1 node, but PET_NNODES is 2"),
        ([4, 2], "the plan has 2 processes on node 1, but PET_NPROC_PER_NODE is 4"),
    ],
)
def test_a_plan_for_another_job(counts: list[int], sentence: str) -> None:
    pod = pod_from(POD)
    assert pod is not None
    with pytest.raises(LaunchError) as error:
        environments(pod, counts)
    assert error.value.message == sentence


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plans(tmp_path_factory.mktemp("pods"))


@pytest.mark.long
def test_a_pod_trains_by_itself_or_by_torchrun(planned: Path) -> None:
    """`autopipe run` starts the ranks of its pod; torchrun reads the same variables."""
    run, found = ("-m", "autopipe", "run", "pp2.json", "--steps", "2"), []
    for launcher in ((sys.executable,), TORCHRUN):
        pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0"}
        port = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
        said = end(start(*launcher, *run, folder=planned, environ={**pod, **port, "RANK": "0"}))
        assert said.code == 0, said.err
        found.append(said.out.splitlines()[-1])
    assert found[0] == found[1] and found[0].startswith("loss ")


def test_a_pod_of_another_plan(planned: Path) -> None:
    pod = {**POD, "PET_NODE_RANK": "0"}
    run = (sys.executable, "-m", "autopipe", "run", "pp2.json")
    said = end(start(*run, folder=planned, environ=pod))
    assert said.error == "the plan is for 1 node, but PET_NNODES is 2"
