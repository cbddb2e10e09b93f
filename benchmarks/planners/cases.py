"""Piper's and Galvatron's plans of their own problems beside autopipe's plans: a row each.

Their figures are what their programs print, run on a 2-core x86 machine: Piper's C++ compiled with
-O3, Galvatron's search engine (Hetu-Galvatron 2.4.1) in Python and C++.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.planners import common_ground, galvatron, galvatron_problem, piper, piper_problem
from benchmarks.planners.galvatron_score import Plan
from benchmarks.planners.timing import timed

BANDWIDTH = 25 * 2**30
"""Bytes a second in all of Piper's instances."""

BATCH, DEVICES = 64, 8
"""Galvatron's rows a step, and devices."""

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
"""The micro-batches that its batch may be cut into."""

AGREE = 1e-6
"""How far two computations of one figure may be apart, relatively; theirs are printed so."""

Row = dict[str, Any]


class PiperCase(NamedTuple):
    """What Piper finds: seconds a micro-batch, None where nothing fits, in CPU seconds."""

    devices: int
    gibibytes: int
    micro_batches: int
    objective: float | None
    cpu: float
    plan: str


PIPER = (
    PiperCase(8, 4, 480, None, 0.06, "nothing fits"),
    PiperCase(8, 8, 480, 0.165856, 0.04, "tp 1 pp 8 dp 1, layers 6/4/4/4/4/4/5/6"),
    PiperCase(8, 80, 480, 0.123205, 0.04, "tp 1 pp 1 dp 8"),
    PiperCase(64, 80, 1920, 0.0156502, 0.42, "tp 1 pp 1 dp 64"),
    PiperCase(16, 8, 960, 0.0829966, 0.10, "pp 11, dp 2/2/2/1/1/1/1/1/1/2/2"),
    PiperCase(64, 8, 1920, 0.0202006, 0.19, "pp 12, dp 16/6/4/4/4/4/2/2/2/5/5/10"),
)
"""On bert32a100."""


class GalvatronCase(NamedTuple):
    """What Galvatron finds on eight devices: rows a second, in CPU seconds.

    `unsupported` is what its plan has and autopipe's cannot have.
    """

    gibibytes: int
    chunks: tuple[int, ...]
    rate: float
    cpu: float
    plan: str
    unsupported: str = ""


BY_LAYER = "a ZeRO stage for each layer"

GALVATRON = (
    GalvatronCase(24, (8,), 12.101, 26, "tp 2 pp 2 dp 2 zero 2 and 3, recomputed 16/16", BY_LAYER),
    GalvatronCase(36, (8,), 14.042, 49, "tp 2 pp 2 dp 2 zero 2 and 3, recomputed 11/6", BY_LAYER),
    GalvatronCase(80, (8,), 17.172, 81, "tp 1 pp 1 dp 8"),
    GalvatronCase(
        36,
        CHUNKS,
        15.276,
        186,
        "pp 1 dp 8, zero 3 in 27 layers and 2 in 5, recomputed 32, the vocabulary over 4 devices",
        f"other degrees for the vocabulary; {BY_LAYER}",
    ),
)
"""On LLaMA-2-7B."""


def rows(folder: Path) -> Iterator[Row]:
    """A row for every problem; CPU seconds are those after its files are read.

    Args:
        folder: with piper/bert32a100.json and galvatron/.
    """
    graph = piper.read(folder / "piper" / "bert32a100.json")
    for case in PIPER:
        yield of_piper(graph, case)
    costs = galvatron.read(folder / "galvatron")
    for one in GALVATRON:
        yield of_galvatron(costs, one)


def of_piper(graph: piper.Graph, case: PiperCase) -> Row:
    """Seconds a micro-batch: the ratio is theirs to ours."""
    memory = case.gibibytes * 2**30
    conditions = piper.Conditions(case.devices, memory, case.micro_batches, BANDWIDTH)
    found, spent = timed(piper_problem.plan, graph, conditions)
    ours, plan, wrong = None, "nothing fits", []
    if found is not None:
        planned, stages = found
        scored = piper.score(graph, conditions, stages)
        ours, plan = scored.objective, _piper_plan(stages)
        if abs(planned / ours - 1) > AGREE:
            wrong.append(f"the planner says {planned} seconds, Piper's formulas {ours}")
        if max(scored.memory) > memory:
            wrong.append(f"a stage needs {max(scored.memory)} of {memory} bytes")
    if (ours is None) != (case.objective is None):
        wrong.append("a plan fits for one of both alone")
    ratio = None if ours is None or case.objective is None else case.objective / ours
    return {
        "case": f"piper/bert32a100, {case.devices} devices of {case.gibibytes} GiB, "
        f"{case.micro_batches} micro-batches",
        "unit": "seconds a micro-batch",
        **{"theirs": case.objective, "ours": ours, "ratio": ratio, "feasible": ours is not None},
        **{"cpu_theirs": case.cpu, "cpu_ours": spent, "plan_theirs": case.plan, "plan_ours": plan},
        **{"unsupported": "", "wrong": wrong},
    }


def of_galvatron(costs: galvatron.Costs, case: GalvatronCase) -> Row:
    """Rows a second: the ratio is ours to theirs. `both` is the best that both can express."""
    limit = case.gibibytes * 1024
    found, spent = timed(galvatron_problem.plan, costs, BATCH, DEVICES, limit, case.chunks)
    common = common_ground.best(costs, BATCH, DEVICES, limit, case.chunks)
    both = None if common is None else BATCH / common[0].seconds
    ours, plan, wrong = None, "nothing fits", []
    if found is not None:
        scored, chosen = found
        ours, plan = BATCH / scored.seconds, _galvatron_plan(chosen)
        if max(scored.memory) > limit:
            wrong.append(f"a stage needs {max(scored.memory)} of {limit} MiB")
    if both is not None and (ours is None or ours < both * (1 - AGREE)):
        wrong.append(f"there is a plan of {both} rows a second")
    count = "any" if len(case.chunks) > 1 else case.chunks[0]
    return {
        "case": f"galvatron/llama2-7b, {DEVICES} devices of {case.gibibytes} GiB, "
        f"{count} micro-batches",
        "unit": "rows a second",
        **{"theirs": case.rate, "both": both, "ours": ours},
        **{"ratio": None if ours is None else ours / case.rate, "feasible": ours is not None},
        **{"cpu_theirs": case.cpu, "cpu_ours": spent, "plan_theirs": case.plan, "plan_ours": plan},
        **{"unsupported": case.unsupported, "wrong": wrong},
    }


def _piper_plan(stages: list[piper.Stage]) -> str:
    layers = "/".join(str(len(stage.layers)) for stage in stages)
    again = "/".join(str(len(stage.recomputed)) for stage in stages)
    each = [stage.dp for stage in stages]
    dp = each[0] if len({*each}) == 1 else "/".join(map(str, each))
    degrees = f"tp {stages[0].tp} pp {len(stages)} dp {dp}"
    return f"{degrees}, layers {layers}, recomputed {again}"


def _galvatron_plan(plan: Plan) -> str:
    way = plan.vocabulary
    layers = "/".join(str(len(stage)) for stage in plan.stages)
    again = "/".join(str(sum(layer.recomputed for layer in stage)) for stage in plan.stages)
    degrees = f"tp {way.tp} pp {len(plan.stages)} dp {way.dp} zero {way.zero}"
    return f"{degrees}, micro-batches {plan.micro_batches}, layers {layers}, recomputed {again}"
