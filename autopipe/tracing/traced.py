"""A traced model: its graph, and what has to hold for the graph to stand for the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.planfile.parts import InputSpec, Read
from autopipe.planfile.regions import Region
from autopipe.tracing.capture.low_precision import (
    SixteenBits,
)


@dataclass(frozen=True)
class Trace:
    """A graph, the description of the batch it was traced on, and the reads it depends on.

    `outputs`: the paths of the model's own outputs, if the graph returns them after the loss.
    `lie`: for each of them the dim of its rows, and how many times that goes through all rows, as
    `rows.row_dims.rows_lie` has it; known in a rank's trace.
    `unsteady`: kept values that make a later call of the model compute otherwise.
    `left`: values that each call leaves in Python.
    `caches`: buffers in no checkpoint that the first call makes anew; no states of the graph.
    `regions`: the calls that run as they are.
    `asks_for_gpus`: the user's lines that ask whether a tensor is on a GPU; the answer was no.
    `asks_for_one_row`: the user's lines that ask whether there is one row; the answer was no.
    `rows`: the one number of rows of a micro-batch that the graph is for; None: any number.
    `kept`: the dtypes of a trace in 16 bits; None: those in which the model is built.
    """

    graph: Graph
    inputs: tuple[InputSpec, ...]
    reads: tuple[Read, ...]
    outputs: tuple[str, ...] = ()
    lie: tuple[tuple[int, int] | None, ...] = ()
    unsteady: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    caches: frozenset[str] = frozenset()
    regions: tuple[Region, ...] = ()
    rows: int | None = None
    asks_for_gpus: tuple[str, ...] = ()
    asks_for_one_row: tuple[str, ...] = ()
    kept: SixteenBits | None = None

    def facts(self, *, gpus: bool) -> Iterator[str]:
        """Lines about the trace for the user.

        Args:
            gpus: whether the plan's ranks are GPUs.
        """
        for place in dict.fromkeys(read.place for read in self.reads if not read.checked):
            yield f"{place}: a number is read here that nothing depends on; a run does not read it"
        if self.left:
            more = f" and {len(self.left) - 3} more" if len(self.left) > 3 else ""
            yield (
                f"the model leaves {', '.join(self.left[:3])}{more} in Python in each call: steps "
                "of a plan do not, and what a script reads there is as it was; let forward return "
                "it (pipe.evaluate(batch, outputs=True)), or write it into a buffer"
            )
        for region in self.regions:
            yield f"{region.name} runs as it is, and is not looked into: {region.why}"
        for place in self.asks_for_gpus if gpus else ():
            yield (
                f"{place}: asks whether a tensor is on a GPU; the graph is traced on a CPU, and "
                "its ranks do there what the model does on a CPU"
            )
