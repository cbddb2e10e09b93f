"""Manifests for Kubeflow: a TrainJob of its trainer, or a PyTorchJob of its older operator.

Both set PET_* variables with the number of pods and of the pod itself, from which `autopipe run`
starts the pod's ranks. (kubeflow.github.io/trainer, v2.3: TrainJob, trainer.kubeflow.org/v1alpha1;
kubeflow.org/v1: PyTorchJob, v1.9.)
"""

from __future__ import annotations

from autopipe.export import pods
from autopipe.export.job import Launch, check_alike
from autopipe.export.pods import Manifest


def train_job(job: Launch) -> str:
    """A TrainJob for the runtime torch-distributed, which says PET_* itself.

    Raises:
        AutopipeError: nodes differ, or the image or the volume is missing.
    """
    check_alike(job, "Kubeflow")
    trainer = {
        "image": pods.image(job),
        "command": pods.command(job),
        "env": pods.environment(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.processes[0],
        "resourcesPerNode": pods.resources(job),
    }
    pod = {
        "terminationGracePeriodSeconds": pods.GRACE,
        "volumes": pods.volumes(job),
        "containers": [{"name": "node", "volumeMounts": pods.mounts(job)}],
    }
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    spec: Manifest = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {key: value for key, value in trainer.items() if value},
        "runtimePatches": [
            {
                "manager": "autopipe.dev/export",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
            }
        ],
    }
    if job.words.time_limit:
        spec["activeDeadlineSeconds"] = job.words.time_limit
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.metadata(job),
        "spec": spec,
    }
    return pods.text(job, "Kubeflow's trainer 2.2 and later", manifest)


def pytorch_job(job: Launch) -> str:
    """A PyTorchJob: one pod is the master, the others are workers.

    Raises:
        AutopipeError: as `train_job`.
    """
    check_alike(job, "Kubeflow")
    pod = {
        "terminationGracePeriodSeconds": pods.GRACE,
        "containers": [pods.container(job, "pytorch")],
        "volumes": pods.volumes(job),
    }
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    policy: Manifest = {"cleanPodPolicy": "None", "backoffLimit": job.words.starts_again}
    if job.words.time_limit:
        policy["activeDeadlineSeconds"] = job.words.time_limit
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata(job),
        "spec": {
            "nprocPerNode": str(job.processes[0]),  # a text in this version
            "runPolicy": policy,
            "pytorchReplicaSpecs": {
                name: {
                    "replicas": count,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": pod},
                }
                for name, count in replicas.items()
                if count
            },
        },
    }
    return pods.text(job, "Kubeflow's training operator 1.9", manifest)
