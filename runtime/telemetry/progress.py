"""Show a run's steps on the terminal: a bar, or a line now and then."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from autopipe.runtime.telemetry.metrics import Metrics
from autopipe.util import numbers

LINES = 10
"""How many lines of progress a run prints where there is no terminal to draw a bar on."""

Show = Callable[[Metrics], None]


def figure(loss: float) -> str:
    """A loss with four significant digits at least, and three decimals.

    >>> figure(5.7768), figure(0.25), figure(0.0123456), figure(1.5e-7), figure(1234.5678)
    ('5.777', '0.2500', '0.01235', '1.500e-07', '1234.568')
    """
    if not math.isfinite(loss) or 0 < abs(loss) < 1e-5:
        return f"{loss:.3e}"
    digits = 3 - math.floor(math.log10(abs(loss))) if loss else 3
    return f"{loss:.{max(3, digits)}f}"


def throughput(metrics: Metrics) -> str:
    """Tokens a second where rows are sequences; rows otherwise."""
    if metrics.tokens_per_second is not None:
        return f"{metrics.tokens_per_second:,.0f} tokens/s"
    return f"{metrics.rows_per_second:,.1f} rows/s"


@contextmanager
def progress_shown(
    steps: int | None, talks: bool, say: Callable[[str], None], log_every: int | None = None
) -> Iterator[Show]:
    """A bar on a terminal; elsewhere, or if asked for, a line now and then."""
    of = f"/{steps}" if steps else ""
    ended: list[float] = []

    def text(metrics: Metrics) -> str:
        ended.append(perf_counter())
        line = f"loss {figure(metrics.loss)}  {throughput(metrics)}"
        if metrics.mfu is not None:
            line += f"  MFU {numbers.percent(metrics.mfu)}"
        if steps and len(ended) > 1:  # the first one takes longer than any other
            remaining = (ended[-1] - ended[0]) / (len(ended) - 1) * (steps - metrics.step)
            line += f"  {_clock(remaining)} left" if remaining >= 1 else ""
        return line

    if not talks:
        yield lambda metrics: None
    elif sys.stderr.isatty():
        columns = [
            TextColumn("step {task.completed}" + of),
            BarColumn(),
            TextColumn("{task.description}"),
        ]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps)

            def draw(metrics: Metrics) -> None:
                step, line = metrics.step, text(metrics)
                if log_every and step % log_every == 0:
                    bar.console.print(f"step {step}{of}  {line}", highlight=False)
                bar.update(task, completed=step, description=line)

            yield draw
    else:
        every = log_every or max(1, (steps or 100) // LINES)
        offset = 0 if log_every else 1

        def tell(metrics: Metrics) -> None:
            step, line = metrics.step, text(metrics)
            if (step - offset) % every == 0 or step == steps:
                say(f"step {step}{of}  {line}")

        yield tell


def _clock(seconds: float) -> str:
    """`40 s`, `12:05` minutes or `3:12:05` hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
