"""A manifest for JobSet: one indexed job with a pod a node, which finds the first by its name.

(jobset.sigs.k8s.io, jobset.x-k8s.io/v1alpha2: a pod is NAME-node-0-INDEX.NAME; all are started
again when one fails.)
"""

from __future__ import annotations

from autopipe.export import pods
from autopipe.export.job import Launch, check_alike
from autopipe.export.pods import Manifest

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def job_set(job: Launch) -> str:
    """The manifest.

    Raises:
        AutopipeError: nodes differ, or the image or the volume is missing.
    """
    check_alike(job, "JobSet")
    words = job.words
    pod: Manifest = {
        "restartPolicy": "Never",  # JobSet starts all pods again, not one
        "terminationGracePeriodSeconds": pods.GRACE,
        "containers": [pods.container(job, "node", _environment(job))],
        "volumes": pods.volumes(job),
    }
    indexed: Manifest = {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    if words.time_limit:
        indexed["activeDeadlineSeconds"] = words.time_limit
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(job),
        "spec": {
            "failurePolicy": {"maxRestarts": words.starts_again},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": indexed}}],
        },
    }
    return pods.text(job, "JobSet 0.8 and later", manifest)


def _environment(job: Launch) -> list[Manifest]:
    """The PET variables of a pod, as Kubeflow would set them, which `autopipe run` reads."""
    name = job.words.name
    index = {"fieldRef": {"fieldPath": _INDEX}}
    return [
        {"name": "PET_NNODES", "value": str(job.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(job.processes[0])},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": str(job.words.port or pods.PORT)},
    ]
