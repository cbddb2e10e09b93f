"""Scores as tables: errors by table and profile, rows that are far off, rows said not to fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.published import scores
from benchmarks.published.scores import Prediction

FAR = 0.25
"""The error of a step from which on a row is shown by itself."""


def summaries(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    """Sweeps, tables and profiles by their names, and all rows together."""
    lines = [{"kind": "sweep", **sweep} for sweep in scores.sweeps(predictions)]
    for kind, name_of in _KINDS.items():
        groups: dict[str, list[Prediction]] = defaultdict(list)
        for prediction in predictions:
            groups[name_of(prediction)].append(prediction)
        lines += [{"kind": kind, "rows_of": n, **scores.summary(ps)} for n, ps in groups.items()]
    return lines


_KINDS: dict[str, Callable[[Prediction], str]] = {
    "table": lambda p: p.run.table,
    "device": lambda p: p.run.gpu,
    "software": lambda p: p.run.software.name,
    "all": lambda p: "all",
}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Summaries, and under them the sweeps that are not ordered as they are held to."""
    lines = list(lines)
    shown = [
        [_cell(line.get(key), shown_as) for key, shown_as in _COLUMNS.values()]
        for line in lines
        if line["kind"] != "sweep"
    ]
    bad = [
        f"sweep {line['table']} {line['model']}, {line['rows']} rows: rank correlation "
        f"{line['rank_correlation']:.3f}, best {line['best']:+.1%}"
        for line in lines
        if line["kind"] == "sweep" and not line["held"]
    ]
    return "\n".join([_markdown(list(_COLUMNS), shown), *([""] if bad else []), *bad])


_COLUMNS = {
    "rows of": ("rows_of", ""),
    "timed": ("step_rows", ""),
    "error, median": ("step_median_error", ".1%"),
    "p90": ("step_p90_error", ".1%"),
    "bias": ("step_bias", "+.1%"),
    "memory": ("memory_rows", ""),
    "median": ("memory_median_error", ".1%"),
    "ran": ("ran", ""),
    "said not to fit": ("ran_misfit", ""),
    "ran out": ("oom", ""),
    "said to fit": ("oom_fit", ""),
}
"""Heading, key of a summary, and how it is shown."""


def far(predictions: Iterable[Prediction]) -> str:
    """The rows whose step is more than `FAR` off, the most wrong first."""
    found = [(p.error, p) for p in predictions if p.error is not None and abs(p.error) > FAR]
    rows = [
        [p.run.id, p.run.name, _layout(p), f"{p.run.seconds:.3g}", f"{p.seconds:.3g}", f"{e:+.1%}"]
        for e, p in sorted(found, key=lambda pair: -abs(pair[0]))
    ]
    heads = ["more than 25 % off", "model", "layout", "published s", "predicted s", "error"]
    return _markdown(heads, rows)


def misfits(predictions: Iterable[Prediction]) -> str:
    """The rows that ran and are said not to fit, with what takes the bytes."""
    found = [p for p in predictions if p.oom and not p.run.oom]
    rows = []
    for p in sorted(found, key=lambda p: -p.needed / p.capacity):
        kinds = sorted(p.bytes.items(), key=lambda pair: -pair[1])
        parts = ", ".join(f"{kind} {size / 2**30:.0f}" for kind, size in kinds if size > 2**30)
        published = f"{p.run.memory / 2**30:.0f}" if p.run.memory else ""
        held = [f"{size / 2**30:.0f}" for size in (p.needed, p.capacity)]
        rows.append([p.run.id, p.run.name, _layout(p), *held, published, parts])
    heads = ["ran, said not to fit", "model", "layout", "GiB", "of", "published", "GiB by kind"]
    return _markdown(heads, rows)


def chosen(lines: Iterable[Mapping[str, Any]]) -> str:
    """Rows with a free choice: both layouts by the tool's estimate, and the ratio where both fit.

    Below 1 the search has missed something.
    """
    rows = []
    for line in lines:
        if free := line.get("free"):
            ours, seconds = free.get("seconds"), line["predicted_step_s"]
            fits = "yes" if line["fits"] else "no"
            cells = [free.get("refused", ""), "", ""]
            if ours:
                ratio = f"{seconds / ours:.2f}" if line["fits"] else ""
                cells = [free["layout"], f"{ours:.3g}", ratio]
            rows.append([line["row"], line["layout"], f"{seconds:.3g}", fits, *cells])
    heads = ["row", "its layout", "s", "fits", "free choice", "s", "its / free"]
    return _markdown(heads, rows) if rows else ""


def _layout(p: Prediction) -> str:
    run = p.run
    words = [f"tp={run.tp} pp={run.pp} dp={run.dp} m={run.micro_batches}x{run.micro_batch}"]
    words += [run.schedule] if run.pp > 1 else []
    words += [f"chunks={run.chunks}"] if run.schedule == "interleaved" else []
    words += [f"zero={run.sharding}"] if run.sharding else []
    words += [f"recompute={run.recompute}"] if run.recompute != "none" else []
    return " ".join([*words, run.attention])


def _cell(value: object, shown_as: str) -> str:
    return "" if value is None else format(value, shown_as)


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
