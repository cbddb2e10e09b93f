"""Manifests for Kubernetes, read strictly; ten that are wrong; and what no pod can be given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autopipe.errors import AutopipeError
from autopipe.export.targets import export
from autopipe.export.words import Words
from tests.support.manifests import wrong
from tests.support.spread import on_cpus, spread

TARGETS = ("kubeflow", "pytorchjob", "jobset")
GPUS = spread("2x4xA100-80GB", [4, 4])
LEAST = Words(image="registry.local/autopipe:0.1")
FULL = Words(
    name="gpt-7b", image="nvcr.io/nvidia/pytorch:25.01-py3", namespace="ml", claim="data",
    folder="/data/it's $(HOME)", checkpoints="kept", save_every=100, keep=3, cpus=32,
    memory="256Gi", time_limit=86400, interface="eth0", run=("--steps", "1000"),
)  # fmt: skip


def made(target: str, words: Words = FULL) -> dict[str, Any]:
    found = yaml.safe_load(export(GPUS, target, "plan.json", words))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("words", [LEAST, FULL], ids=["least", "full"])
@pytest.mark.parametrize("plan", [GPUS, on_cpus(1, 2)], ids=["gpus", "cpus"])
def test_it_is_what_the_cluster_reads(plan: Any, words: Words, target: str) -> None:
    assert wrong(export(plan, target, "plan.json", words)) == []


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    """The one container that starts ranks."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        return dict(spec["trainer"])
    if manifest["kind"] == "PyTorchJob":
        return dict(spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0])
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return dict(pod["containers"][0])


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_container_runs(target: str) -> None:
    """Kubernetes puts variables in the place of $(NAME), and a $ in that of $$."""
    there = "/data/it's $$(HOME)"
    assert container(made(target))["command"] == [
        "python", "-m", "autopipe", "run", f"{there}/plan.json",
        "--checkpoints", f"{there}/kept", "--resume", "--save-every", "100", "--keep", "3",
        "--steps", "1000",
    ]  # fmt: skip


def test_how_many_there_are() -> None:
    trainer = made("kubeflow")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {
        "cpu": "32", "memory": "256Gi", "nvidia.com/gpu": 4,
    }  # fmt: skip
    older = made("pytorchjob")["spec"]
    assert older["nprocPerNode"] == "4"
    assert {name: of["replicas"] for name, of in older["pytorchReplicaSpecs"].items()} == {
        "Master": 1, "Worker": 1,
    }  # fmt: skip
    told = {each["name"]: each.get("value") for each in container(made("jobset"))["env"]}
    assert told["PET_NNODES"] == "2" and told["PET_NPROC_PER_NODE"] == "4"
    assert told["PET_MASTER_ADDR"] == "gpt-7b-node-0-0.gpt-7b"


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_pod_cannot_do_without(target: str) -> None:
    with pytest.raises(AutopipeError, match="a pod needs an image"):
        export(GPUS, target, "plan.json", Words())
    lost = Words(image="i", checkpoints="kept")
    with pytest.raises(AutopipeError, match="checkpoints in a pod are lost with it"):
        export(GPUS, target, "plan.json", lost)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kept", ["/data/kept", "../kept", "/workspace/../kept"])
def test_checkpoints_that_the_claim_does_not_hold(kept: str, target: str) -> None:
    words = Words(image="i", claim="data", checkpoints=kept)
    with pytest.raises(AutopipeError) as error:
        export(GPUS, target, "plan.json", words)
    assert error.value.message == (
        f"--checkpoints {kept}: what is not below /workspace, where the claim data is mounted, "
        "is lost with a pod"
    )
    export(GPUS, target, "plan.json", replace(words, checkpoints="/workspace/kept"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("folder", ["run", "./run", "/run:ro"])
def test_a_folder_that_no_container_has(folder: str, target: str) -> None:
    """Kubernetes mounts `run` at /run, and a command looks for it where the image begins."""
    with pytest.raises(AutopipeError, match="--folder: expected a path in the container from / on"):
        export(GPUS, target, "plan.json", Words(image="i", folder=folder))


def _rename(at: dict[str, Any], key: str, other: str) -> None:
    at[other] = at.pop(key)


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a misspelt field of the trainer": (
        "kubeflow", lambda m: _rename(m["spec"]["trainer"], "numNodes", "numNode"),
    ),
    "a text for a number": (
        "kubeflow", lambda m: m["spec"]["trainer"].update(numProcPerNode="4"),
    ),
    "a variable that is the trainer's": (
        "kubeflow", lambda m: m["spec"]["trainer"]["env"][0].update(name="PET_NNODES"),
    ),
    "no runtime": ("kubeflow", lambda m: m["spec"].pop("runtimeRef")),
    "a name with a capital": ("kubeflow", lambda m: m["metadata"].update(name="GPT")),
    "a number for a text": ("pytorchjob", lambda m: m["spec"].update(nprocPerNode=4)),
    "a container of another name": (
        "pytorchjob",
        lambda m: m["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
        .update(name="node"),
    ),
    "a misspelt policy": (
        "jobset", lambda m: m["spec"].update(failurePolicy={"maxRestart": 3}),
    ),
    "a misspelt mode": (
        "jobset",
        lambda m: _rename(
            m["spec"]["replicatedJobs"][0]["template"]["spec"], "completionMode", "completionMod"
        ),
    ),
    "a variable that is a number": (
        "jobset",
        lambda m: m["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        ["containers"][0]["env"].append({"name": "A", "value": 1}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_one_that_is_wrong_is_found(what: str) -> None:
    """The reading of this test would notice."""
    target, change = WRONG[what]
    manifest = made(target)
    change(manifest)
    assert wrong(yaml.safe_dump(manifest)) != []
