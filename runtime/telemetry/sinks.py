"""Where a run's metrics go beside the terminal: a file of JSON lines, TensorBoard, W&B.

    Destinations  --opened-->  a function of Metrics, on the one rank that writes

No sink ends a run: one that fails is reported once, and gets nothing more. W&B finds its key where
the user has left it (`wandb login`, the environment); nothing here reads a key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Protocol

from autopipe.errors import AutopipeError
from autopipe.planfile.contents import Plan
from autopipe.runtime.telemetry.destinations import Destinations
from autopipe.runtime.telemetry.metrics import Metrics
from autopipe.util import atomic_file


class Sink(Protocol):
    """Takes the metrics of logged steps, in order."""

    def write(self, metrics: Metrics) -> None:
        """A step has ended."""

    def close(self, *, failed: bool = False) -> None:
        """No step will follow; `failed`: an error has ended the run."""


class JsonLines:
    """A file with one JSON object a line, flushed line by line.

    Args:
        path: of the file; lines of later steps than `after` are cut off, so that no step stands
            there twice.
        after: the step that the run goes on from; 0: it begins.

    Raises:
        AutopipeError: the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path, after: int) -> None:
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            kept = _until(path, text, after)
            if kept != text:
                atomic_file.write(kept, path)
        try:
            self._file = FileIO(path, "ab")
        except OSError as error:
            raise AutopipeError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, metrics: Metrics) -> None:
        """Append a line; what is not known is left out.

        Raises:
            OSError: the disk is full; nothing more is written, not even by `close`.
        """
        line = memoryview(json.dumps(metrics.known(), allow_nan=False).encode() + b"\n")
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.close()
            raise

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in a folder: a scalar of each figure; earlier ones after `after` are hidden."""

    def __init__(self, folder: Path, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1, flush_secs=10)

    def write(self, metrics: Metrics) -> None:
        """Add a point to each curve."""
        for name, figure in _figures(metrics).items():
            self._writer.add_scalar(name, figure, metrics.step)

    def close(self, *, failed: bool = False) -> None:
        """Write what is on its way."""
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B's, online or (`WANDB_MODE=offline`) in the folder `wandb`.

    Raises:
        AutopipeError: W&B did not begin a run.
    """

    def __init__(self, project: str, plan: Plan) -> None:
        import wandb

        mesh, batch = plan.mesh, plan.batch
        config = {
            **{"tp": mesh.tp, "pp": mesh.pp, "dp": mesh.dp, "schedule": str(plan.schedule)},
            **{"rows": batch.rows, "micro_batches": batch.micro_batches},
        }
        try:
            self._run = wandb.init(project=project, config=config)
        except Exception as error:
            # Only the kind of error: W&B prints messages about keys itself.
            raise AutopipeError(
                f"W&B did not begin a run of project {project!r}: {type(error).__name__}",
                hint="`wandb login` once; or WANDB_MODE=offline, and `wandb sync` later",
            ) from None

    def write(self, metrics: Metrics) -> None:
        """Log the figures of a step."""
        self._run.log(_figures(metrics), step=metrics.step)

    def close(self, *, failed: bool = False) -> None:
        """Wait until all is stored or sent."""
        self._run.finish(exit_code=int(failed))


@contextmanager
def opened(
    to: Destinations, plan: Plan, after: int, say: Callable[[str], None]
) -> Iterator[Callable[[Metrics], None]]:
    """A function that writes the metrics of a step everywhere; one rank opens it.

    Args:
        after: the step that the run goes on from; 0: it begins.
        say: is told of a sink that fails.

    Raises:
        AutopipeError: as the sinks.
    """
    sinks: dict[str, Sink] = {}
    failed = True

    def tried(name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # of any library's kind; training goes on
            sinks.pop(name)
            # The system's message or the kind of error: a library's message may contain a key.
            number = error.errno if isinstance(error, OSError) else None
            why = type(error).__name__ if number is None else os.strerror(number)
            say(f"{name} failed, and gets no more metrics: {why}")

    try:
        if to.file is not None:
            sinks[f"--metrics {to.file}"] = JsonLines(to.file, after)
        if to.record is not None:
            sinks[f"--record {to.record}"] = JsonLines(to.record, after)
        if to.tensorboard is not None:
            sinks[f"--tensorboard {to.tensorboard}"] = TensorBoard(to.tensorboard, after)
        if to.wandb is not None:
            sinks[f"--wandb {to.wandb}"] = WeightsAndBiases(to.wandb, plan)

        def write(metrics: Metrics) -> None:
            for name, sink in [*sinks.items()]:
                tried(name, partial(sink.write, metrics))

        yield write
        failed = False
    finally:
        for name, sink in [*sinks.items()]:
            tried(name, partial(sink.close, failed=failed))


def _figures(metrics: Metrics) -> dict[str, int | float]:
    """The figures that become curves over the steps."""
    return {name: figure for name, figure in metrics.known().items() if name != "step"}


_BEGIN = '{"step":'
"""How each line of metrics begins."""


def _until(path: Path, text: str, after: int) -> str:
    """The lines of steps up to `after`; a last one that was cut short is left out.

    Raises:
        AutopipeError: a line is none of metrics.
    """
    kept = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        step = None
        if _BEGIN.startswith(line[: len(_BEGIN)]):
            try:
                step = int(json.loads(line)["step"])
            except ValueError:
                step = after + 1 if number == len(lines) else None
        if step is None:
            raise AutopipeError(
                f"--metrics {path}: line {number} is none of metrics: {line[:40]!r}",
                hint="give another file",
            )
        if step <= after:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)
