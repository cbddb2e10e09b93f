"""Show the progress of long work: bars on a terminal, lines of text anywhere else.

    measuring ━━━━━━━━━╸━━━━━━━━━━━━ 5 of 12 0:00:06 0:00:08     bars: parts, time so far, and left
    measuring: 5 of 12, 6 s so far, about 8 s left               lines
    tracing: 47 s so far, at model.py:31                         of no parts: where it is

A phase that ends soon is not shown. A thread draws, since the work may not report for a long time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopipe.frontend.user_lines import running
from autopipe.terminal.console import say
from autopipe.util.progress import Done, shown

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

SOON_SECONDS = 2.0
"""A phase that ends within these seconds has no line; its bar appears after a quarter of them."""

AGAIN_SECONDS = 5.0
"""Seconds between two lines."""

LONG_SECONDS = 20.0
"""A phase of no parts that goes on for longer says which line of the user's code it is at."""


@contextmanager
def showing() -> Iterator[None]:
    """Within, phases are shown on stderr; of several ranks, only rank 0 shows them."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        yield
        return
    by = Bars() if sys.stderr.isatty() else Lines()
    try:
        with shown(by):
            yield
    finally:
        by.close()


@dataclass
class _Phase:
    name: str
    of: int | None
    parts: int = 0
    begun: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)

    def line(self, now: float) -> str:
        """`measuring: 5 of 12, 6 s so far, about 8 s left`; `searching: 5 done, 6 s so far`;
        `tracing: 47 s so far, at model.py:31`."""
        taken = now - self.begun
        texts = [f"{self.parts} of {self.of}"] if self.of else []
        if not self.of and self.parts:
            texts.append(f"{self.parts} done")
        texts.append(f"{taken:.0f} s so far")
        if self.of and 0 < self.parts < self.of:
            texts.append(f"about {taken / self.parts * (self.of - self.parts):.0f} s left")
        if not self.of and not self.parts and (place := _place(taken, self.thread)):
            texts.append(place)
        return f"{self.name}: {', '.join(texts)}"


def _place(taken: float, thread: int) -> str:
    """`at model.py:31`, the user's line that a long phase is at; else empty."""
    place = running(thread) if taken >= LONG_SECONDS else ""
    return f"at {place}" if place else ""


class Lines:
    """Prints the innermost long phase as a line: after two seconds, then every five seconds."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._phases: list[_Phase] = []
        self._last = -AGAIN_SECONDS
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def begin(self, name: str, of: int | None) -> Done:
        """As `Shows` has it."""
        if os.getpid() != self._owner:
            return _nothing
        begun = _Phase(name, of)
        self._phases.append(begun)
        if self._thread is None:
            self._thread = threading.Thread(target=self._tell, daemon=True)
            self._thread.start()

        def done(parts: int = 1) -> None:
            begun.parts += parts

        return done

    def end(self, name: str) -> None:
        """As `Shows` has it."""
        if os.getpid() == self._owner:
            self._phases.pop()

    def close(self) -> None:
        """Stop printing lines."""
        self._closed.set()
        if self._thread is not None and os.getpid() == self._owner:
            self._thread.join()

    def _tell(self) -> None:
        while not self._closed.wait(SOON_SECONDS / 8):
            now = time.monotonic()
            long = [phase for phase in self._phases if now - phase.begun >= SOON_SECONDS]
            if long and now - self._last >= AGAIN_SECONDS:
                self._last = now
                say(long[-1].line(now))


class Bars:
    """Draws a bar for each phase, inner phases below outer ones; a finished bar disappears."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._progress: Progress | None = None
        self._tasks: list[TaskID] = []

    def begin(self, name: str, of: int | None) -> Done:
        """As `Shows` has it."""
        if os.getpid() != self._owner:
            return _nothing
        if self._progress is None:
            self._progress = _progress()
        progress = self._progress
        if not self._tasks:
            progress.start()
        task = progress.add_task(name, total=of, thread=threading.get_ident())
        self._tasks.append(task)

        def done(parts: int = 1) -> None:
            if os.getpid() == self._owner:
                progress.advance(task, parts)

        return done

    def end(self, name: str) -> None:
        """As `Shows` has it."""
        if self._progress is None or os.getpid() != self._owner:
            return
        self._progress.remove_task(self._tasks.pop())
        if not self._tasks:
            self._progress.stop()

    def close(self) -> None:
        """Remove the bars from the screen."""
        if self._progress is not None and os.getpid() == self._owner:
            self._progress.stop()


def _progress() -> Progress:
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Late(progress.Progress):
        """Shows what has gone on for a while."""

        def get_renderables(self) -> Iterable[RenderableType]:
            late = [task for task in self.tasks if (task.elapsed or 0) >= SOON_SECONDS / 4]
            if late:
                yield self.make_tasks_table(late)

    class Parts(progress.ProgressColumn):
        """`5 of 12`, where that is known; else where a long phase is."""

        def render(self, task: progress.Task) -> Text:
            if not task.total:
                return Text(_place(task.elapsed or 0, task.fields["thread"]))
            return Text(f"{task.completed:.0f} of {task.total:.0f}")

    return Late(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        Parts(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=5,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )


def _nothing(parts: int = 1) -> None:
    """Do nothing: a forked copy of this process has no display."""
