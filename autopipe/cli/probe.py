"""The command `autopipe probe`: measures this machine -> a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopipe.terminal import console
from autopipe.terminal.commands import Json, command
from autopipe.terminal.paths import check_file


@command("autopipe probe -o machine.json")
def probe(
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that measure at once: as many as will run."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write a cluster file, for `plan --cluster FILE`."),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Measure the processor, whether or not there are GPUs.")
    ] = False,
    again: Annotated[bool, typer.Option(help="Measure even if there is a record.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine: what a cluster file holds.

    What is printed is JSON without --output in any case; with both, it is printed as well.
    """
    from autopipe.runtime.probe.probe import local_cluster, this_machine
    from autopipe.util import codec

    check_file(output)
    here = this_machine(processes, cpu=cpu)
    found = local_cluster(here, console.say, again=again, estimate=False)
    if output is not None:
        codec.save(found, output)
    if output is None or json:
        console.show_text(codec.dumps(found))
    else:
        print(output)
