"""A plan or a run as a page: what is on it, and that it needs nothing besides itself."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autopipe.page import advice, losses
from autopipe.page.contents import contents_of
from autopipe.page.steps import MOST_BOXES
from autopipe.page.waterfall import bubble
from autopipe.page.write import page
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Boundary, Memory
from autopipe.report.recorded import MeasuredRun, Recording, Slice
from autopipe.schedules.instructions import parse
from tests.support.plans import chain, example_plan, in_turns

TERMS = ("split", "schedule", "predicted", "speed", "memory", "holding", "recompute")


def text_of(plan: Plan, title: str = "plan.json", run: Recording | None = None) -> str:
    return page(contents_of(plan, title, run=run))


class Outline(HTMLParser):
    """The tags that are open, and what stands in headings, captions and summaries."""

    KEPT = ("h1", "h2", "h3", "dt", "caption", "summary")
    VOID = ("meta", "link", "input", "path", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.feed(text)
        assert self.open == [], "all tags are closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.KEPT:
            self.found.append(f"{self.open[-1]} {data}")


def test_what_is_on_the_page_of_a_plan_in_its_order() -> None:
    assert Outline(text_of(example_plan())).found == [
        "h1 plan.json",
        "h2 What was decided",
        *(f"dt {term}" for term in TERMS),
        "h2 Where a step goes",
        "h3 planned",
        "h3 What to change",
        "h2 Memory over the step",
        "h2 One step",
        "h2 The stages",
        "caption Time: one micro-batch on each stage",
        "caption Memory of a device, in KiB",
        *(f"dt {term}" for term in ("forward, backward", "bubble", "peak, in KiB")),
        "h2 Why this plan",
        "caption Other plans that were considered, the nearest first",
        "h2 What each stage holds",
        "summary stage 0: 9 nodes, 2 parameter tensors",
        *(f"dt {term}" for term in ("from", "to", "sends", "runs again", "parameters")),
        "summary stage 1: 10 nodes, 2 parameter tensors",
        *(f"dt {term}" for term in ("from", "to", "parameters")),
    ]


def run_of(plan: Plan) -> Recording:
    """A run in which all took twice as long as planned, and held as much, as far as it sees."""
    stages = tuple(
        replace(
            stage.predicted,
            forward_seconds=2 * stage.predicted.forward_seconds,
            backward_seconds=2 * stage.predicted.backward_seconds,
            memory=replace(stage.predicted.memory, passing=0),
        )
        for stage in plan.stages
    )
    lanes = tuple(
        (Slice(parse(f"{rank}F0"), 0.0, 0.25), Slice(parse(f"{rank}B0"), 0.5, 1.0))
        for rank in range(plan.mesh.pp)
    )
    metrics = tuple({"step": step, "loss": 6.0 / step} for step in (1.0, 2.0, 3.0))
    measured = MeasuredRun(stages, 2 * plan.prediction.step_seconds)
    return Recording(plan, metrics, measured, lanes)


def test_a_run_stands_beside_its_plan() -> None:
    plan = predict.with_prediction(chain(2, 4))
    text = text_of(plan, "run", run_of(plan))
    found = Outline(text).found
    assert "h2 Loss" in found and "h3 measured" in found
    assert "most of the difference is computing" in text
    assert text.count('class="lane"') == 4, "two ranks, planned and measured"
    assert "backward of micro-batch 0, stage 1: 500\N{NO-BREAK SPACE}ms" in text


def test_the_bubble_is_what_the_bars_say_of_waiting() -> None:
    """One definition: the card had the last steps' by their traces, the bar all steps' seconds."""
    plan = predict.with_prediction(chain(2, 4))
    run = run_of(plan)
    assert run.measured is not None
    traced = replace(run.measured, bubbles=(0.01, 0.02))
    found = contents_of(plan, "run", run=replace(run, measured=traced))
    (bubble,) = (line for line in found.headlines if line.words.startswith("bubble"))
    assert bubble.figure == bubble.beside.removeprefix("planned ") == "20 %", "all took twice"
    computing, waiting = found.waterfall.measured
    assert (computing.share, waiting.share) == ("80.0 %", "20.0 %")
    assert waiting.name == "waiting (the bubble)"
    planned = [bar for bar in found.waterfall.planned if bar.kind == "waiting"]
    assert sum(bar.width for bar in planned) == pytest.approx(waiting.width / 2, abs=0.01)


def test_printed_shares_of_a_step_add_up() -> None:
    shares = [bar.share for bar in contents_of(example_plan(), "plan").waterfall.planned]
    assert sum(round(10 * float(share.removesuffix(" %"))) for share in shares) == 1000


def test_no_advice_is_what_a_plan_does_already_or_cannot() -> None:
    plan = chain(2, 4)
    parts = {"filling": 1.0, "transfers": 1.0}
    usual = "".join(each.change for each in advice.of_plan(plan, parts))
    assert "zb-h1" in usual and "eager-1f1b" in usual
    stages = tuple(replace(stage, zero=3) for stage in plan.stages)
    eager = replace(plan, schedule="eager-1f1b", boundaries=(Boundary(2, 1),), stages=stages)
    own = "".join(each.change for each in advice.of_plan(eager, parts))
    assert "zb-h1" not in own and "eager-1f1b" not in own


def test_a_rank_that_takes_turns_computes_its_own_micro_batches_alone() -> None:
    plan = predict.with_prediction(in_turns())
    run = run_of(plan)
    assert run.measured is not None
    share = bubble(plan, run.measured)
    assert share == pytest.approx(plan.prediction.bubble)


def test_what_a_run_does_not_see_is_not_missing_in_it() -> None:
    """Bug: gradients on their way were planned and never measured: "there is room for more"."""
    plan = chain(2, 4)
    stages = tuple(
        replace(s, predicted=replace(s.predicted, memory=Memory(4096, 0, 0, 0, 0, 0, 4096)))
        for s in plan.stages
    )
    plan = predict.with_prediction(replace(plan, stages=stages))
    text = text_of(plan, "run", run_of(plan)).replace("\N{NO-BREAK SPACE}", " ")
    assert "there is room for more rows" not in text
    assert text.count("measured 4.0 KiB of 4.0 KiB that a run sees") == len(stages)


def test_a_loss_is_a_line_from_its_first_to_its_last_step() -> None:
    curve = losses.of_metrics([{"step": 2, "loss": 4.0}, {"step": 4, "loss": 1.0}, {"step": 5}])
    assert curve is not None and curve.line == "M0.0 0.0L1000.0 1000.0"
    assert (curve.begin, curve.end, curve.first, curve.last) == (2, 4, "4", "1")
    many = losses.of_metrics([{"step": n, "loss": 1.0} for n in range(5000)])
    assert many is not None and many.line.count("L") == losses.MOST_POINTS - 1
    assert losses.of_metrics([{"step": 1, "loss": 2.0}]) is None


HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def test_names_come_from_a_model_and_from_files_and_never_become_markup() -> None:
    plan = example_plan()
    odd = replace(
        plan.stages[0],
        first=HOSTILE,
        parameters=(HOSTILE,),
        sends=tuple(replace(sent, name=HOSTILE) for sent in plan.stages[0].sends),
    )
    receives = tuple(replace(r, name=HOSTILE) for r in plan.stages[1].receives)
    plain = text_of(plan)
    text = text_of(
        replace(
            plan,
            cluster=replace(plan.cluster, name=HOSTILE),
            planner=replace(plan.planner, binding=HOSTILE, name=HOSTILE),
            stages=(odd, replace(plan.stages[1], receives=receives)),
        ),
        HOSTILE,
    )
    for tag in ("<script", "<img", "</script"):
        assert text.count(tag) == plain.count(tag)
    assert "&lt;img src=x onerror=&#34;alert(2)&#34;&gt;" in text


def test_it_needs_nothing_besides_itself() -> None:
    text = text_of(example_plan())
    assert not re.search(r"https?:|src=|@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_words_in_a_picture_of_memory_have_a_ground() -> None:
    """Where states are small they would stand across the outline of what comes and goes."""
    rule = re.search(r"\.inside \{([^}]*)\}", text_of(example_plan()))
    assert rule is not None and "background: color-mix(in srgb, var(--page)" in rule[1]


def test_of_many_micro_batches_the_first_are_drawn() -> None:
    text = text_of(predict.with_prediction(chain(16, 256)))
    assert re.search(r"These are the first \d+ of 256 micro-batches\.", text)
    assert text.count(' title="') <= 1.1 * MOST_BOXES  # waits besides


def test_a_device_that_holds_nothing_has_a_picture_of_that() -> None:
    """As a hand may write it. Bug: divided by its peak."""
    first, *others = example_plan().stages
    empty = replace(first, predicted=replace(first.predicted, memory=Memory(0, 0, 0, 0, 0, 0)))
    text = text_of(replace(example_plan(), stages=(empty, *others)))
    assert 'aria-label="rank 0: 0\N{NO-BREAK SPACE}bytes of' in text


def test_every_stage_has_a_row_unless_it_equals_its_neighbour() -> None:
    plan = chain(31, 4)
    stages = tuple(
        replace(
            stage,
            predicted=replace(stage.predicted, memory=Memory(index * 2**30, 0, 0, 0, 0, 0)),
        )
        for index, stage in enumerate(plan.stages)
    )
    unlike = text_of(replace(plan, stages=stages))
    assert unlike.count('<td class="word">30</td>') == 2  # of seconds and of bytes
    assert "The fullest 8 of 31 ranks." in unlike
    assert '<td class="word">0-30</td>' in text_of(plan)
