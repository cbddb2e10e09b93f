"""The arguments of `plan`, each checked and completed: cluster, schedule, batch, memory limits.

Wrong arguments are refused here, before anything is traced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopipe.batch import row_length
from autopipe.batch.cut import slice_rows, some_rows
from autopipe.batch.description import count_rows, describe
from autopipe.batch.tree import flatten, rebuild
from autopipe.cluster.cluster import Cluster
from autopipe.cluster.measured import Need
from autopipe.cluster.spec import LocalSpec, parse
from autopipe.errors import AutopipeError, ModelError, ScheduleError
from autopipe.planfile.consistency import ZERO
from autopipe.planfile.contents import LOSS_OVER
from autopipe.planfile.parts import TRANSFERS, InputSpec
from autopipe.planfile.programs import micro_batches as count_micro_batches
from autopipe.planners.model.problem import EAGER, WRITTEN, Constraints
from autopipe.planners.search.registry import PLANNERS
from autopipe.report import schedule_page
from autopipe.runtime.probe.probe import local_cluster, this_machine
from autopipe.schedules.instructions import Programs, stages_of
from autopipe.schedules.registry import SCHEDULES
from autopipe.stages.precision import PRECISIONS
from autopipe.tracing.traced import Trace
from autopipe.util.numbers import count
from autopipe.util.progress import Say

AUTO, OFF = "auto", "off"
"""Words of `--offload` and `--turns`: the planner chooses, and none."""

ROWS_PER_DEVICE = 8
"""Rows of the batch for each device by default."""

ROWS = 2
"""Of a micro-batch that a model is traced with."""

WINDOW = 2
"""Receives posted ahead per boundary: one being filled while one is computed on."""


def check_words(
    *, precision: str | None, planner: str, loss_over: str, zero: int | None, transfers: str | None
) -> None:
    """Check the arguments that have to be one of a few words.

    Raises:
        AutopipeError: one of them is not.
    """
    if precision is not None:
        refuse_unknown("precision", precision, PRECISIONS)
    refuse_unknown("planner", planner, sorted(PLANNERS))
    refuse_unknown("loss_over", loss_over, LOSS_OVER)
    if zero is not None:
        refuse_unknown("ZeRO stage", zero, ZERO)
    if transfers is not None:
        refuse_unknown("way of transfers", transfers, TRANSFERS)


NUMBERS = "pp", "dp", "tp", "micro_batches", "micro_batch_size", "chunks", "window", "depth"
"""Constraints that are whole numbers."""


def check_numbers(asked: Constraints, batch_size: int | None) -> None:
    """Check the arguments that are whole numbers from 1 on; a depth may be 0.

    Raises:
        AutopipeError: one of them is not.
    """
    numbers = {"batch_size": batch_size, **{name: getattr(asked, name) for name in NUMBERS}}
    for name, number in numbers.items():
        least = int(name != "depth")
        if number is not None and (type(number) is not int or number < least):
            raise AutopipeError(
                f"{name}={number!r} was asked for, expected a whole number of at least {least}"
            )


def turns_of(asked: str | Sequence[int] | None) -> tuple[int, ...] | None:
    """The ranks that take turns at each stage; empty: one each; None: the planner chooses.

    Raises:
        AutopipeError: it is neither numbers from 1 on nor one of the words.
    """
    if asked is None or asked == AUTO:
        return None
    if asked == OFF:
        return ()
    parts = asked.split(",") if isinstance(asked, str) else [str(number) for number in asked]
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise AutopipeError(f"turns is {asked!r}", hint="auto, off, or of each stage a number: 1,2")
    return tuple(map(int, parts))


def on_gpus(cluster: Cluster | LocalSpec) -> bool:
    """Whether all stages run on GPUs; on this machine, whether it has any."""
    if isinstance(cluster, LocalSpec):
        return torch.cuda.is_available() and not cluster.cpu
    return cluster.all_gpus


def refuse_unknown(what: str, asked: str | int, known: Iterable[str | int]) -> None:
    """Refuse a word that is not among the known ones.

    Raises:
        AutopipeError: it is not; names the known words.
    """
    words = list(known)
    if asked not in words:
        raise AutopipeError(
            f"there is no {what} {asked!r}", hint=f"one of {', '.join(map(str, words))}"
        )


def schedule_of(
    schedule: str | None, chunks: int | None, depth: int | None
) -> tuple[str | None, Programs]:
    """A schedule's name, and its programs if it is one from a file (`WRITTEN`).

    Args:
        schedule: as asked for; None: the one that chunks or a depth are for, if there are any.
        chunks, depth: as asked for; `plan` explains them.

    Raises:
        ScheduleError: the file holds no schedule, its ranks have unlike numbers of stages, or the
            schedule has another number of stages on each rank.
    """
    programs: Programs = ()
    if schedule is None:
        schedule = "interleaved" if chunks else EAGER if depth else None
    if schedule is None or schedule in SCHEDULES:
        has = None if schedule is None else SCHEDULES[schedule].chunks
    else:
        programs = schedule_page.from_file(Path(schedule))
        has, *others = (len(stages_of(program)) for program in programs)
        if {*others} - {has}:
            counts = ", ".join(map(str, (has, *others)))
            raise ScheduleError(
                f"{schedule}: a plan has equally many stages on each rank, and its ranks have "
                f"{counts}",
                hint="`autopipe simulate` draws such a schedule",
            )
    if has is not None and chunks not in (None, has):
        raise ScheduleError(
            f"chunks={chunks} was asked for, and {schedule} puts {count(has, 'stage')} on each "
            "rank",
            hint="schedule='interleaved' takes any number from 2 on",
        )
    return WRITTEN if programs else schedule, programs


def as_written(programs: Programs, pp: int | None, micro_batches: int | None) -> tuple[int, int]:
    """The ranks and micro-batches of a schedule from a file, which must be those asked for.

    Raises:
        AutopipeError: others were asked for.
    """
    sizes = len(programs), count_micro_batches(programs)
    for name, asked, fixed in (("pp", pp, sizes[0]), ("micro_batches", micro_batches, sizes[1])):
        if asked not in (None, fixed):
            raise AutopipeError(
                f"{name}={asked} was asked for, and the schedule is written for {name}={fixed}",
                hint=f"leave {name} out, or write the schedule for {asked}",
            )
    return sizes


def cluster_meant(
    cluster: str | Path | Cluster | None, degrees: tuple[int | None, ...], say: Say
) -> Cluster | LocalSpec:
    """The cluster that the words describe; without words this machine, not yet `measured`, with as
    many processes as the degrees ask for.

    Raises:
        AutopipeError: the words describe no cluster (`spec.parse`).
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        processes = 1
        for degree in degrees:
            processes *= degree or 1
        described: Cluster | LocalSpec = this_machine(processes if any(degrees) else None)
    else:
        described = parse(str(cluster))
    if isinstance(described, LocalSpec):
        whose = "'s processor" if described.cpu else ""
        say(f"cluster: {described.name}, this machine{whose}")
    return described


def measured(found: Cluster | LocalSpec, need: Need, say: Say) -> Cluster:
    """The cluster; if it is this machine, with the measured figures that a model needs.

    Raises:
        AutopipeError: as `probe.local_cluster`.
    """
    return found if isinstance(found, Cluster) else local_cluster(found, say, need=need)


def example_of(inputs: Any) -> tuple[Any, list[InputSpec]]:
    """An example batch and its description.

    Raises:
        ModelError: it has no rows.
    """
    if callable(inputs):
        example, other = inputs(2), inputs(3)
        return example, describe(example, other, 2, 3)
    leaves = flatten(inputs)
    first = next((t for t in leaves.values() if isinstance(t, Tensor) and t.ndim), None)
    if first is None:
        raise ModelError("inputs hold no tensor with a dim, so there are no rows to split")
    return inputs, describe(inputs, None, first.shape[0], 0)


def lengths_of(inputs: Any, lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths that were asked for, ascending; the longest has to be that of the inputs.

    Args:
        inputs: an example batch, or a function that makes one of a number of rows.
        lengths: as asked for; may be empty.

    Raises:
        ModelError: the batch has no sequence, or its rows are not as long as the longest.
    """
    if not lengths:
        return ()
    longest = row_length.length_of(example_of(inputs)[1])
    asked = f"lengths {', '.join(map(str, sorted(lengths)))} were asked for"
    if longest is None:
        raise ModelError(
            f"{asked}, and no tensor of whole numbers in the batch has one dim besides its rows",
            hint="leave them out: rows of such a batch have one length",
        )
    if min(lengths) < 1 or max(lengths) != longest:
        raise ModelError(
            f"{asked}, and inputs() gives rows of {longest} tokens: a plan is for the longest",
            hint=f"give rows of {max(lengths)} tokens from inputs(), or lengths up to {longest}",
        )
    return tuple(sorted({*lengths}))


def rows_of(inputs: Any, example: Any, specs: Sequence[InputSpec], devices: int) -> int:
    """Rows of the whole batch: those of an example; for a function 8 (the default) a device."""
    example_rows = None if callable(inputs) else count_rows(specs, flatten(example))
    return example_rows or ROWS_PER_DEVICE * devices


def limits_of(
    memory: float | str | Sequence[float | str] | None, cluster: Cluster | LocalSpec
) -> tuple[int, ...] | None:
    """The memory limit of each device, from one limit for all or one for each.

    Raises:
        AutopipeError: a text is no size, or there are more or fewer limits than devices.
    """
    if memory is None:
        return None
    asked = memory.split(",") if isinstance(memory, str) else memory
    each = [asked] if isinstance(asked, int | float) else asked
    devices, limits = cluster.num_devices, [_bytes(limit) for limit in each]
    if len(limits) == 1:
        return tuple(limits * devices)
    if len(limits) != devices:
        raise AutopipeError(
            f"memory: {len(limits)} limits were given for the {devices} devices of {cluster.name}",
            hint="one limit for all devices, or one for each, as 80GiB,40GiB,40GiB",
        )
    return tuple(limits)


def check_host(offload: str | Sequence[str] | None, cluster: Cluster | LocalSpec) -> None:
    """Refuse offload from GPUs without a described link to their host.

    Raises:
        AutopipeError: names the device.
    """
    if offload in (None, AUTO, OFF, [AUTO], [OFF]) or isinstance(cluster, LocalSpec):
        return
    for device in cluster.devices:
        if device.is_gpu and not device.host:
            raise AutopipeError(
                f"offload={offload!r} was asked for, and {cluster.name} does not say how fast its "
                f"{device.kind} copies to its host's memory",
                hint='"host" of the device in the cluster file, in bytes a second',
            )


def _bytes(memory: float | str) -> int:
    """Bytes from a finite number, or from text: 24GiB, 24GB, 512MiB, 1000000, 640 bytes.

    Raises:
        AutopipeError: it is no size.
    """
    if isinstance(memory, float) and not math.isfinite(memory):
        raise AutopipeError(f"memory {memory!r} is no size", hint="24GiB, 512MB or bytes")
    size = _parsed(memory) if isinstance(memory, str) else round(memory)
    if size < 1:
        raise AutopipeError(f"memory {memory!r} is {size} bytes, expected at least 1")
    return size


def _parsed(memory: str) -> int:
    figure, unit_of = r"(\d+(?:\.\d+)?)", r"(?:([KMGT]?)(i?)B?|bytes?)"
    match = re.fullmatch(rf"\s*{figure}\s*{unit_of}\s*", memory, re.IGNORECASE)
    if match is None:
        raise AutopipeError(f"memory {memory!r} is no size", hint="24GiB, 512MB or bytes")
    number, letter, binary = match.groups()
    power = "KMGT".index(letter.upper()) + 1 if letter else 0
    unit: int = (1024 if binary else 1000) ** power
    return round(float(number) * unit)


def examples(inputs: Any, example: Any, specs: Sequence[InputSpec]) -> Callable[[int], Any]:
    """A function that makes a batch of given rows: `inputs` itself, or it repeats the example."""

    def batch_of(rows: int) -> Any:
        return inputs(rows) if callable(inputs) else some_rows(example, specs, rows)

    return batch_of


def second(inputs: Any, example: Any, specs: Sequence[InputSpec], rows: int = ROWS) -> Any:
    """A batch of the second `rows` rows; of the first ones if there are no others."""
    source = inputs(2 * rows) if callable(inputs) else example
    leaves = flatten(some_rows(source, specs, 2 * rows))
    return rebuild(source, slice_rows(specs, leaves, rows, 2 * rows))


def two_batches(inputs: Any, example: Any, traced: Trace) -> list[Any]:
    """Two micro-batches: the traced one, and one of other rows if there are any."""
    specs, size = traced.inputs, traced.rows or ROWS
    first = example if traced.rows is None else examples(inputs, example, specs)(2 * size)
    return [some_rows(first, specs, size), second(inputs, example, specs, size)]
