"""Draw a timeline as SVG, for a file of its own or as part of an HTML page.

    rank 0  [0][1]        [ 0  ][2][ 1  ]      a row is a rank, to the right is time
               \\          /                    each transfer is a line; steep is fast
    rank 1        [0][ 0  ][1][ 1  ]           a box is a computation, its number the micro-batch

A pointer on a box, a gap or a line of sums shows a sentence about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from html import escape

from autopipe.report import colours
from autopipe.report.draw_text import LETTERS, stages
from autopipe.schedules.instructions import COMPUTE, Flow
from autopipe.schedules.phrases import describe
from autopipe.schedules.simulate import Timeline, TimelineSpan
from autopipe.util import numbers

_LEFT, _RIGHT = 96, 24  # pixels around the rows
_ROW, _GAP = 34, 16

STYLE = f"""<style>@media screen and (prefers-color-scheme: dark) {{
.ap-page {{ fill: {colours.DARK.page} }} .ap-ink {{ fill: {colours.DARK.ink} }}
.ap-muted {{ fill: {colours.DARK.muted} }} .ap-idle {{ fill: {colours.DARK.idle} }}
.ap-line {{ stroke: {colours.DARK.line} }} .ap-edge {{ stroke: {colours.DARK.page} }}
.ap-there {{ stroke: {colours.DARK.flows[Flow.ACTIVATION]} }}
.ap-back {{ stroke: {colours.DARK.flows[Flow.GRADIENT]} }}
}}</style>"""
"""What is not as it stands in the attributes where a dark page is asked for."""


def svg(
    timeline: Timeline,
    title: str | None = "one step",
    width: int = 1200,
    *,
    planned: bool = True,
) -> str:
    """Draw the timeline as SVG text.

    Compute is coloured by what it is, numbered and shaded by micro-batch; the second, third stage
    of a rank is hatched, the bubble grey, a sum of gradients a line below.

    Args:
        title: stands above, before the predicted step and the bubble, with the legend below it;
            None: the page around the picture says these.
        width: pixels.
        planned: times are in seconds; else in units, as those of a schedule by itself are.
    """
    return "\n".join(_Picture(timeline, title, width, planned).lines()) + "\n"


def key(timeline: Timeline) -> list[tuple[str, str]]:
    """The colours in the picture, with their meanings."""
    there = {span.instruction.kind for span in timeline.spans}
    found = [(colours.KINDS[kind], LETTERS[kind]) for kind in COMPUTE if kind in there]
    if any(span.end > span.start for span in timeline.sums):
        found.append((colours.SUM, "sum of gradients"))
    return [*found, (colours.LIGHT.idle, "nothing to do (the bubble)")]


def marks(timeline: Timeline) -> list[str]:
    """The hatches and lines in the picture, with their meanings."""
    most = max(map(len, stages(timeline)), default=1)
    found = [f"hatched: the {_ordinal(chunk)} stage of a rank" for chunk in range(1, most)]
    if any(moved.arrival > moved.start for moved in timeline.transfers):
        found.append("lines between ranks: transfers")
    return found


def _ordinal(chunk: int) -> str:
    return ("second", "third", "fourth")[chunk - 1] if chunk < 4 else f"{chunk + 1}th"


class _Picture:
    """The lines of one SVG, and the functions from times and ranks to pixels."""

    def __init__(self, timeline: Timeline, title: str | None, width: int, planned: bool) -> None:
        self.timeline, self.title, self.width = timeline, title, width
        self.time: Callable[[float], str] = (
            numbers.seconds if planned else lambda time: f"{time:.4g}"
        )
        self.unit = "" if planned else " units"
        self.legend = self._legend_lines() if title is not None else []
        self.top = 72 + 20 * len(self.legend) if self.legend else 20
        self.inner = width - _LEFT - _RIGHT
        self.scale = self.inner / timeline.seconds if timeline.seconds else 0.0
        every = (i.microbatch for program in timeline.programs for i in program)
        self.micro_batches = 1 + max(every, default=0)
        self.held = stages(timeline)
        self.holder = {stage: rank for rank, found in enumerate(self.held) for stage in found}

    def x(self, seconds: float) -> str:
        return f"{_LEFT + seconds * self.scale:.2f}"

    def y(self, rank: int) -> int:
        return self.top + rank * (_ROW + _GAP)

    @property
    def bottom(self) -> int:
        return self.y(len(self.timeline.programs)) - _GAP

    def lines(self) -> Iterator[str]:
        ink = f'class="ap-ink" fill="{colours.LIGHT.ink}"'
        height = self.bottom + 40
        step = f"{self.time(self.timeline.seconds)}{self.unit}"
        ranks = numbers.count(len(self.timeline.programs), "rank")
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'width="{self.width}" height="{height}" role="img" '
            f'aria-label="one step of {ranks}: {step}, bubble '
            f'{numbers.percent(self.timeline.bubble)}" {ink} '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
            'font-size="12">'
        )
        yield STYLE
        yield _hatches(max(map(len, self.held), default=1))
        yield (
            f'<rect class="ap-page" width="{self.width}" height="{height}" '
            f'fill="{colours.LIGHT.page}"/>'
        )
        if self.title is not None:
            yield from self._head(self.title)
            yield from self._legend()
        yield from self._grid()
        yield from self._rows()
        yield from self._transfers()
        for span in self.timeline.spans:
            yield self._box(span) if span.instruction.kind in COMPUTE else self._wait(span)
        yield from self._sums()
        yield "</svg>"

    def _head(self, title: str) -> Iterator[str]:
        most = self.inner // 15  # letters that leave room for the step to the right
        title = title if len(title) <= most else title[: most - 3] + "..."
        yield f'<text x="{_LEFT}" y="32" font-size="17" font-weight="600">{escape(title)}</text>'
        yield (
            f'<text x="{self.width - _RIGHT}" y="32" font-size="14" text-anchor="end">predicted '
            f"step {self.time(self.timeline.seconds)}{self.unit}, bubble "
            f"{numbers.percent(self.timeline.bubble)}</text>"
        )

    def _legend_lines(self) -> list[list[tuple[int, str, str]]]:
        """Lines of entries: pixels from the left, a colour ("": none), and what it means."""
        lines: list[list[tuple[int, str, str]]] = [[]]
        left = _LEFT
        for colour, name in [*key(self.timeline), *(("", mark) for mark in marks(self.timeline))]:
            takes = (40 if colour else 20) + round(6.2 * len(name))
            if lines[-1] and left + takes > self.width:
                lines.append([])
                left = _LEFT
            lines[-1].append((left, colour, name))
            left += takes
        return lines

    def _legend(self) -> Iterator[str]:
        """The colours, the hatches, and the slanted line of a transfer."""
        for line, entries in enumerate(self.legend):
            y = 52 + 20 * line
            for left, colour, name in entries:
                if colour:
                    hue = ' class="ap-idle"' if colour == colours.LIGHT.idle else ""
                    box = f'x="{left}" y="{y}" width="14" height="14" fill="{colour}"'
                    yield f"<rect{hue} {box}/>"
                yield f'<text x="{left + (20 if colour else 0)}" y="{y + 11.5}">{name}</text>'

    def _grid(self) -> Iterator[str]:
        for tick in _ticks(self.timeline.seconds):
            yield (
                f'<path class="ap-line" d="M{self.x(tick)} {self.top - 6}V{self.bottom + 6}" '
                f'stroke="{colours.LIGHT.line}" stroke-width="1"/>'
                f'<text class="ap-muted" x="{self.x(tick)}" y="{self.bottom + 22}" '
                f'text-anchor="middle" fill="{colours.LIGHT.muted}">'
                f"{self.time(tick)}</text>"
            )

    def _rows(self) -> Iterator[str]:
        for rank, bubble in enumerate(self.timeline.bubbles):
            middle = self.y(rank) + _ROW / 2
            yield (
                f'<rect class="ap-idle" x="{_LEFT}" y="{self.y(rank)}" width="{self.inner}" '
                f'height="{_ROW}" fill="{colours.LIGHT.idle}"/>'
                f'<text x="{_LEFT - 12}" y="{middle - 2}" text-anchor="end">rank {rank}</text>'
                f'<text class="ap-muted" x="{_LEFT - 12}" y="{middle + 12}" text-anchor="end" '
                f'font-size="10" fill="{colours.LIGHT.muted}">bubble {numbers.percent(bubble)}'
                "</text>"
            )

    def _transfers(self) -> Iterator[str]:
        for channel, _, start, _, arrival in self.timeline.transfers:
            source, target = self.holder[channel.source], self.holder[channel.target]
            if source != target:
                here, there = (_ROW, 0) if source < target else (0, _ROW)
                way = "there" if channel.flow is Flow.ACTIVATION else "back"
                yield (
                    f'<path class="ap-{way}" d="M{self.x(start)} {self.y(source) + here}'
                    f'L{self.x(arrival)} {self.y(target) + there}" '
                    f'stroke="{colours.LIGHT.flows[channel.flow]}" stroke-width="1.2"/>'
                )

    def _place(self, span: TimelineSpan) -> str:
        width = (span.end - span.start) * self.scale
        return (
            f'x="{self.x(span.start)}" y="{self.y(span.rank)}" width="{width:.2f}" height="{_ROW}"'
        )

    def _title(self, span: TimelineSpan, words: str) -> str:
        """`rank 1, forward of micro-batch 2 in stage 1: 1.2 ms, from 3 ms to 4.2 ms`."""
        took, start, end = map(self.time, (span.end - span.start, span.start, span.end))
        text = f"rank {span.rank}, {words}: {took}{self.unit}, from {start} to {end}"
        return f"<title>{text}</title>"

    def _box(self, span: TimelineSpan) -> str:
        rank, instruction, start, end = span
        colour = colours.box(instruction.kind, instruction.microbatch / self.micro_batches)
        ink = colours.ink(colour)
        where = f" in stage {instruction.stage}"
        parts = [
            f"<g>{self._title(span, describe(instruction) + where)}<rect {self._place(span)} "
            f'class="ap-edge" fill="{colour}" stroke="{colours.LIGHT.page}" stroke-width=".7"/>'
        ]
        chunk = self.held[rank].index(instruction.stage)
        if chunk:
            parts.append(f'<rect {self._place(span)} fill="url(#ap-chunk{chunk}-{ink[1:]})"/>')
        label = str(instruction.microbatch)
        if (end - start) * self.scale > 5 + 7 * len(label):
            parts.append(
                f'<text x="{self.x((start + end) / 2)}" y="{self.y(rank) + _ROW / 2 + 4}" '
                f'fill="{ink}" text-anchor="middle" font-weight="600">{label}'
                "</text>"
            )
        return "".join([*parts, "</g>"])

    def _wait(self, span: TimelineSpan) -> str:
        peer = span.instruction.peer
        where = "" if peer is None else f" (rank {self.holder[peer]})"
        words = self._title(span, describe(span.instruction) + where)
        return f'<rect {self._place(span)} fill="none" pointer-events="all">{words}</rect>'

    def _sums(self) -> Iterator[str]:
        for span in self.timeline.sums:
            words = self._title(span, f"summing the gradients of stage {span.instruction.stage}")
            yield (
                f'<path d="M{self.x(span.start)} {self.y(span.rank) + _ROW + 3}H{self.x(span.end)}"'
                f' stroke="{colours.SUM}" stroke-width="4">{words}</path>'
            )


def _hatches(chunks: int) -> str:
    """A pattern for each stage of a rank but the first: lines in one direction after the other.

    Lines are as far from the colour of the number as the box is, or farther: white behind black.
    """
    patterns = "".join(
        f'<pattern id="ap-chunk{chunk}-{ink}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({(45, 135, 90, 0)[chunk % 4 - 1]})">'
        f'<path d="M0 0V6" stroke="{line}" stroke-width="1.5" opacity="{opacity}"/></pattern>'
        for chunk in range(1, chunks)
        for ink, line, opacity in (("000000", "white", ".5"), ("ffffff", "black", ".3"))
    )
    return f"<defs>{patterns}</defs>"


def _ticks(total: float) -> list[float]:
    """Round times from 0 to `total`, five to a dozen of them."""
    if not total:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(total / 5))
    step = next(power * factor for factor in (5, 2, 1) if power * factor <= total / 5)
    return [step * number for number in range(math.floor(total / step + 1e-9) + 1)]
