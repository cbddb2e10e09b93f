"""A plan as a page for a browser: what is on it, and that it needs nothing besides itself."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from autopipe.planfile import predict
from autopipe.planfile.parts import Memory
from autopipe.report.page import MOST_BOXES, page
from tests.support.plans import chain, example_plan

TERMS = ("split", "schedule", "predicted", "speed", "memory", "holding", "recompute")


class Outline(HTMLParser):
    """The tags that are open, and what stands in headings, captions, cells and summaries."""

    KEPT = ("h1", "h2", "dt", "caption", "th", "summary")
    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.feed(text)
        assert self.open == [], "all tags are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.KEPT:
            self.found.append(f"{self.open[-1]} {data}")


def test_what_is_on_it_in_its_order() -> None:
    figures = ("forward", "backward", "bubble")
    parts = ("peak", "weights", "grads", "optimizer", "activations", "transfers")
    assert Outline(page(example_plan(), "plan.json")).found == [
        "h1 plan.json",
        "h2 What was decided",
        *(f"dt {term}" for term in TERMS),
        "h2 Where a step goes",
        "caption Where a step goes, on the mean device (the optimizer's own is not counted)",
        *(f"th {name}" for name in ("part", "seconds", "share")),
        "h2 One step",
        "h2 The stages",
        "caption Time: one micro-batch on each stage",
        *(f"th {name}" for name in ("stage", *figures)),
        "caption Memory of a device, in KiB",
        *(f"th {name}" for name in ("stage", *parts)),
        *(f"dt {term}" for term in ("forward, backward", "bubble", "peak, in KiB")),
        "h2 Why this plan",
        "caption Other plans, the nearest first",
        "th plan",
        "th why not",
        "h2 What each stage holds",
        "summary stage 0: 9 nodes, 2 parameter tensors",
        *(f"dt {term}" for term in ("from", "to", "sends", "runs again", "parameters")),
        "summary stage 1: 10 nodes, 2 parameter tensors",
        *(f"dt {term}" for term in ("from", "to", "parameters")),
    ]


def test_names_come_from_a_model_and_from_files_and_never_become_markup() -> None:
    plan = example_plan()
    odd = replace(plan.stages[0], first="block<0>&/add/0")
    text = page(replace(plan, stages=(odd, plan.stages[1])), "plan <1>.json")
    assert "<title>plan &lt;1&gt;.json</title>" in text and "<h1>plan &lt;1&gt;.json</h1>" in text
    assert "block&lt;0&gt;&amp;/add/0" in text and "block<0>" not in text


def test_it_needs_nothing_besides_itself() -> None:
    text = page(example_plan(), "plan.json").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|<script|<link|<img|@import|url\((?!#)", text)


def test_it_fits_a_phone_a_dark_room_and_paper() -> None:
    text = page(example_plan(), "plan.json")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert text.count("@media screen and (prefers-color-scheme: dark)") == 2, "page and picture"
    assert "@media print" in text
    assert text.count('class="scrolls') == 5, "four tables and the picture scroll by themselves"


def test_of_many_micro_batches_the_first_are_drawn() -> None:
    plan = predict.with_prediction(chain(16, 1024))
    text = page(plan, "plan.json")
    assert "These are the first 83 of 1024 micro-batches." in text
    assert text.count("<g>") <= MOST_BOXES


def test_every_stage_has_a_row_unless_it_equals_its_neighbour() -> None:
    plan = chain(31, 4)
    stages = tuple(
        replace(
            stage,
            predicted=replace(stage.predicted, memory=Memory(index * 2**30, 0, 0, 0, 0, 0)),
        )
        for index, stage in enumerate(plan.stages)
    )
    unlike = page(replace(plan, stages=stages), "plan.json")
    assert unlike.count("<tr>") == (1 + 31) + (1 + 31) + 3 + (1 + 2)  # the last: parts of a step
    assert '<td class="word">0-30</td>' in page(plan, "plan.json")
