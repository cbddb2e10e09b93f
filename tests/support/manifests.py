"""Kubernetes' manifests, read strictly: a field that nobody knows is an error, and a wrong type.

By the types of the package kubeflow-trainer-api, which has Kubernetes', JobSet's and the trainer's;
and, where AUTOPIPE_CRDS names a folder with custom resource definitions (YAML files as their
projects publish them), by these too. Rules in CEL are not evaluated; `names` has those for names.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CRDS = os.environ.get("AUTOPIPE_CRDS")

_TYPES = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}


def _type(name: str) -> Any:
    """Loaded when it is asked for: every process of a run collects who may ask, one does ask."""
    return getattr(import_module("kubeflow_trainer_api.models"), name)


_PYTORCH_JOB = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs", "elasticPolicy"},
    "spec.runPolicy": {
        *("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "schedulingPolicy"),
        *("suspend", "ttlSecondsAfterFinished", "managedBy"),
    },
    "spec.pytorchReplicaSpecs": {"Master", "Worker"},
}
"""Fields of kubeflow.org/v1, whose types are in no package of that size."""


def wrong(text: str) -> list[str]:
    """What is wrong with a manifest; empty where nothing is."""
    found = yaml.safe_load(text)
    return [*_by_types(found), *names(found), *_by_definitions(found)]


def _by_types(found: dict[str, Any]) -> list[str]:
    if found["kind"] == "PyTorchJob":
        return _pytorch_job(found)
    return _read(_type(_TYPES[found["kind"]]), found, found["kind"])


def _read(of: Any, found: Any, where: str) -> list[str]:
    """What a type refuses, or does not give back."""
    try:
        back = of.from_dict(found)
    except Exception as error:
        return [f"{where}: {error}"]
    return [*_lost(found, json.loads(json.dumps(back.to_dict())), where)]


def _lost(given: Any, back: Any, where: str) -> list[str]:
    if isinstance(given, dict) and isinstance(back, dict):
        unknown = [f"{where}.{key}: unknown" for key in given if key not in back]
        return unknown + [
            line
            for key in given.keys() & back.keys()
            for line in _lost(given[key], back[key], f"{where}.{key}")
        ]
    if isinstance(given, list) and isinstance(back, list):
        pairs = enumerate(zip(given, back, strict=True))
        return [line for n, (one, other) in pairs for line in _lost(one, other, f"{where}[{n}]")]
    return [] if given == back else [f"{where}: {given!r} was read as {back!r}"]


def _pytorch_job(found: dict[str, Any]) -> list[str]:
    lines = []
    for path, known in _PYTORCH_JOB.items():
        part = functools.reduce(lambda value, key: value[key], filter(None, path.split(".")), found)
        lines += [f"{path}.{key}: unknown" for key in part if key not in known]
    spec = found["spec"]
    if not isinstance(spec.get("nprocPerNode"), str):
        lines.append("spec.nprocPerNode: expected a text")
    for name, replica in spec.get("pytorchReplicaSpecs", {}).items():
        where = f"spec.pytorchReplicaSpecs.{name}"
        lines += [
            f"{where}.{key}: unknown"
            for key in replica
            if key not in {"replicas", "restartPolicy", "template"}
        ]
        if not isinstance(replica.get("replicas"), int):
            lines.append(f"{where}.replicas: expected a number")
        lines += _read(_type("IoK8sApiCoreV1PodTemplateSpec"), replica.get("template"), where)
        containers = [each["name"] for each in replica["template"]["spec"]["containers"]]
        if "pytorch" not in containers:
            lines.append(f"{where}: no container is called pytorch")
    return lines


_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

_RESERVED = {f"PET_{n}" for n in ("NNODES", "NPROC_PER_NODE", "NODE_RANK", "MASTER_ADDR")}


def names(found: dict[str, Any]) -> list[str]:
    """Names that are no labels of RFC 1035; variables that the trainer keeps for itself."""
    lines = []
    if not _LABEL.fullmatch(str(found["metadata"].get("name"))):
        lines.append("metadata.name: expected a label of RFC 1035")
    if found["kind"] == "TrainJob":
        trainer = found["spec"].get("trainer", {})
        lines += [
            f"spec.trainer.env: {each['name']} is the trainer's own"
            for each in trainer.get("env", [])
            if each["name"] in _RESERVED
        ]
        if not isinstance(trainer.get("numNodes"), int) or trainer["numNodes"] < 1:
            lines.append("spec.trainer.numNodes: expected at least 1")
    return lines


def _by_definitions(found: dict[str, Any]) -> list[str]:
    if CRDS is None:
        return []
    validator = _definitions(CRDS)[found["apiVersion"], found["kind"]]
    return [f"{error.json_path}: {error.message[:100]}" for error in validator.iter_errors(found)]


@functools.cache
def _definitions(folder: str) -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    validators = {}
    for path in Path(folder).glob("*.yaml"):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        for document in yaml.load_all(path.read_text(), loader):
            spec = document["spec"]
            for version in spec["versions"]:
                schema = _strict(copy.deepcopy(version["schema"]["openAPIV3Schema"]))
                schema["properties"]["metadata"] = {"type": "object"}
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                validators[key] = jsonschema.Draft202012Validator(schema)
    return validators


def _strict(schema: Any) -> Any:
    """A definition's schema in which fields that it does not name are errors."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields", False)
    dropped = ("x-kubernetes", "format", "default")
    found = {key: value for key, value in schema.items() if not key.startswith(dropped)}
    if "properties" in found:
        found["properties"] = {key: _strict(of) for key, of in found["properties"].items()}
        if not open_ended:
            found.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(found.get(key), dict):
            found[key] = _strict(found[key])
    return found
