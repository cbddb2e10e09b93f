"""Draw a timeline as text for a terminal.

    rank 0: F0 F1 F2             B0--- F3 B1---    B2---    B3---
    rank 1:    F0 F1       B0--- F2 B1--- F3 B2---    B3---
    rank 2:       F0 B0--- F1 B1--- F2 B2--- F3 B3---

A row is a rank, to the right is time, what is empty is bubble.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from autopipe.schedules.instructions import COMPUTE, Instruction, Kind, stages_of
from autopipe.schedules.simulate import Moved, Timeline


def draw(
    timeline: Timeline, unit: float = 1.0, *, waits: bool = False, transfers: bool = False
) -> str:
    """The timeline as text, a row per rank, a column of one label's width per `unit` seconds.

    Labels are kind and micro-batch, `F3`. Of two stages on a rank the second is in lower case,
    `f3`; where there are more, labels have the stage in front, `4F3`.

    Args:
        unit: seconds; a label with less time is cut off; an instruction of no time still shows.
        waits: dots where a rank waits for a transfer or for sums, not only emptiness.
        transfers: below the ranks, rows for the channels whose transfers take time; each is drawn
            from its start to its arrival, in a further row if the one before is still on its way.
    """
    shown = [s for s in timeline.spans if waits or s.instruction.kind in COMPUTE]
    held = stages(timeline)
    labels = [_label(span.instruction, held[span.rank]) for span in shown]
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


LETTERS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward for the inputs",
    Kind.BACKWARD_WEIGHT: "backward for the weights",
}


def legend(timeline: Timeline, *, waits: bool = False, cut: bool = False) -> dict[str, str]:
    """The meanings of the letters in the drawing of this timeline.

    Args:
        cut: whether some labels of the drawing are cut off.
    """
    kinds = {span.instruction.kind for span in timeline.spans}
    meanings = {kind.value: LETTERS[kind] for kind in COMPUTE if kind in kinds}
    meanings["after them"] = "the number of the micro-batch" + ", where it fits" * cut
    most = max(map(len, stages(timeline)), default=1)
    if most == 2:
        meanings["lower case"] = "the second stage of a rank"
    if most > 2:
        meanings["before them"] = "the number of the stage"
    meanings["blank"] = "nothing to do (the bubble)"
    if waits:
        meanings["dots"] = "waiting for a transfer or for sums"
    return meanings


def is_cut(drawing: str, timeline: Timeline) -> bool:
    """Whether some label in a drawing of this timeline has less room than it needs."""
    held = stages(timeline)
    labels: list[list[str]] = [[] for _ in held]
    for span in timeline.spans:
        if span.instruction.kind in COMPUTE:
            labels[span.rank].append(_label(span.instruction, held[span.rank]))
    rows = [line.partition(":")[2].split() for line in drawing.splitlines()]
    return any(
        [word.rstrip("-") for word in row if word.strip(".")] != own
        for row, own in zip(rows, labels, strict=False)  # rows of channels stand below
    )


def strip(timeline: Timeline, columns: int, ranks: Sequence[int]) -> str:
    """Draw some ranks as rows of letters; each letter is the rank's longest work in that time.

    Args:
        columns: the width of the picture; one letter is about 1 / columns of the step's seconds.
        ranks: ascending; a line of dots marks ranks left out between two.
    """
    margin = len(f"rank {max(ranks, default=0)}: ")
    slots = max(1, columns - margin)
    lines, before = [], -1
    for rank in ranks:
        if rank > before + 1:
            lines.append("  ...")
        lines.append(f"{f'rank {rank}:':<{margin}}{_letters(timeline, rank, slots)}".rstrip())
        before = rank
    return "\n".join(lines)


def _letters(timeline: Timeline, rank: int, slots: int) -> str:
    scale = slots / timeline.seconds if timeline.seconds else 0.0
    held: list[dict[str, float]] = [defaultdict(float) for _ in range(slots)]
    short = [" "] * slots  # of what is less than half a letter long
    for span in timeline.spans:
        if span.rank != rank or span.instruction.kind not in COMPUTE:
            continue
        first, last = span.start * scale, span.end * scale
        short[min(slots - 1, int((first + last) / 2))] = span.instruction.kind.value
        for slot in range(int(first), min(slots, int(last) + 1)):
            share = min(last, slot + 1) - max(first, slot)
            held[slot][span.instruction.kind.value] += share
    return "".join(
        max(sorted(own), key=own.__getitem__) if sum(own.values()) >= 0.5 else brief
        for own, brief in zip(held, short, strict=True)
    )


def stages(timeline: Timeline) -> list[tuple[int, ...]]:
    """The stages of each rank, ascending."""
    return [stages_of(program) for program in timeline.programs]


def _label(instruction: Instruction, stages: Sequence[int]) -> str:
    """The label of an instruction of a rank with these stages; empty for a wait (drawn as dots)."""
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
