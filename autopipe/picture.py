"""Pictures of a timeline: as text for a terminal, as SVG for a page.

    rank 0: F0 F1 F2             B0--- F3 B1---    B2---    B3---
    rank 1:    F0 F1       B0--- F2 B1--- F3 B2---    B3---
    rank 2:       F0 B0--- F1 B1--- F2 B2--- F3 B3---

A row is a rank, to the right is time, what is empty is bubble.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from autopipe.schedule import Flow, Instruction, Kind
from autopipe.simulate import COMPUTE, Moved, Timeline


def draw(
    timeline: Timeline, unit: float = 1.0, *, waits: bool = False, transfers: bool = False
) -> str:
    """The timeline as text, a row per rank, a column of one label's width per `unit` seconds.

    Labels are kind and micro-batch, `F3`. Of two stages on a rank the second is in lower case,
    `f3`; where there are more, labels have the stage in front, `4F3`.

    Args:
        unit: seconds; a label that has less is cut off, what has no time at all still shows.
        waits: dots where a rank waits for a transfer or for sums, not only emptiness.
        transfers: below the ranks, rows for the channels whose transfers take time; each is drawn
            from its start to its arrival, in a further row if the one before is still on its way.
    """
    shown = [s for s in timeline.spans if waits or s.instruction.kind in COMPUTE]
    stages = _stages(timeline)
    labels = [_label(span.instruction, stages[span.rank]) for span in shown]
    cell = 1 + max(map(len, labels), default=0)
    rows: dict[str, str] = {f"rank {rank}": "" for rank in range(len(timeline.programs))}

    def write(name: str, label: str, start: float, end: float, fill: str = "-") -> None:
        first, last = (round(time / unit * cell) for time in (start, end))
        room = max(1, last - first - 1)
        rows[name] = f"{rows[name].ljust(first)}{label.ljust(room, fill)[:room]} "

    for span, label in zip(shown, labels, strict=True):
        fill = "-" if span.instruction.kind in COMPUTE else "."
        write(f"rank {span.rank}", label, span.start, span.end, fill)
    if transfers:
        for name, moved in _tracks(timeline.transfers):
            rows.setdefault(name, "")
            write(name, f"{moved.channel.flow.value}{moved.microbatch}", moved.start, moved.arrival)
    margin = max(map(len, rows), default=0)
    return "\n".join(
        f"{name}:".ljust(margin + 1) + f" {row}".rstrip() for name, row in rows.items()
    )


def _stages(timeline: Timeline) -> list[list[int]]:
    """The stages of each rank, ascending."""
    return [sorted({i.stage for i in program}) for program in timeline.programs]


def _label(instruction: Instruction, stages: Sequence[int]) -> str:
    """What a rank with these stages is at; nothing for a wait, which is drawn as dots."""
    kind, stage, k, *_ = instruction
    if kind not in COMPUTE:
        return ""
    label = f"{kind.value}{k}"
    if len(stages) > 2:
        return f"{stage}{label}"
    return label if stage == stages[0] else label.lower()


def _tracks(transfers: Iterable[Moved]) -> Iterator[tuple[str, Moved]]:
    """Transfers that take time, each with the name of a row on which it overlaps no other."""
    free: dict[str, list[float]] = defaultdict(list)  # of each channel's rows, from when on
    for moved in transfers:
        if moved.arrival == moved.start:
            continue
        channel = moved.channel
        rows = free[f"{channel.source} to {channel.target}"]
        row = next((n for n, time in enumerate(rows) if time <= moved.start), len(rows))
        rows[row : row + 1] = [moved.arrival]
        yield f"{channel.source} to {channel.target}" + "'" * row, moved


_LEFT, _RIGHT, _TOP = 96, 24, 92  # pixels around the rows
_ROW, _GAP = 34, 16
_COLOURS = {
    Kind.FORWARD: "#3b78c3",
    Kind.BACKWARD: "#3d9a5f",
    Kind.BACKWARD_INPUT: "#2a9d9d",
    Kind.BACKWARD_WEIGHT: "#d99a2b",
}
_FLOWS = {Flow.ACTIVATION: _COLOURS[Kind.FORWARD], Flow.GRADIENT: _COLOURS[Kind.BACKWARD]}
_BUBBLE, _INK, _SUM = "#e9eaec", "#24292f", "#8b5fbf"
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}


def svg(timeline: Timeline, title: str = "one step", width: int = 1200) -> str:
    """The timeline as a picture that stands alone: a file of it opens in any browser.

    A row is a rank: compute by colour, numbered and shaded by micro-batch, its second, third stage
    hatched, the bubble grey, sums of gradients as a line below. Between the rows each transfer is a
    line from its start at the source to its arrival at the target; steep is fast.

    Args:
        title: stands above, before the predicted step and the bubble.
        width: pixels.
    """
    ranks, total = len(timeline.programs), timeline.seconds
    inner = width - _LEFT - _RIGHT
    scale = inner / total if total else 0.0
    bottom = _TOP + ranks * (_ROW + _GAP) - _GAP
    stages = _stages(timeline)
    holder = {stage: rank for rank, found in enumerate(stages) for stage in found}

    def x(seconds: float) -> str:
        return f"{_LEFT + seconds * scale:.2f}"

    def y(rank: int) -> int:
        return _TOP + rank * (_ROW + _GAP)

    def middle(rank: int) -> float:
        return y(rank) + _ROW / 2

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 48}" '
        f'width="{width}" height="{bottom + 48}" fill="{_INK}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
        'font-size="12">',
        _hatches(max(map(len, stages), default=1)),
        f'<rect width="{width}" height="{bottom + 48}" fill="white"/>',
        f'<text x="{_LEFT}" y="32" font-size="17" font-weight="600">{escape(title)}</text>',
        f'<text x="{width - _RIGHT}" y="32" font-size="14" text-anchor="end">'
        f"predicted step {_time(total)}, bubble {timeline.bubble:.1%}</text>",
        *_legend(timeline, stages),
    ]
    for tick in _ticks(total):
        out.append(
            f'<path d="M{x(tick)} {_TOP - 6}V{bottom + 6}" stroke="#d5d8dc" stroke-width="1"/>'
            f'<text x="{x(tick)}" y="{bottom + 22}" text-anchor="middle" fill="#57606a">'
            f"{_time(tick)}</text>"
        )
    for rank, bubble in enumerate(timeline.bubbles):
        out.append(
            f'<rect x="{_LEFT}" y="{y(rank)}" width="{inner}" height="{_ROW}" fill="{_BUBBLE}"/>'
            f'<text x="{_LEFT - 12}" y="{middle(rank) - 2}" text-anchor="end">rank {rank}</text>'
            f'<text x="{_LEFT - 12}" y="{middle(rank) + 12}" text-anchor="end" font-size="10" '
            f'fill="#57606a">bubble {bubble:.0%}</text>'
        )
    for channel, _, start, _, arrival in timeline.transfers:
        source, target = holder[channel.source], holder[channel.target]
        if source != target:
            down = source < target
            here, there = (_ROW, 0) if down else (0, _ROW)
            out.append(
                f'<path d="M{x(start)} {y(source) + here}L{x(arrival)} {y(target) + there}" '
                f'stroke="{_FLOWS[channel.flow]}" stroke-width="1.2" opacity=".75"/>'
            )
    last = 1 + max((i.microbatch for program in timeline.programs for i in program), default=0)
    for rank, instruction, start, end in timeline.spans:
        if instruction.kind in COMPUTE:
            place = (
                f'x="{x(start)}" y="{y(rank)}" width="{(end - start) * scale:.2f}" height="{_ROW}"'
            )
            shade = 0.45 * instruction.microbatch / last
            out.append(
                f"<g><title>{instruction}: {_time(start)} to {_time(end)}</title><rect {place} "
                f'fill="{_lighter(_COLOURS[instruction.kind], shade)}" stroke="white" '
                'stroke-width=".7"/>'
            )
            chunk = stages[rank].index(instruction.stage)
            if chunk:
                out.append(f'<rect {place} fill="url(#chunk{chunk})"/>')
            label = str(instruction.microbatch)
            if (end - start) * scale > 5 + 7 * len(label):
                out.append(
                    f'<text x="{x((start + end) / 2)}" y="{middle(rank) + 4}" fill="white" '
                    f'text-anchor="middle" font-weight="600">{label}</text>'
                )
            out.append("</g>")
    for rank, instruction, start, end in timeline.sums:
        out.append(
            f'<path d="M{x(start)} {y(rank) + _ROW + 3}H{x(end)}" stroke="{_SUM}" '
            f'stroke-width="4"><title>{instruction}: {_time(start)} to {_time(end)}</title></path>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def _hatches(chunks: int) -> str:
    """A pattern for each stage of a rank but the first: lines in one direction after the other."""
    patterns = "".join(
        f'<pattern id="chunk{chunk}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({(45, 135, 90, 0)[chunk % 4 - 1]})">'
        '<path d="M0 0V6" stroke="white" stroke-width="2" opacity=".45"/></pattern>'
        for chunk in range(1, chunks)
    )
    return f"<defs>{patterns}</defs>"


def _legend(timeline: Timeline, stages: list[list[int]]) -> Iterator[str]:
    """What the colours and patterns mean, in one line; only what the picture has."""
    there = {span.instruction.kind for span in timeline.spans}
    boxes = [(_COLOURS[kind], _NAMES[kind]) for kind in COMPUTE if kind in there]
    boxes += [(_BUBBLE, "bubble")]
    if any(span.end > span.start for span in timeline.sums):
        boxes.append((_SUM, "sum of gradients"))
    left = _LEFT
    for colour, name in boxes:
        yield f'<rect x="{left}" y="52" width="14" height="14" fill="{colour}"/>'
        yield f'<text x="{left + 20}" y="63.5">{name}</text>'
        left += 40 + round(6.6 * len(name))
    for chunk in range(1, max(map(len, stages), default=1)):
        place = f'x="{left}" y="52" width="14" height="14"'
        yield f'<rect {place} fill="#57606a"/><rect {place} fill="url(#chunk{chunk})"/>'
        name = (
            f"{('second', 'third', 'fourth')[chunk - 1] if chunk < 4 else f'{chunk + 1}th'} stage"
        )
        yield f'<text x="{left + 20}" y="63.5">{name} of a rank</text>'
        left += 40 + round(6.6 * len(f"{name} of a rank"))
    if any(moved.arrival > moved.start for moved in timeline.transfers):
        yield f'<path d="M{left} 66L{left + 14} 52" stroke="{_INK}" stroke-width="1.2"/>'
        yield f'<text x="{left + 20}" y="63.5">transfer</text>'


def _lighter(colour: str, share: float) -> str:
    """A colour mixed with that share of white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def _ticks(total: float) -> list[float]:
    """Round times from 0 to `total`, five to a dozen of them."""
    if not total:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(total / 5))
    step = next(power * factor for factor in (5, 2, 1) if power * factor <= total / 5)
    return [step * number for number in range(math.floor(total / step + 1e-9) + 1)]


def _time(seconds: float) -> str:
    """Seconds for a person: 263 us, 1.5 ms, 2.34 s."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds / 1e-6:.4g} us" if seconds else "0"
