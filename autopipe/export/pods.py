"""The container of a node, as Kubeflow's manifests and JobSet's have it, and texts of YAML."""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath
from typing import Any

import yaml

from autopipe.errors import AutopipeError
from autopipe.export.job import Launch
from autopipe.export.links import settings
from autopipe.util.version import VERSION

Manifest = dict[str, Any]

PORT = 29500
"""Where rank 0 listens: what Kubeflow's trainer takes."""

GRACE = 120
"""Seconds that a pod has for its last checkpoint between being asked to end and being killed."""

FOLDER = "/workspace"
"""Where a container has the plan and the model file, unless told otherwise."""


def command(job: Launch) -> list[str]:
    """What a container runs: `autopipe run`, which starts the ranks of its pod.

    Kubernetes replaces $(NAME) in a command; $$ is a $.
    """
    folder = _folder(job)
    found = list(job.command)
    found[2] = str(folder / job.path)
    if job.words.checkpoints is not None:
        at = found.index("--checkpoints") + 1
        found[at] = str(folder / job.words.checkpoints)
    return ["python", "-m", *(word.replace("$", "$$") for word in found)]


def image(job: Launch) -> str:
    """The container image.

    Raises:
        AutopipeError: none was named.
    """
    if job.words.image is None:
        raise AutopipeError(
            "a pod needs an image, and none was named",
            hint="--image registry/name:tag, with autopipe, the plan and the model file in it",
        )
    return job.words.image


def environment(job: Launch) -> list[Manifest]:
    """Variables of a container."""
    return [{"name": name, "value": value} for name, value in settings(job).items()]


def resources(job: Launch) -> Manifest:
    """The CPUs, memory and GPUs that a container requests; empty if the user named none."""
    words = job.words
    asked = {"cpu": str(words.cpus) if words.cpus else None, "memory": words.memory}
    limits: Manifest = {name: value for name, value in asked.items() if value is not None}
    if job.gpu:
        limits["nvidia.com/gpu"] = job.devices[0]
    return {"requests": limits, "limits": limits} if limits else {}


def volumes(job: Launch) -> list[Manifest]:
    """A pod's volumes: shared memory (a container's own is 64 MiB), and the claim if given."""
    found: list[Manifest] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    if job.words.claim is not None:
        claim = {"claimName": job.words.claim}
        found.append({"name": "folder", "persistentVolumeClaim": claim})
    return found


def mounts(job: Launch) -> list[Manifest]:
    """Where a container finds the pod's volumes.

    Raises:
        AutopipeError: checkpoints are asked for, and no volume outlives the pod, or they are not to
            be in it.
    """
    words, folder = job.words, _folder(job)
    if words.checkpoints is not None and words.claim is None:
        raise AutopipeError(
            "checkpoints in a pod are lost with it",
            hint="--claim NAME, a volume claim that all pods can write (ReadWriteMany)",
        )
    if words.checkpoints is not None and not _below(folder, words.checkpoints):
        raise AutopipeError(
            f"--checkpoints {words.checkpoints}: what is not below {folder}, where the claim "
            f"{words.claim} is mounted, is lost with a pod",
            hint="--checkpoints NAME, which is taken from there; or another --folder",
        )
    found: list[Manifest] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if words.claim is not None:
        found.append({"name": "folder", "mountPath": str(folder)})
    return found


def _folder(job: Launch) -> PurePosixPath:
    """The folder in which a container finds the plan.

    Raises:
        AutopipeError: it is no path at which Kubernetes mounts what a command finds there.
    """
    folder = PurePosixPath(job.words.folder or FOLDER)
    if not folder.is_absolute() or ":" in str(folder):
        raise AutopipeError(
            f"--folder: expected a path in the container from / on, without a colon; found "
            f"{str(folder)!r}",
            hint=f"--folder {FOLDER}, the default",
        )
    return folder


def _below(folder: PurePosixPath, path: str) -> bool:
    """Whether a path, from a folder on, stays in it."""
    return PurePosixPath(posixpath.normpath(folder / path)).is_relative_to(folder)


def container(job: Launch, name: str, more: list[Manifest] | None = None) -> Manifest:
    """A whole container that starts the ranks of its node.

    Args:
        more: variables beside those of the links.
    """
    found: Manifest = {
        "name": name,
        "image": image(job),
        "command": command(job),
        "env": [*(more or []), *environment(job)],
        "resources": resources(job),
        "volumeMounts": mounts(job),
    }
    return {key: value for key, value in found.items() if value}


def metadata(job: Launch) -> Manifest:
    """Name and namespace."""
    found = {"name": job.words.name}
    return found if job.words.namespace is None else {**found, "namespace": job.words.namespace}


def text(job: Launch, target: str, manifest: Manifest) -> str:
    """A manifest as YAML, under a line that says what it is."""
    head = f"# {job.title}\n# Written by autopipe {VERSION} for {target}: kubectl apply -f THIS\n"
    return head + yaml.dump(manifest, Dumper=_Plain, sort_keys=False, width=100)


class _Plain(yaml.SafeDumper):
    """Writes YAML without anchors (`&id001`), which people do not read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
