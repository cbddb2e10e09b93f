"""The page in headless Chromium: its sliders give what a plan for those sizes gives, its picture
zooms, and it fits its window."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopipe.page.contents import MEMORY_SHARES, contents_of
from autopipe.page.write import page
from autopipe.planfile import predict
from autopipe.scaling import links
from autopipe.scaling.evaluate import at
from autopipe.scaling.sheet import Point
from tests.support.browser import browser, move, shown
from tests.support.sheeted import TOKENS, Sheeted, planned, sheeted


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def own() -> Sheeted:
    return sheeted()


@pytest.fixture(scope="module")
def written(own: Sheeted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    sheets = own.sheets
    path.write_text(
        page(contents_of(own.plan, "plan.json", sheets.sheets, sheets.stops, sheets.why_no_tokens))
    )
    return path


def card(tab: Any, letter: str) -> tuple[float, int, str]:
    """The seconds and the bytes of a plan's card, and what is said of it."""
    found = tab.locator(f'.plan[data-plan="{letter}"]')
    seconds, size = (found.get_attribute(f"data-{name}") for name in ("seconds", "bytes"))
    return float(seconds), int(size), found.locator(".verdict").inner_text()


def test_moved_sliders_give_what_a_plan_for_those_sizes_gives(
    opened: Any, own: Sheeted, written: Path
) -> None:
    stops = own.sheets.stops
    batch, tokens, bandwidth = stops.batches[-2], stops.tokens[3], stops.bandwidths[2]
    anew = planned(
        tokens,
        cluster=links.with_bandwidth(own.plan.cluster, bandwidth),
        batch_size=batch,
        micro_batches=batch // 2,
        recompute="none",
    )
    with shown(opened, written) as tab:
        assert card(tab, "A")[0] == pytest.approx(own.plan.prediction.step_seconds, rel=1e-9)
        move(tab, "batch", len(stops.batches) - 2)
        move(tab, "rows", 1 + stops.rows.index(2))
        move(tab, "tokens", 3)
        move(tab, "link", 2)
        assert tab.locator("#out-tokens").inner_text() == f"{tokens}"
        seconds, held, _ = card(tab, "A")
        assert seconds == pytest.approx(anew.prediction.step_seconds, rel=1e-9)
        assert held == max(stage.predicted.memory.peak for stage in anew.stages)
        tab.click("#reset")
        tab.wait_for_function("document.getElementById('out-batch').textContent === '16 rows'")
        assert card(tab, "A")[0] == pytest.approx(own.plan.prediction.step_seconds, rel=1e-9)


def test_the_script_evaluates_every_sheet_as_python_does(
    opened: Any, own: Sheeted, written: Path
) -> None:
    stops = own.sheets.stops
    points = [
        Point(batch, rows, tokens, bandwidth)
        for batch in stops.batches
        for rows in stops.rows
        for tokens in (stops.tokens[0], TOKENS)
        for bandwidth in (stops.bandwidths[0], stops.bandwidths[-1])
    ]
    with shown(opened, written) as tab:
        script = "(points) => data.sheets.map((sheet) => points.map((at) => outcome(sheet, at)))"
        answered = tab.evaluate(script, [vars(point) for point in points])
    for sheet, answers in zip(own.sheets.sheets, answered, strict=True):
        for point, said in zip(points, answers, strict=True):
            meant = at(sheet, point)
            assert (said is None) == (meant is None)
            if meant is not None:
                assert said["seconds"] == pytest.approx(meant.step_seconds, rel=1e-12)
                assert said["bubble"] == pytest.approx(meant.bubble, abs=1e-9)
                assert tuple(said["peaks"]) == meant.peaks


def test_too_little_memory_is_said_and_the_plan_that_wins_there(opened: Any, written: Path) -> None:
    with shown(opened, written) as tab:

        def limit(share: float) -> tuple[str, str, str]:
            move(tab, "memory", MEMORY_SHARES.index(share))
            return card(tab, "A")[2], card(tab, "B")[2], tab.locator("#winner").inner_text()

        own, rival, _ = limit(1.0)
        assert own.endswith("slower than B") and rival == "the fastest that fits"
        own, rival, winner = limit(0.5)  # 645 KiB
        own = own.replace("\N{NO-BREAK SPACE}", " ")
        assert own.startswith("does not fit: 5.0 KiB too many; with micro-batches of 2 rows")
        assert rival == "the fastest that fits" and "this plan does not fit" in winner
        own, rival, winner = limit(0.25)
        assert rival.startswith("does not fit") and winner.startswith("None of these plans fits")
        strip = tab.locator('[data-name="memory"] .strip').get_attribute("aria-label")
        assert re.fullmatch("the fastest that fits: none from .*; B from .*", strip)


def test_the_instant_of_a_ranks_peak_is_marked_and_named(
    opened: Any, own: Sheeted, written: Path
) -> None:
    timeline = predict.timeline(own.plan)
    with shown(opened, written) as tab:
        for rank, stage in enumerate(own.plan.stages):
            said = stage.predicted.fullest
            begin = next(s.start for s in timeline.spans if str(s.instruction) == said)
            drawn = tab.locator(".memory").nth(rank)
            assert f"at {said[1:]} of stage {rank}" in drawn.inner_text()
            left = drawn.locator(".peak").evaluate("(dot) => parseFloat(dot.style.left)")
            assert left == pytest.approx(100 * begin / timeline.seconds, abs=0.01)


def test_sliders_have_labels_and_move_by_keys(opened: Any, written: Path) -> None:
    with shown(opened, written) as tab:
        before = card(tab, "A")[0]
        slider = tab.get_by_label("batch: rows of a step")
        slider.focus()
        slider.press("ArrowRight")
        assert slider.get_attribute("aria-valuetext") == "32 rows"
        assert card(tab, "A")[0] > before
        for name in ("rows of a micro-batch", "sequence", "link between nodes", "memory for"):
            assert tab.get_by_label(name).is_visible()


def test_the_picture_of_the_step_zooms_and_says_what_a_box_is(opened: Any, written: Path) -> None:
    with shown(opened, written) as tab:
        wide = "document.querySelector('.wide').offsetWidth"
        before = tab.evaluate(wide)
        tab.click('[data-zoom="in"]')
        tab.locator("#picture").press("+")
        assert tab.evaluate(wide) == pytest.approx(before * 1.6**2, rel=0.01)
        tab.click('[data-zoom="fit"]')
        assert tab.evaluate(wide) == before
        tab.locator(".boxes i.F").first.hover()
        assert tab.locator("#readout").inner_text().startswith("rank 0: forward of micro-batch 0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_window_in_light_and_dark(
    opened: Any, written: Path, width: int, scheme: str
) -> None:
    """Nothing but boxes that scroll by themselves is wider than the window; no text is cut."""
    with shown(opened, written, width=width, scheme=scheme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        page_colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (page_colour == "rgb(255, 255, 255)") == (scheme == "light")
        cut = "[...document.querySelectorAll('h1, h2, p, label, output, figcaption, .name')]"
        assert tab.evaluate(f"{cut}.filter((e) => e.scrollWidth > e.clientWidth + 1).length") == 0
