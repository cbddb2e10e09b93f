"""Write and read the folder that a run records into (`autopipe run --record FOLDER`).

plan.json        what it ran
metrics.jsonl    a line of figures for each logged step
trace.json       what every rank did when, in the last steps      `report.perfetto`
measured.json    each stage's seconds and bytes, at its end
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from autopipe.errors import AutopipeError
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import StagePrediction
from autopipe.schedules.instructions import Instruction, parse
from autopipe.util import atomic_file, codec

PLAN, METRICS, TRACE, MEASURED = "plan.json", "metrics.jsonl", "trace.json", "measured.json"


@dataclass(frozen=True)
class MeasuredRun:
    """What a run has measured of its plan.

    Attributes:
        stages: of each stage its seconds of a micro-batch, and its bytes.
        step_seconds: the median step, before the optimizer's part.
        bubbles: of each stage the share of a step for which its rank did not compute.
    """

    stages: tuple[StagePrediction, ...]
    step_seconds: float
    bubbles: tuple[float, ...] = ()


class Slice(NamedTuple):
    """An instruction of a rank, in seconds from the begin of its step."""

    instruction: Instruction
    start: float
    end: float


Lanes = tuple[tuple[Slice, ...], ...]
"""Of each rank of a pipeline what it did in one step."""


@dataclass(frozen=True)
class Recording:
    """A run.

    Attributes:
        metrics: of each logged step its figures, by name.
        measured: None: the run has not ended.
        lanes: of the first pipeline, in its step of median length; None: nothing was traced.
    """

    plan: Plan
    metrics: tuple[dict[str, float], ...]
    measured: MeasuredRun | None
    lanes: Lanes | None


def begin(folder: Path, *, leads: bool, resume: bool) -> None:
    """Make a run's folder, or refuse a folder with another run in it.

    Args:
        leads: this process makes the folder; other processes check that it can be made.
        resume: this run may continue the run in the folder.

    Raises:
        AutopipeError: the folder has another run, or cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise AutopipeError(
            f"--record {folder}: expected a folder, found a file", hint="name another one"
        )
    atomic_file.check_folder(folder)
    if not leads:
        return
    if (folder / PLAN).exists() and not resume:
        raise AutopipeError(
            f"--record {folder} has an earlier run",
            hint="--resume goes on from it; to begin anew, give another folder",
        )
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise AutopipeError(
            f"--record {folder} cannot be made: {error.strerror}",
            hint="name a place in which you may write",
        ) from error


def end(
    folder: Path,
    stages: Sequence[StagePrediction],
    step_seconds: float,
    bubbles: Sequence[float],
) -> None:
    """Write a run's measured figures to its folder, as a `MeasuredRun`."""
    codec.save(MeasuredRun(tuple(stages), step_seconds, tuple(bubbles)), folder / MEASURED)


def keep_trace(folder: Path, trace: Path) -> None:
    """Copy a run's trace into its folder, uncompressed, where it was not written there."""
    if trace.resolve() != (folder / TRACE).resolve():
        data = trace.read_bytes()
        unpacked = gzip.decompress(data) if trace.suffix == ".gz" else data  # as `perfetto.save`
        atomic_file.write(unpacked, folder / TRACE)


def load(folder: Path) -> Recording:
    """Read a run's folder.

    Raises:
        AutopipeError: there is no plan in it, or a file is damaged; names the file.
    """
    path = folder / PLAN
    if not path.is_file():
        raise AutopipeError(
            f"{folder} has no {PLAN}, so it is no folder of a run's",
            hint=f"autopipe run plan.json --record {shlex.quote(str(folder))}; "
            "or autopipe report plan.json",
        )
    plan = Plan.load(path)
    measured, trace = folder / MEASURED, folder / TRACE
    found = codec.load(MeasuredRun, measured, root="measured") if measured.is_file() else None
    if found is not None and len(found.stages) != len(plan.stages):
        raise AutopipeError(
            f"{measured} has {len(found.stages)} stages, and the plan {len(plan.stages)}"
        )
    return Recording(
        plan,
        tuple(_metrics(folder / METRICS)),
        found,
        _lanes(trace, plan.mesh.pp) if trace.is_file() else None,
    )


def _metrics(path: Path) -> Iterator[dict[str, float]]:
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            yield {str(name): float(figure) for name, figure in data.items()}
        except (ValueError, TypeError, AttributeError, RecursionError):
            if number < len(lines):  # the last may be cut short: the run was killed
                raise AutopipeError(
                    f"{path}:{number}: expected an object of numbers, found {line[:40]!r}"
                ) from None


_RANK = re.compile(r"rank (?P<rank>\d+): .*replica 0(?:, part 0)?")


def _lanes(path: Path, ranks: int) -> Lanes | None:
    """The step of median length of the first pipeline in a trace."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        lanes = _first_pipeline(rows)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise AutopipeError(f"{path} is no trace that `autopipe run` has written") from None
    if not lanes or len(lanes) != ranks:
        return None
    steps = set.intersection(*({number for number in lane} for lane in lanes))
    if not steps:
        return None

    def wall(number: int) -> tuple[float, float]:
        own = [lane[number] for lane in lanes]
        return min(s[0].start for s in own), max(s[-1].end for s in own)

    lengths = {number: wall(number)[1] - wall(number)[0] for number in steps}
    middle = median(lengths.values())
    chosen = min(steps, key=lambda number: (abs(lengths[number] - middle), number))
    begin = wall(chosen)[0]
    return tuple(
        tuple(Slice(s.instruction, s.start - begin, s.end - begin) for s in lane[chosen])
        for lane in lanes
    )


def _first_pipeline(rows: list[dict[str, Any]]) -> list[dict[int, list[Slice]]]:
    """The steps of the first pipeline's ranks, by rank and by the number of the step."""
    names = {row["pid"]: row["args"]["name"] for row in rows if row.get("name") == "process_name"}
    ranks = {
        pid: int(match["rank"])
        for pid, name in names.items()
        if (match := _RANK.fullmatch(name)) is not None
    }
    bounds: dict[int, list[tuple[float, float, int]]] = {pid: [] for pid in ranks}
    slices: dict[int, list[Slice]] = {pid: [] for pid in ranks}
    for row in rows:
        if row.get("ph") != "X" or row["pid"] not in ranks:
            continue
        start, end = row["ts"] * 1e-6, (row["ts"] + row["dur"]) * 1e-6
        if not (math.isfinite(start) and math.isfinite(end)):
            raise ValueError(row)
        if row["cat"] == "steps":
            bounds[row["pid"]].append((start, end, int(row["name"].removeprefix("step "))))
        elif row["cat"] in ("compute", "waits"):
            slices[row["pid"]].append(Slice(parse(row["args"]["instruction"]), start, end))
    lanes = []
    for pid in sorted(ranks, key=ranks.__getitem__):
        steps: dict[int, list[Slice]] = {}
        for start, end, number in bounds[pid]:
            inside = [s for s in slices[pid] if start <= s.start + 1e-9 and s.end <= end + 1e-9]
            if inside:
                steps[number] = sorted(inside, key=lambda each: each.start)
        lanes.append(steps)
    return lanes
