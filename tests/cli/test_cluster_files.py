"""A cluster file with a figure that cannot be is refused by the place of the figure in the file."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.shell import Shell

LINK = {"latency": 1e-5, "bandwidth": 1e9}


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        # Bug: those of a device alone were looked at, and 25 GB/s planned as 25 bytes a second.
        ("within.bandwidth", 25, "within.bandwidth: expected at least 1e5 a second, found 25"),
        ("between.latency", 5, "between.latency: expected less than 1 s, found 5 s"),
        ("across", {**LINK, "summing": 12.5}, "across.summing: expected at least 1e5 a second"),
        ("nodes.0.within", {**LINK, "latency": 5}, "nodes[0].within.latency: expected less than"),
        (
            "nodes.0.groups.0.device.host",
            64,
            "nodes[0].groups[0].device.host: expected at least 1e6 a second, found 64",
        ),
    ],
)
def test_a_link_of_a_cluster_file_in_other_units(
    place: str, value: object, sentence: str, autopipe: Shell, four: str
) -> None:
    data = json.loads(Path(four).read_text())
    *parts, last = place.split(".")
    part: Any = data
    for word in parts:
        part = part[int(word) if word.isdigit() else word]
    part[last] = value
    autopipe.write("cluster.json", json.dumps(data))
    error = autopipe("plan", "net.py", "--cluster", "cluster.json").error
    assert error.startswith(f"cluster.{sentence}")
    assert "hint: `autopipe probe -o FILE`" in error


@pytest.mark.parametrize(
    ("figure", "value", "sentence"),
    [
        ("memory", None, "memory: missing; expected an integer"),
        ("memory", -1, "memory: expected more than 0, found -1"),
        ("memory", "80GiB", 'memory: expected an integer, found "80GiB"'),
        ("bandwidth", 0, "bandwidth: expected more than 0, found 0.0"),
        ("launch", -1e-6, "launch: expected at least 0, found -1e-06"),
        ("flops", {"fp32": -1e12}, "flops.fp32: expected more than 0, found -1000000000000.0"),
        ("flops", {}, "flops: expected at least one entry, found none"),
        # Bug: a step of 44,687,921 s was planned without a word.
        ("memory", 80, "memory: expected at least 1e6 bytes, found 80"),
        ("flops", {"fp32": 19.5}, "flops.fp32: expected at least 1e6 a second, found 19.5"),
        ("bandwidth", 2000, "bandwidth: expected at least 1e6 a second, found 2000"),
        ("launch", 6, "launch: expected less than 1 s, found 6 s"),
    ],
)
def test_a_figure_of_a_cluster_file(
    figure: str, value: object, sentence: str, autopipe: Shell, four: str
) -> None:
    """Its place in the file, what was expected there, and how to come by a right one."""
    data = json.loads(Path(four).read_text())
    device = data["nodes"][0]["groups"][0]["device"]
    del device[figure]
    if value is not None:
        device[figure] = value
    autopipe.write("cluster.json", json.dumps(data))
    error = autopipe("plan", "net.py", "--cluster", "cluster.json").error
    place, _, hint = error.partition("\n\nhint: ")
    assert place == f"cluster.nodes[0].groups[0].device.{sentence}"
    assert hint.startswith("`autopipe probe -o FILE` writes a whole one")
    assert autopipe.files() == ["cluster.json", "net.py"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cluster.json: the cluster is an empty file\n\nhint: was it copied whole?"),
        ("[]", "cluster: expected an object, found [] in cluster.json\n\nhint: "),
        ('{"name": "x"', "cluster.json, line 1, column 13: the file ends in the middle\n\nhint: "),
        ('{"nodos": []}', "cluster.nodos: unknown field; Cluster has name, nodes, within, "),
    ],
)
def test_a_cluster_file_that_is_none(text: str, sentence: str, autopipe: Shell) -> None:
    autopipe.write("cluster.json", text)
    error = autopipe("plan", "net.py", "--cluster", "cluster.json").error
    assert error.startswith(sentence) and "\n\nhint: " in error
