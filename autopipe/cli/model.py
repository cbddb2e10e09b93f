"""The commands `autopipe trace` and `autopipe costs`: a model's graph, and its cost formulas."""

from __future__ import annotations

from typing import Annotated

import typer

from autopipe.terminal import console
from autopipe.terminal.commands import Json, ModelArgument, command
from autopipe.terminal.console import say
from autopipe.util.gc_pause import loading


@command("autopipe trace model.py")
def trace(model: ModelArgument) -> None:
    """Print the model's graph: the nodes that a plan names."""
    with loading():
        from autopipe.batch.description import describe
        from autopipe.frontend import model_file as modelfile
        from autopipe.tracing.source import trace_source

    file = modelfile.load(model)
    example = file.inputs(2)
    specs = describe(example, file.inputs(3), 2, 3)
    print(trace_source(file.model, example, specs, file.loss).graph)


@command("autopipe costs model.py")
def costs(
    model: ModelArgument,
    precision: Annotated[
        str,
        typer.Option(
            help="fp32; bf16, fp16: with fp32 master weights; bf16-autocast, fp16-autocast."
        ),
    ] = "fp32",
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks: the share of the first one is shown.")
    ] = 1,
    cluster: Annotated[
        str | None, typer.Option(help="Whose links these ranks share: 8xA100-80GB, or a file.")
    ] = None,
    json: Json = False,
) -> None:
    """Print what a micro-batch costs, part by part, as formulas in its rows and sequence.

    b are the rows of a micro-batch, s the tokens of a row. --json gives `longest`, the s up to
    which the formulas hold, `parts`, each with `count` (how many of its kind) and formulas for one,
    and `total`, that of the whole model: bytes of parameters, operations (flops), bytes moved, kept
    for backward, and sent to tensor-parallel peers.
    """
    with loading():
        from autopipe.frontend import model_file as modelfile
        from autopipe.planners.formulas.cost_sheet import as_data, sheet
        from autopipe.planners.formulas.model_costs import cost_formulas

    file = modelfile.load(model)
    found = cost_formulas(
        file.model,
        file.inputs,
        loss=file.loss,
        precision=precision,
        tp=tp,
        cluster=cluster,
        say=say,
    )
    if json:
        console.show(as_data(found))
    else:
        print(sheet(found))
