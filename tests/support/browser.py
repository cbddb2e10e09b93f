"""A page in headless Chromium, where there is one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
"""The browser that this machine has."""


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium; the test is skipped where there is none, or nothing to steer it by."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright is installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as found:
        opened = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield opened
        finally:
            opened.close()


@contextmanager
def shown(opened: Any, page: Path, *, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """A page in a window of its own; what it logs, loads or throws fails the test."""
    context = opened.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    troubles: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda message: troubles.append(message.text))
    tab.on("pageerror", lambda error: troubles.append(str(error)))
    tab.on("requestfailed", lambda request: troubles.append(request.url))
    tab.goto(page.as_uri())
    yield tab
    context.close()
    assert troubles == []


def move(tab: Any, slider: str, stop: int) -> None:
    """Move a slider to a stop, as fingers do."""
    tab.evaluate(
        "([name, stop]) => { const slider = document.getElementById(`at-${name}`);"
        "slider.value = stop; slider.dispatchEvent(new Event('input', {bubbles: true})) }",
        [slider, stop],
    )
