"""Train one rank: build its part of the model, make the steps, save and sum up.

It imports torch, which the process that starts ranks does not load.
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from autopipe.cli.running.options import CheckpointOptions, Outputs, TrainingOptions
from autopipe.cli.running.summary import report
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.frontend.optimizer import check_norm
from autopipe.planfile.contents import Plan
from autopipe.report import recorded
from autopipe.runtime.checkpoint.checkpoints import KEEP
from autopipe.runtime.keeping import Keeping
from autopipe.runtime.parallelize import parallelize
from autopipe.runtime.step.pipe import Pipe
from autopipe.runtime.train import Measured, train
from autopipe.terminal import console
from autopipe.terminal.console import say, tell
from autopipe.terminal.paths import as_asked, relative
from autopipe.util.numbers import count


def run(
    plan: Plan,
    source: str,
    training: TrainingOptions,
    checkpoints: CheckpointOptions,
    outputs: Outputs,
) -> None:
    """Train this rank's part of the model at `source`; rank 0 says what came of it.

    Under `--quiet` training tells of what went another way than asked for, and of nothing else.
    """
    file = model_file.load(source)
    if training.max_grad_norm is not None:
        norm = check_norm(training.max_grad_norm, "--max-grad-norm")
        file = replace(file, max_grad_norm=norm)
    pipe = _split(plan, file, training)
    leads, outputs = pipe.place.rank == 0, outputs.as_asked()
    if leads:
        given = training.weights is not None or checkpoints.resume
        for line in file.since_planning(plan, given=given):
            tell(line)
    saving = None
    if checkpoints.folder is not None:
        saving = Keeping(
            as_asked(checkpoints.folder),
            every=checkpoints.save_every,
            keep=checkpoints.keep or KEEP,
            resume=checkpoints.resume,
            seed=training.seed,
        )
    if leads:
        _begin_record(plan, source, outputs)
    measured = train(
        pipe,
        file,
        training.steps,
        tell,
        outputs.trace,
        epochs=training.epochs,
        log_every=outputs.log_every,
        quiet=console.quiet(),
        keep_going=training.keep_going,
        saving=saving,
        metrics=outputs.metrics,
        snapshot=outputs.snapshot,
    )
    if measured.stopped:
        _keep_trace(measured, outputs)
        _check_written(measured)
        return
    if not measured.losses and pipe.steps and leads:
        say(f"nothing is left to train: {count(pipe.steps, 'step')} made already")
    if outputs.save is not None and pipe.steps:
        pipe.save(outputs.save)
    if leads and (measured.losses or not pipe.steps):
        _end_record(measured, outputs)
        report(
            plan,
            measured,
            source,
            outputs.trace,
            outputs.save,
            checkpoints.folder,
            quiet=console.quiet(),
        )
    _check_written(measured)


def _check_written(measured: Measured) -> None:
    """Raise the error of what could not be written, once all else was."""
    if measured.unwritten is not None:
        raise measured.unwritten


def _split(plan: Plan, file: ModelFile, training: TrainingOptions) -> Pipe:
    """This rank's part of the model, with the weights that the run begins with."""
    given = training.weights and as_asked(training.weights)
    build, weights = file.start() if given is None else (file.model, given)
    return parallelize(
        build,
        plan,
        inputs=file.example_for(plan),
        loss=file.loss,
        weights=weights,
        seed=training.seed or 0,
        offload=training.offload,
        say=say,
    )


def _begin_record(plan: Plan, source: str, outputs: Outputs) -> None:
    """Write the plan into `--record`'s folder, with the model's path from there."""
    if outputs.record is not None:
        found_from_there = relative(source, outputs.record.resolve())
        replace(plan, source=found_from_there).save(outputs.record / recorded.PLAN)


def _end_record(measured: Measured, outputs: Outputs) -> None:
    """Write what the run has measured into `--record`'s folder."""
    if outputs.record is not None:
        recorded.end(outputs.record, measured.stages, measured.step_seconds, measured.bubbles)
        _keep_trace(measured, outputs)
        shown = shlex.quote(str(outputs.record))
        say(f"{outputs.record}: the record; `autopipe report {shown}` shows it")


def _keep_trace(measured: Measured, outputs: Outputs) -> None:
    """Copy the trace into `--record`'s folder; bubbles are known on rank 0 once it is written."""
    if outputs.record is not None and outputs.trace is not None and measured.bubbles:
        recorded.keep_trace(outputs.record, outputs.trace)
