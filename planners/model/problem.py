"""The planner's problem: a model's costs by unit, as plain numbers.

The graph's nodes are grouped into *units*, the finest pieces between cuts that are allowed. A stage
is a range of units [i, j); a decision is a mesh, a number of micro-batches and the cuts.

    units      0    1    2    3    4    5
             |----|----|----|----|----|----|
    cuts          ^         ^                    cuts (1, 3): stages [0,1) [1,3) [3,6)

All costs of a stage are sums over its range: seconds of units, bytes that a range has once however
many of its units use them (`Shared`), storages kept from forward to backward (`Saved`), and tensors
that cross a cut (`Crossing`). A block may run again in backward: then it takes its forward's
seconds once more, and does not keep storages that only it would keep. Or some of its ops run again,
at a `BlockLevel`, which a planner chooses for blocks that a stage has whole. If the user has chosen
it, parts of a block that a cut divides have its seconds too, and are assumed to save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from autopipe.planners.model.devices import Machine
from autopipe.schedules.instructions import Programs
from autopipe.schedules.instructions import splits as halved
from autopipe.schedules.registry import named


@dataclass(frozen=True)
class Shared:
    """`bytes` that a stage holds once if it has any of `units` (ascending): a parameter."""

    bytes: int
    units: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A storage of `bytes` that units `savers` keep for backward, none of them before `producer`.

    It is made in unit `producer`; a stage that starts after the producer has received the tensor
    instead and pays for it as a `Crossing`. None: made anew in every stage that needs it.
    `block` is the number of the recomputable block that makes it, if only that block keeps it; if
    the block runs again, the storage is not kept.
    """

    bytes: int
    producer: int | None
    savers: tuple[int, ...]
    block: int | None = None


@dataclass(frozen=True)
class Crossing:
    """A tensor of `bytes` made in unit `producer`, used in later units `consumers` (ascending).

    Sent to each later stage with a consumer; with `gradient`, one of the same size comes back.
    `divides`: each tensor-parallel rank has it whole, and may send a part of it only.
    """

    bytes: int
    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    divides: bool = False


Seconds = tuple[float, ...]


class BlockLevel(NamedTuple):
    """A level of a block: some of its ops run again in backward, and it keeps less.

    Args:
        dropped: bytes of a micro-batch that it does not keep.
        seconds: for each kind of device, the seconds of the repeated ops in each of its units.
    """

    dropped: int
    seconds: tuple[Seconds, ...]


@dataclass(frozen=True)
class Profile:
    """The costs of one micro-batch of `rows` rows, by unit.

    Args:
        forward, backward: for each kind of device the seconds of each unit.
        recompute: for each recomputable block and each kind of device, the seconds that running it
            again takes in each of the block's units.
        exchange: for each kind of device the seconds of each unit, among those of `forward` and
            `backward`, in which tensor-parallel ranks exchange tensors; empty: there are none.
        levels: for each recomputable block its levels between keeping all and running again whole;
            empty: there are none. Equally many in every profile.
        made: for each unit the most bytes that its backward has made and holds, if stages are
            compiled; empty: they are not counted.
        waiting: for each unit the bytes that it holds more between the halves of its backward than
            before them, if stages are compiled; empty: they are not counted. Less than 0 where the
            first half frees more than it leaves.
        passing: for each unit the bytes that exist only within a loss's backward; empty: none.
    """

    rows: int
    forward: tuple[Seconds, ...]
    backward: tuple[Seconds, ...]
    saved: tuple[Saved, ...]
    crossings: tuple[Crossing, ...]
    recompute: tuple[tuple[Seconds, ...], ...] = ()
    exchange: tuple[Seconds, ...] = ()
    levels: tuple[tuple[BlockLevel, ...], ...] = ()
    made: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    passing: tuple[int, ...] = ()


WHOLE: Final = -1
"""The number of the level at which all of a block runs again."""


class Again(NamedTuple):
    """A recomputable block, by number, and the level at which it runs again."""

    block: int
    level: int = WHOLE


@dataclass(frozen=True)
class Constraints:
    """The user's constraints; None leaves a choice to the planner.

    Attributes:
        memory: bytes that each of the cluster's devices may hold at most.
        chunks: stages on each rank under the schedule interleaved.
        window: receives posted ahead at every boundary.
        depth: micro-batches in flight at every boundary beyond those of 1F1B.
        recompute: the blocks that run again, at these levels, and no others.
        programs: a schedule that the user has written; `schedule` is then `WRITTEN`, and pp and
            micro_batches are those of the programs.
        transfers: one of `planfile.parts.TRANSFERS`, how tensors that divide go to later stages.
        offload: the numbers of the blocks that offload, and no others.
        turns: the number of ranks that take turns at each stage; empty: one each.
        micro_batch_size: rows of a micro-batch, from which their number follows in each mesh.
        ruled_out: those of zero, tp and pp that may have no other value: the optimizer would not
            change parameters as it does in one process.
    """

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    memory: tuple[int, ...] | None = None
    chunks: int | None = None
    window: int | None = None
    depth: int | None = None
    zero: int | None = None
    recompute: tuple[Again, ...] | None = None
    programs: Programs = ()
    transfers: str | None = None
    offload: tuple[int, ...] | None = None
    turns: tuple[int, ...] | None = None
    micro_batch_size: int | None = None
    ruled_out: tuple[str, ...] = ()


EAGER = "eager-1f1b"
"""The name of the schedule that takes a depth for each boundary."""

WRITTEN = "written"
"""The name of a schedule from a file."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything a planner may read. Compared and hashed by identity.

    Args:
        units: the number of units.
        blocks: ranges [first, last) of units, one per repeated block, in order; may be empty.
        parameters: trainable parameters; each also has a gradient and optimizer state.
        constants: buffers, and copies of parameters that autocast casts.
        optimizer_factor: bytes of optimizer state per byte of trainable parameter.
        profiles: one per micro-batch size worth considering, `rows` ascending.
        batch: rows of the whole batch.
        machine: the devices.
        window: receives posted ahead per boundary.
        constraints: what the user has fixed.
        recomputable: ranges [first, last) of units, one per block that can be recomputed, in order;
            its first and its last unit may hold something else besides.
        zeros: the ZeRO stages to choose from, ascending.
        tp: the tensor-parallel degree that the profiles are for.
        copies: the 16-bit copies that forward reads of those `parameters` that are fp32 masters:
            half as large. Under ZeRO-3 they exist only while they are gathered.
        frozen: parameters that are not trained; ZeRO-3 shards and gathers them too.
        largest: for each unit the bytes of the largest gradient that it makes beside the sum to
            which it is added; empty: not counted.
        low_gradients: gradients of masters are summed in 16 bits, as wide as `copies`.
        beyond: by schedule and ZeRO stage, bytes of each device that a search may not use, because
            the exact bytes of a plan that used them did not fit (`driver.refine.plan_that_fits`).
        offloads: whether backwards are graphs, in which blocks may offload what they keep.
    """

    units: int
    blocks: tuple[tuple[int, int], ...]
    parameters: tuple[Shared, ...]
    constants: tuple[Shared, ...]
    optimizer_factor: float
    profiles: tuple[Profile, ...]
    batch: int
    machine: Machine
    window: int
    constraints: Constraints
    recomputable: tuple[tuple[int, int], ...] = ()
    zeros: tuple[int, ...] = (0,)
    tp: int = 1
    copies: tuple[Shared, ...] = ()
    frozen: tuple[Shared, ...] = ()
    largest: tuple[int, ...] = ()
    low_gradients: bool = False
    beyond: Mapping[tuple[str, int], int] = field(default_factory=dict)
    offloads: bool = False

    def profile(self, rows: int) -> Profile:
        """The profile of micro-batches of `rows` rows, which exists."""
        return next(profile for profile in self.profiles if profile.rows == rows)

    @property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """`blocks`, and the first one also where no cut separates it from what stands before it:
        from the unit that holds both."""
        if self.blocks and self.recomputable:
            first, stop = self.recomputable[0]
            if first < stop == self.blocks[0][0]:
                return (first, stop), *self.blocks
        return self.blocks

    def seen_beyond(self, config: Config) -> int:
        """Bytes of each device that plans of a config may not use: see `beyond`."""
        return self.beyond.get((config.schedule, config.zero), 0)


def splits(problem: Problem, schedule: str) -> bool:
    """Whether a schedule has backward in halves; such stages cannot recompute."""
    programs = problem.constraints.programs
    return halved(programs) if programs else named(schedule).splits


FEWEST_CHUNKS = 2
"""With one stage on each rank the schedule interleaved is 1f1b."""


class Config(NamedTuple):
    """A decision before its cuts: a mesh, the number of micro-batches, and how they run.

    `pp`: the pipeline's ranks. `dp`: its replicas. `zero`: the ZeRO stage. `depth`: additional
    micro-batches in flight at every boundary, for eager-1f1b. `chunks`: stages on each rank, for
    interleaved, which leaves their number open. `turns`: the number of ranks that take turns at
    each stage (`planfile.turns`), pp in all; empty: one each.
    """

    pp: int
    dp: int
    micro_batches: int
    zero: int
    schedule: str
    depth: int = 0
    chunks: int = FEWEST_CHUNKS
    turns: tuple[int, ...] = ()

    @property
    def scatters(self) -> bool:
        """Whether every backward scatters its gradients over replicas: ZeRO-2 and 3."""
        return self.zero >= 2 and self.dp > 1

    @property
    def fully_sharded(self) -> bool:
        """Whether parameters are sharded over replicas and gathered where they are used: ZeRO-3."""
        return self.zero == 3 and self.dp > 1

    def microbatch_rows(self, batch: int) -> int:
        """Rows of one micro-batch, for a whole batch of `batch` rows."""
        return batch // (self.dp * self.micro_batches)

    def __str__(self) -> str:
        words = f"pp={self.pp} dp={self.dp} micro_batches={self.micro_batches}"
        if self.zero:
            words += f" zero={self.zero}"
        return words


@dataclass(frozen=True)
class Decision:
    """A planner's decision: the config, the cuts, the blocks that keep less, each rank's devices.

    A pipeline has one stage more than cuts. Each of its pp ranks holds equally many stages, or some
    ranks take turns at one.

    Args:
        cuts: numbers of units, ascending: cuts[s] is the first unit of stage s + 1, so that stage s
            has the units [cuts[s - 1], cuts[s]).
        recompute: for each stage the blocks that run again, whole or in part, ascending.
        groups: for each of the pp ranks the number of its group of `dp` devices
            (`Machine.groups`); empty: rank r has group r.
        offload: for each stage the blocks that offload, ascending.
    """

    config: Config
    cuts: tuple[int, ...]
    recompute: tuple[tuple[Again, ...], ...] = ()
    groups: tuple[int, ...] = ()
    offload: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        """The number of stages of a pipeline, on all its ranks together."""
        return len(self.cuts) + 1
