"""Write a plan as one self-contained HTML page, for wide screens, phones and paper.

what was decided      terms and their texts
one step              the picture, in a box of its own that scrolls where the page is narrow
the stages            tables of seconds and of bytes
why, other plans      and, folded, what each stage holds
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from autopipe.planfile import predict
from autopipe.planfile.again import repeated, words
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Batch
from autopipe.report import colours, facts
from autopipe.report.draw_svg import key, marks, svg
from autopipe.report.figures import figures, legend, margins
from autopipe.report.megatron_terms import describe
from autopipe.report.paper import Table
from autopipe.report.spending import TITLE, bars
from autopipe.schedules.simulate import COMPUTE, Timeline
from autopipe.util import numbers
from autopipe.util.numbers import count

MOST_BOXES = 4000
"""The most boxes in a picture: a browser is slow with many more, and they are too small to read."""

_LEAST, _MOST, _BOX = 960, 4000, 16  # pixels of a picture, and of the longest computation


def page(plan: Plan, title: str) -> str:
    """The HTML text of the page.

    Args:
        title: what its user calls it, the name of the file.
    """
    name = escape(title)
    body = "\n".join(
        (
            f"<header><h1>{name}</h1></header>\n<main>",
            _section("What was decided", _terms(facts.decided(plan))),
            _section("Where a step goes", _spent(plan)),
            _section("One step", *_step(plan)),
            _section("The stages", *_figures(plan)),
            _section("Why this plan", *_why(plan)),
            _section("What each stage holds", *_held(plan)),
            "</main>",
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{name}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n"
        "</html>\n"
    )


def _section(heading: str, *parts: str) -> str:
    return "\n".join((f"<section>\n<h2>{heading}</h2>", *parts, "</section>"))


def _sentence(text: str, mark: str = "") -> str:
    """What stands as a clause elsewhere as a paragraph of its own."""
    kind = f' class="{mark}"' if mark else ""
    return f"<p{kind}>{escape(text[:1].upper() + text[1:])}.</p>"


def _terms(pairs: list[tuple[str, str]]) -> str:
    rows = "\n".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in pairs)
    return f"<dl>\n{rows}\n</dl>"


def _table(found: Table, caption: str) -> str:
    """A table in a box that scrolls; words stand on the left of their cells, figures right."""
    words = {found.names[0], *found.left}

    def cell(kind: str, name: str, text: str) -> str:
        mark = ' class="word"' if name in words else ""
        return f"<{kind}{mark}>{escape(text)}</{kind}>"

    head = "".join(cell("th", name, name) for name in found.names)
    rows = "\n".join(
        "<tr>" + "".join(cell("td", *pair) for pair in zip(found.names, row, strict=True)) + "</tr>"
        for row in found.rows
    )
    return (
        f'<div class="scrolls" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _spent(plan: Plan) -> str:
    """The parts of a step from the devices' peak down to waiting."""
    found = bars(plan)
    step = sum(bar.seconds for bar in found) or 1.0
    rows = [
        (bar.name, numbers.seconds(bar.seconds), numbers.percent(bar.seconds / step))
        for bar in found
    ]
    return _table(Table(("part", "seconds", "share"), tuple(rows)), TITLE[:1].upper() + TITLE[1:])


def _step(plan: Plan) -> Iterator[str]:
    """The picture and what its colours are; of many micro-batches only the first."""
    timeline, shown = _pictured(plan)
    total = plan.batch.micro_batches
    of = f" These are the first {shown} of {total} micro-batches." if shown < total else ""
    yield (
        "<p>A row is a rank of the pipeline, to the right is time, a number is a micro-batch; rest "
        f"the pointer on a box to read what it is.{of}</p>"
    )
    swatches = "".join(
        f'<li><i style="background:{colour}"></i>{escape(words)}</li>'
        if colour != colours.LIGHT.idle
        else f'<li><i class="idle"></i>{escape(words)}</li>'
        for colour, words in key(timeline)
    )
    others = "".join(f"<li>{escape(text)}</li>" for text in marks(timeline))
    yield f'<ul class="key">{swatches}{others}</ul>'
    lengths = (s.end - s.start for s in timeline.spans if s.instruction.kind in COMPUTE)
    longest = max(lengths, default=0.0) or 1.0
    width = round(min(max(_LEAST, _BOX * timeline.seconds / longest), _MOST))
    yield (
        '<figure class="scrolls step" tabindex="0" role="region" aria-label="one step" '
        f'style="--least:{width}px">\n{svg(timeline, None, width)}</figure>'
    )


def _pictured(plan: Plan) -> tuple[Timeline, int]:
    """The step, or that of as many micro-batches as a browser draws at once."""
    total = plan.batch.micro_batches
    shown = min(total, max(3, MOST_BOXES // (3 * len(plan.stages))))
    if plan.programs:
        shown = total  # a written schedule is for its own number of them
    rows = plan.batch.rows // total
    return predict.timeline(replace(plan, batch=Batch(rows * shown, shown))), shown


def _figures(plan: Plan) -> Iterator[str]:
    """The seconds and the bytes of the stages in a table each."""
    found = figures(plan, all_of_them=True)
    first = found.parts - 1  # the peak begins what is about memory
    words = legend(plan, found.unit)
    every = range(len(found.table.names))
    yield _table(found.table.columns(every[:first]), "Time: one micro-batch on each stage")
    yield _table(found.table.columns(every[first:]), f"Memory of a device, in {found.unit}")
    yield _terms(list(words.items()))
    room = margins(plan)
    if room is not None:
        yield _sentence(room)


def _why(plan: Plan) -> Iterator[str]:
    yield _sentence(plan.planner.binding)
    crossing = facts.crossing(plan)
    if crossing is not None:
        yield _sentence(crossing)
    others = facts.alternatives(plan)
    if others:
        names = ("plan", "why not")
        yield _table(Table(names, tuple(others), left=names), "Other plans, the nearest first")
    yield _sentence(facts.searched(plan), "muted")


def _held(plan: Plan) -> Iterator[str]:
    """Of each stage the nodes, parameters and transfers, folded."""
    for index in range(len(plan.stages)):
        yield from _stage(plan, index)
    lines = list(describe(plan))
    if lines:
        told = escape("\n".join(lines))
        yield f"<details><summary>tensor parallel</summary>\n<pre>{told}</pre>\n</details>"


def _stage(plan: Plan, index: int) -> Iterator[str]:
    stage = plan.stages[index]
    parameters = count(len(stage.parameters), "parameter tensor")
    yield f"<details><summary>stage {index}: {count(stage.nodes, 'node')}, {parameters}</summary>"
    pairs = [("from", stage.first), ("to", stage.last)]
    for sent in stage.sends:
        back = ", its gradient comes back" if sent.gradient else ""
        what = f"{sent.dtype}[{', '.join(map(str, sent.shape))}] to stage {sent.peer}{back}"
        pairs.append(("sends", f"{sent.name} {what}"))
    for own in repeated(plan, [stage]):
        what = f"{words(own.ops)} of " if own.ops else ""
        pairs.append(("runs again", what + ", ".join(own.blocks)))
    pairs.append(("parameters", ", ".join(stage.parameters)))
    yield f"{_terms(pairs)}\n</details>"


def _theme(found: colours.Theme) -> str:
    return (
        f"--page:{found.page};--ink:{found.ink};--muted:{found.muted};--line:{found.line};"
        f"--idle:{found.idle}"
    )


_STYLE = f"""\
:root {{ color-scheme: light dark; {_theme(colours.LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_theme(colours.DARK)} }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif;
  overflow-wrap: anywhere }}
h1 {{ font-size: 1.6rem; line-height: 1.2; margin: .5rem 0 1rem }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 .6rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--line) }}
p {{ margin: .6rem 0; max-width: 48rem }}
.muted, caption, dt {{ color: var(--muted) }}
dl {{ margin: .6rem 0; display: grid; grid-template-columns: minmax(6rem, max-content) 1fr;
  gap: .25rem 1rem; max-width: 60rem }}
dt {{ font-size: .92rem; padding-top: .05rem }}
dd {{ margin: 0 }}
.scrolls {{ overflow-x: auto; margin: .8rem 0; border: 1px solid var(--line); border-radius: 6px;
  width: fit-content; max-width: 100% }}
.step {{ width: auto }}
table {{ border-collapse: collapse; min-width: min(100%, 34rem);
  font-variant-numeric: tabular-nums }}
caption {{ text-align: left; font-size: .92rem; padding: .5rem .7rem }}
th, td {{ padding: .3rem .7rem; text-align: right; white-space: nowrap; font-weight: normal;
  border-top: 1px solid var(--line) }}
th {{ font-weight: 600 }}
.word {{ text-align: left }}
td.word:last-child {{ white-space: normal; min-width: 14rem }}
.key {{ display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; padding: 0;
  margin: .8rem 0; font-size: .92rem }}
.key i {{ display: inline-block; width: .9rem; height: .9rem; margin-right: .4rem;
  border-radius: 2px; vertical-align: -.1rem }}
.key .idle {{ background: var(--idle); border: 1px solid var(--line) }}
.step svg {{ display: block; width: 100%; min-width: var(--least); height: auto }}
details {{ margin: .4rem 0 }}
summary {{ cursor: pointer }}
details dl {{ margin-left: 1rem; font-size: .92rem }}
pre {{ overflow-x: auto; font: .85rem/1.4 ui-monospace, Consolas, monospace }}
@media (max-width: 36rem) {{
  dl {{ grid-template-columns: 1fr; gap: 0 }}
  dd {{ margin-bottom: .5rem }}
}}
@media print {{
  body {{ max-width: none; padding: 0; font-size: 10pt }}
  .scrolls {{ overflow: visible; border: 0 }}
  .step svg {{ min-width: 0 }}
  section, figure, tr {{ break-inside: avoid }}
}}
"""
