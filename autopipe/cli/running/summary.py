"""What a run has measured, beside what its plan predicts, and what it has written or lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from autopipe.terminal.console import say, tell

if TYPE_CHECKING:  # it imports torch
    from autopipe.planfile.contents import Plan
    from autopipe.runtime.train import Measured


INTERRUPTED = 130

LOST = (
    "Ctrl-C: ended at once, and what was trained is not kept\n\n"
    "hint: with --checkpoints FOLDER a Ctrl-C saves first, and --resume goes on from it"
)


@contextmanager
def telling_what_is_lost(*, keeps: bool) -> Iterator[None]:
    """Within, a run that a Ctrl-C ends without any checkpoint tells the user that nothing is kept.

    Args:
        keeps: print nothing: the run saves checkpoints, or another process prints it.
    """
    try:
        yield
    except (KeyboardInterrupt, typer.Exit) as ended:
        if not keeps and getattr(ended, "exit_code", INTERRUPTED) == INTERRUPTED:
            tell(LOST)
        raise


def report(
    plan: Plan,
    measured: Measured,
    source: str,
    trace: Path | None = None,
    save: Path | None = None,
    checkpoints: Path | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Print a run's measurements beside the plan's predictions, and its losses.

    It is what a run does last: an error of a trace or a checkpoint is raised here, after the model
    was saved.

    Args:
        save: the path to which the model was saved.
        checkpoints: the folder in which the last step is kept.
        quiet: print no table and no optional messages.

    Raises:
        AutopipeError: the trace, or the last checkpoint, could not be written.
    """
    from autopipe.report import paper
    from autopipe.report.figures import compare
    from autopipe.runtime.telemetry.progress import figure
    from autopipe.util.numbers import Amount

    if not measured.stages:
        tell(f"{source}: batches({plan.batch.rows}) gave no batch, so there was no step")
        return
    if not quiet:
        table = compare(
            [stage.predicted for stage in plan.stages],
            measured.stages,
            plan.prediction.step_seconds,
            measured.step_seconds,
            measured.bubbles,
            paper.width(),
        )
        print(table, end="")
        if measured.gpu is not None:
            amount = Amount(measured.gpu.reserved)
            print(
                f"the fullest GPU: tensors held {amount.of(measured.gpu.allocated)} at most, what "
                f"ops make on the way among them; torch reserved {amount.of(measured.gpu.reserved)}"
            )
    if trace is not None and measured.unwritten is None:
        say(f"{trace}: open it at https://ui.perfetto.dev")
    if save is not None and measured.losses:
        say(f"{save}: the trained model, as safetensors")
    elif checkpoints is not None:
        say(f"{checkpoints}: the checkpoints; `autopipe checkpoint convert` writes the model")
    elif not quiet:
        say("the trained weights are not kept; --save FILE.safetensors does that")
    print(f"loss {figure(measured.losses[0])} -> {figure(measured.losses[-1])}", flush=True)
    if measured.unwritten is not None:
        raise measured.unwritten
