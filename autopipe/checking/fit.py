"""Choose how much smaller a mesh and a model have to be, so that a check ends soon here.

    the mesh     dp to 2, then the larger of pp and tp halved, down to 2 each: at most MOST_RANKS
    a step       two micro-batches for each pipeline rank, two rows each
    the model    fewer equal layers, shorter rows, narrower widths: only as far as it does not fit

The kind of split stays: a degree above one is at least two, ZeRO keeps replicas, interleaved ranks
keep several stages, each stage keeps a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopipe.checking.subject import Smaller
from autopipe.cluster.spec import parse
from autopipe.errors import AutopipeError, ModelError
from autopipe.planfile.contents import Plan
from autopipe.planners.driver.arguments import as_written, schedule_of
from autopipe.schedules.instructions import holders
from autopipe.tracing.source import parameter_bytes
from autopipe.util import host_memory, numbers

MOST_RANKS = 8
"""Processes of a check."""

MOST_BYTES = 320 * 2**20
"""Of parameters, where a model can be made so small: a check that ends soon."""

HELD = 12
"""Bytes of a check for each of parameters: with gradients, optimizer state, copies, both sides."""

MOST_FLOPS = 1e11
"""Operations of one step; all steps of both sides are four of it, a few seconds of a core."""

SHORT = 64
"""Tokens of a row that does not fit."""

NARROWEST = 64
"""What widths are divided by at most."""


@dataclass(frozen=True)
class Degrees:
    """The mesh of a check, its micro-batches, and the rows of each."""

    pp: int
    dp: int
    tp: int
    chunks: int
    micro_batches: int
    rows: int

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.pp * self.dp * self.tp

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.dp * self.micro_batches * self.rows

    @classmethod
    def of(cls, plan: Plan) -> Degrees:
        """The degrees of a plan."""
        mesh, m = plan.mesh, plan.batch.micro_batches
        chunks = len(plan.stages) // mesh.pp
        return cls(mesh.pp, mesh.dp, mesh.tp, chunks, m, plan.batch.microbatch_rows(mesh.dp))

    def changes_from(self, other: Degrees) -> list[str]:
        """The degrees that are smaller than in `other`: `dp 256 -> 2`."""
        words = {"micro_batches": "micro-batches", "rows": "rows of a micro-batch"}
        return [
            f"{words.get(name, name)} {before} -> {getattr(self, name)}"
            for name, before in vars(other).items()
            if getattr(self, name) != before
        ]


def fewer_ranks(wanted: Degrees, *, written: bool = False) -> Degrees:
    """The degrees reduced to `MOST_RANKS` processes and few micro-batches.

    Args:
        written: whether the user's own schedule fixes pipeline ranks and micro-batches.

    Raises:
        AutopipeError: the schedule does not allow fewer.
    """
    found = replace(wanted, dp=min(wanted.dp, 2))
    while found.ranks > MOST_RANKS and max(found.pp, found.tp) > 2:
        if written:
            raise AutopipeError(
                f"the plan's own schedule is for pp={found.pp}, with dp={found.dp} and "
                f"tp={found.tp} {found.ranks} processes, and a check starts {MOST_RANKS} at most",
                hint="check a plan with fewer tensor-parallel ranks or replicas",
            )
        name = "pp" if found.pp >= found.tp else "tp"
        found = replace(found, **{name: max(2, getattr(found, name) // 2)})
    if not written:
        found = replace(found, micro_batches=min(found.micro_batches, 2 * found.pp))
    return found


def smaller_models(
    model: Callable[[Smaller], nn.Module], wanted: Degrees, tokens: int
) -> Iterator[tuple[Smaller, Degrees]]:
    """Ways to make a model fit, those that change least first.

    Args:
        model: builds the smaller model without memory; ModelError: it cannot be made that small.
        tokens: tokens of a row.

    Yields:
        a change of the model, and the degrees with it. The last one is the smallest model without
        divided widths, if the machine has room for it.

    Raises:
        ModelError: the model cannot be built.
        AutopipeError: nothing makes it fit.
    """
    least = Smaller(layers=max(2, wanted.pp * wanted.chunks))
    few = replace(wanted, rows=min(wanted.rows, 2))
    short = SHORT if tokens > SHORT else 0
    ways = [(Smaller(), wanted), (Smaller(), few), (least, few)]
    ways += [(replace(least, length=short), few)] if short else []
    divisor = 2
    while divisor <= NARROWEST:
        ways.append((replace(least, width=divisor, length=short), few))
        divisor *= 2
    sizes = dict[tuple[int, int], int]()
    for way, degrees in ways:
        key = way.layers, way.width
        try:
            size = sizes[key] if key in sizes else parameter_bytes(model(way))
        except ModelError:
            if way.width == 1:
                raise
            break  # a width that does not divide
        sizes[key] = size
        flops = 6 * size / 4 * degrees.batch * (min(tokens, way.length) if way.length else tokens)
        last = way.width == 1 and way.layers and (way.length or not short)
        if size <= MOST_BYTES and (flops <= MOST_FLOPS or last):
            yield way, degrees
    fewest = min(sizes.values(), default=0)
    if fewest > MOST_BYTES:
        room = host_memory.available()
        if HELD * fewest > room // 2:
            raise AutopipeError(
                f"the model does not fit into a check: with {least.layers} of each row of equal "
                f"layers its parameters take {numbers.memory(fewest)}, a check about {HELD} times "
                f"that, and half of the memory of this machine that is free is "
                f"{numbers.memory(room // 2)}",
                hint="check a smaller configuration of it: a model() with fewer layers and less "
                "width",
            )
        layers, width = min(sizes, key=sizes.__getitem__)
        yield Smaller(layers, width, short if layers else 0), few


def usual_degrees(
    asked: dict[str, int], cluster: str | None, rows: int | None, words: dict[str, Any]
) -> Degrees:
    """The degrees for a model file without a plan; by default a pipeline of two.

    Args:
        asked: the degrees among pp, tp, dp and micro_batches that were asked for.
        cluster: "local:N" or "cpu:N"; a pipeline without a given degree takes its processes.
        rows: rows of the batch; None: two for each micro-batch.
        words: other constraints, which also say whether ranks have several stages. A schedule from
            a file fixes pp and micro_batches.

    Raises:
        AutopipeError: the cluster has another number of processes, rows do not divide, or the
            schedule from a file is for others than those asked for.
    """
    schedule, programs = schedule_of(*map(words.get, ("schedule", "chunks", "depth")))
    chunks = {"interleaved": words.get("chunks") or 2, "zb-v": 2}.get(schedule or "", 1)
    if programs:
        chunks = len(holders(programs)) // len(programs)
        asked_pp, asked_m = asked.get("pp"), asked.get("micro_batches")
        fixed = zip(("pp", "micro_batches"), as_written(programs, asked_pp, asked_m), strict=True)
        asked = {**asked, **dict(fixed)}
    pp, tp, dp = (asked.get(name, 1) for name in ("pp", "tp", "dp"))
    processes = None if cluster is None else parse(cluster).num_devices
    if not {"pp", "tp", "dp"} & asked.keys():
        pp = processes or 2
    elif processes is not None and "pp" not in asked and processes % (tp * dp) == 0:
        pp = processes // (tp * dp)
    if processes not in (None, pp * tp * dp):
        raise AutopipeError(
            f"pp={pp} dp={dp} tp={tp} are {pp * tp * dp} processes, and {cluster} has {processes}",
            hint="leave --cluster out",
        )
    m = asked.get("micro_batches", 2 * pp)
    if rows is not None and rows % (dp * m) and "micro_batches" in asked:
        raise AutopipeError(
            f"a batch of {rows} rows does not divide into dp={dp} x micro_batches={m} equal parts"
        )
    each = 2 if rows is None else max(1, rows // (dp * m))
    return Degrees(pp, dp, tp, chunks, m, each)
