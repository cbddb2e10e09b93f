"""What Galvatron has measured of LLaMA-2-7B on one node, read from the five files it ships.

github.com/PKU-DAIR/Hetu-Galvatron: galvatron/models/gpt/configs has the layer's times and memory,
galvatron/profile_hardware/hardware_configs what moves between the node's devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

LAYERS = 32
HIDDEN = 4096
"""LLaMA-2-7B (Touvron et al. 2023, table 1 of LLaMA)."""


@dataclass(frozen=True)
class Line:
    """slope * x + offset."""

    slope: float
    offset: float

    def __call__(self, x: float) -> float:
        return self.slope * x + self.offset


@dataclass(frozen=True)
class Message:
    """Milliseconds of a collective by MiB: as measured, and the line through it elsewhere."""

    measured: Mapping[float, float]
    line: Line

    def __call__(self, size: float) -> float:
        known = self.measured.get(size)
        return self.line(size) if known is None else known


@dataclass(frozen=True)
class Vocabulary:
    """MiB of a stage's part of the vocabulary: states by tp, saved bytes a row by width."""

    states: Mapping[int, float]
    saved: Mapping[int, float]


@dataclass(frozen=True)
class Costs:
    """What Galvatron has measured, in milliseconds and MiB.

    Attributes:
        sequence: tokens a row.
        layer, vocabulary: forward of a layer, of embedding and head together, by rows a device.
        parameters: of a layer, in fp32.
        saved: of a layer by width, a row; `kept` is what a recomputed one keeps.
        alone, first, last: the vocabulary of one stage, and of the first and last of several.
        reduce: per MiB, by (devices, neighbours or not); bus bandwidth.
        transfer: per MiB, by pipeline degree.
        gather, exchange: by devices; a gather is half an all-reduce.
    """

    sequence: int
    layer: Line
    vocabulary: Line
    parameters: float
    saved: Mapping[int, float]
    kept: float
    alone: Vocabulary
    first: Vocabulary
    last: Vocabulary
    reduce: Mapping[tuple[int, bool], float]
    transfer: Mapping[int, float]
    gather: Mapping[int, Message]
    exchange: Mapping[int, Message]


def read(folder: Path) -> Costs:
    """The costs in a folder with the five files of one model, sequence length and node."""

    def load(name: str) -> dict[str, Any]:
        found = sorted(folder.glob(f"{name}_*.json"))
        if len(found) != 1:
            raise ValueError(f"{folder} must have one file {name}_*.json and has {len(found)}")
        loaded: dict[str, Any] = json.loads(found[0].read_text())
        return loaded

    computation, memory = load("computation_profiling"), load("memory_profiling")
    reduce, transfer, messages = load("allreduce_bandwidth"), load("p2p_bandwidth"), load("sp_time")
    (sequence,) = memory["layertype_0_sp"]
    layer = memory["layertype_0_sp"][sequence]
    saved = dict(layer["tp_activation_per_bsz_dict"])
    kept = saved.pop("checkpoint")
    alone, first, last = (
        Vocabulary(_by_number(part["model_states"]), _by_number(part["activation"]))
        for part in (
            memory[f"other_memory_{which}_sp"][sequence]
            for which in ("pp_off", "pp_on_first", "pp_on_last")
        )
    )
    return Costs(
        int(sequence),
        _times(computation, "layertype_0_bsz"),
        _times(computation, "layertype_other_bsz"),
        layer["parameter_size"],
        _by_number(saved),
        kept,
        alone,
        first,
        last,
        {
            (int(key.split("_")[2]), key.endswith("_consec_1")): 1 / bandwidth
            for key, bandwidth in reduce.items()
        },
        {int(key.removeprefix("pp_size_")): 1 / bandwidth for key, bandwidth in transfer.items()},
        _messages(messages, "allreduce", 0.5),
        _messages(messages, "all2all", 1),
    )


def _by_number(table: Mapping[str, float]) -> dict[int, float]:
    return {int(key): value for key, value in table.items()}


def _line(points: Mapping[float, float]) -> Line:
    return Line(*linear_regression(list(points), list(points.values())))


def _times(table: Mapping[str, float], prefix: str) -> Line:
    """Through the times of whole batches; the file has them per row."""
    points: dict[float, float] = {}
    for key, each in table.items():
        if key.startswith(prefix):
            rows = int(key.removeprefix(prefix).split("_")[0])
            points[rows] = each * rows
    return _line(points)


def _messages(table: Mapping[str, float], collective: str, share: float) -> dict[int, Message]:
    found: dict[int, dict[float, float]] = {}
    for key, milliseconds in table.items():
        if key.startswith(f"{collective}_size_"):
            devices, size = key.removeprefix(f"{collective}_size_").split("_")[:2]
            found.setdefault(int(devices), {})[int(size.removesuffix("MB"))] = milliseconds * share
    return {devices: Message(points, _line(points)) for devices, points in found.items()}
