"""Write a planned model as files to read, compare, edit and run (`autopipe emit`).

    DIR/plan.json      the plan
    DIR/programs.txt   what each rank runs in a step, transfers included
    DIR/stage_0.py     a stage as plain PyTorch, one file for each; stage_0_tp1.py: its second part
    DIR/train.py       what `autopipe run` does, for torchrun; without checkpoints and metrics

The folder is written under a temporary name and renamed, so it is whole or absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from autopipe.batch.cut import example_to_trace
from autopipe.emit.pretty_print import text
from autopipe.emit.stage_code import Surroundings, stage_code
from autopipe.errors import PlanError
from autopipe.frontend import hf_folder
from autopipe.frontend.loss import Loss
from autopipe.ir.opaque_ops import COND_OP
from autopipe.ir.torch_private import fake_mode
from autopipe.planfile import programs
from autopipe.planfile.contents import BATCH, Plan, names_module, stage_file
from autopipe.rewriting.for_gpus import for_gpus
from autopipe.schedules import deadlock
from autopipe.schedules.instructions import Programs, format_programs, holders
from autopipe.sharding import collectives
from autopipe.sharding.collectives import Planned
from autopipe.stages.bind import Split, check_loss, check_runs, split_as_planned
from autopipe.stages.dry_run import fake_state, rehearse
from autopipe.stages.lower import lower
from autopipe.stages.recompute import within
from autopipe.tracing.source import Source, bare, trace_as_planned
from autopipe.util import atomic_file, codec


def emit(
    model: Source,
    plan: Plan,
    folder: Path,
    *,
    inputs: Callable[[int], Any] | None = None,
    loss: Loss | None = None,
    source: str | None = None,
    force: bool = False,
) -> None:
    """Write the folder of a planned model.

    Args:
        model: as given to `parallelize`; no weights are made.
        inputs: makes an example batch of given rows; None: it is made from the plan.
        loss: as given to `plan`.
        source: the model file's path relative to `folder`; None: the plan's `source`.
        force: replace an existing folder and all its contents.

    Raises:
        PlanError: the folder exists and is not empty, or cannot be written; or the plan
            belongs to another model.
    """
    if folder.exists() and not force and (not folder.is_dir() or any(folder.iterdir())):
        raise PlanError(
            f"{folder} is there already, and not empty",
            hint="--force replaces it, with all that has been edited in it",
        )
    check_runs(plan)
    check_loss(plan, loss)
    if plan.loss_over == BATCH:
        raise PlanError(
            'plan.loss_over: "batch", which takes two passes and a loss between them; what is '
            "emitted runs one",
            hint="autopipe run plan.json runs both",
        )
    plan = replace(plan, source=source or plan.source)
    if plan.source is None:
        raise PlanError("plan.source: train.py needs the model file, and the plan names none")
    step = programs.step(plan)
    deadlock.check(step)
    contents = {
        "plan.json": codec.dumps(plan),
        "programs.txt": programs_text(plan, step),
        **stages(model, plan, loss, inputs),
        "train.py": train_text(plan),
    }
    with atomic_file.folder(folder) as beside:
        for name, content in contents.items():
            atomic_file.write(content, beside / name)


def stages(
    model: Source, plan: Plan, loss: Loss | None, inputs: Callable[[int], Any] | None = None
) -> dict[str, str]:
    """The Python text of each stage's module, by file name.

    Raises:
        PlanError: the plan is of another model.
    """
    if plan.regions:
        raise PlanError(
            f"plan.regions: {plan.regions[0].name} runs as it is written in the model, and no file "
            "can be made of it",
            hint="run the plan as it is: autopipe run",
        )
    skeleton = bare(model)
    example = example_to_trace(inputs, plan.inputs, plan.traced_rows)
    traced = trace_as_planned(model, skeleton, example, loss, plan)
    for node in traced.graph.nodes:
        if node.op == COND_OP:
            raise PlanError(
                f"{node.place}: torch.cond runs functions of the model, of which no file is made",
                hint="run the plan as it is: autopipe run",
            )
    found = {}
    for part in range(plan.mesh.tp):
        with collectives.bind(collectives.TENSOR_PARALLEL, Planned(plan.mesh.tp, part)):
            split = split_as_planned(traced, plan, part)
            for index, code in _of_part(split, plan, skeleton).items():
                found[stage_file(plan, index, part)] = code
    return found


def _of_part(split: Split, plan: Plan, skeleton: nn.Module) -> dict[int, str]:
    """The text of each stage as one tensor-parallel rank runs it."""
    graph, blocks = split.graph, split.blocks
    rows = rows_of(plan)
    recompute = [path for stage in plan.stages for path in stage.recompute]
    with for_gpus(plan.cluster.has_gpus):
        rehearsal = rehearse(
            graph, split.once, blocks, rows, recompute=recompute, precision=plan.precision
        ).in_turns(plan.turns)
    ranks = holders(programs.compute(plan))
    found: dict[int, str] = {}
    for stage in split.stages:
        with fake_mode():
            lowered = lower(
                graph,
                stage,
                blocks,
                {name: fake_state(graph, name) for name in stage.states},
                plan.reads,
                rows,
                last=stage.is_last(split.graph),
                recompute=within(graph, stage, blocks, recompute),
                precision=plan.precision,
            )
        around = Surroundings(
            graph,
            blocks,
            rehearsal.boundaries,
            plan.precision,
            len(split.stages),
            ranks[stage.index],
            lambda path: type(skeleton.get_submodule(path)).__name__,
        )
        with for_gpus(plan.cluster.has_gpus):
            found[stage.index] = stage_code(lowered, around)
    return found


def rows_of(plan: Plan) -> int:
    """The rows of one micro-batch of a plan."""
    return plan.batch.microbatch_rows(plan.mesh.dp)


def programs_text(plan: Plan, step: Programs) -> str:
    """The text of programs.txt: a step's programs, with an explanation of their instructions."""
    ranks = ", ".join(f"{s} on rank {r}" for s, r in enumerate(holders(step)))
    count = sum(map(len, step))
    return f"""\
# What each rank of a pipeline runs in one step: {plan.schedule}, {plan.batch.micro_batches} \
micro-batches.
# Stages: {ranks}.
#
#   0F3            stage 0: forward of micro-batch 3
#   1B3            stage 1: backward of it; I and W are its halves, for inputs and for weights
#   1POST_F3<0     make room for what stage 0 sends of it; F: activations, B: their gradients
#   1WAIT_F3<0     wait until it is here
#   0SEND_F3>1     send it to stage 1
#   0FREE_F3>1     wait until it has gone
#   0REDUCE        the next backward of stage 0 is its last: sum gradients as it makes them
#   0STEP          wait for these sums
#
# Proved: {count} instructions, no rank waits for another for good, and no two tensors are swapped.
# train.py reads this file and proves it again. Instructions may stand in another order; a rank
# needs all of its own.

{format_programs(step)}
"""


def train_text(plan: Plan) -> str:
    """The text of train.py, which runs the folder."""
    assert plan.source is not None
    return TRAIN.replace("PROCESSES", str(len(plan.mesh.places))).replace(
        "SOURCE", _from_folder(plan.source)
    )


def _from_folder(source: str) -> str:
    """The code in train.py for a model's source, whose path begins at train.py's folder."""
    path = source.removeprefix(hf_folder.SCHEME)
    if path != source:
        return f'"{hf_folder.SCHEME}" + str(FOLDER / {text(path)})'
    return text(source) if names_module(source) else f"str(FOLDER / {text(source)})"


TRAIN = '''\
"""Trains as planned, stage by stage as the files in this folder have it.

    torchrun --nproc-per-node PROCESSES train.py --steps 10

`--help` lists the options, which `autopipe run` has too; that runs plan.json without the other
files. Under srun it is `srun -n PROCESSES python train.py`.
"""

from pathlib import Path

import autopipe
from autopipe import cli
from autopipe.util.atomic_file import check_model
from autopipe.frontend.model_file import load
from autopipe.runtime.train import train

FOLDER = Path(__file__).resolve().parent


def main(
    steps: int | None = None,
    epochs: int | None = None,
    save: Path | None = None,
    seed: int = 0,
    weights: Path | None = None,
    offload: bool = False,
    trace: Path | None = None,
    log_every: int | None = None,
    keep_going: bool = False,
) -> None:
    """Train for this number of steps; without one, until the batches end."""
    cli.check_file(trace)
    if save is not None:
        check_model(save)
    plan = autopipe.Plan.load(FOLDER / "plan.json")
    file = load(SOURCE)
    build, first = file.start() if weights is None else (file.model, weights)
    # This rank's stages from stage_*.py, and its program from programs.txt.
    pipe = autopipe.parallelize(
        build,
        plan,
        inputs=file.example_for(plan),
        loss=file.loss,
        weights=first,
        seed=seed,
        offload=offload,
        emitted=FOLDER,
        say=cli.say,
    )
    if pipe.place.rank == 0:
        for line in file.since_planning(plan, given=weights is not None):
            cli.tell(line)
    # Batches through the pipe, an optimizer step after each; a line of progress from rank 0.
    measured = train(
        pipe,
        file,
        steps,
        cli.tell,
        trace,
        epochs=epochs,
        log_every=log_every,
        quiet=cli.quiet(),
        keep_going=keep_going,
    )
    if save is not None and measured.losses:
        pipe.save(save)
    if pipe.place.rank == 0:
        cli.report(plan, measured, file.source, trace, save, quiet=cli.quiet())


if __name__ == "__main__":
    cli.program(main)
'''
