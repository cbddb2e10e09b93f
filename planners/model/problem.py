"""The planner's problem: what a model costs, cut into units, with nothing of torch left in it.

The graph's nodes are grouped into *units*, the finest pieces between cuts that are allowed. A stage
is a range of units [i, j); a candidate is a mesh, a number of micro-batches and the cuts.

    units      0    1    2    3    4    5
             |----|----|----|----|----|----|
    cuts          ^         ^                    cuts (1, 3): stages [0,1) [1,3) [3,6)

Everything a stage pays is a sum over its range of what is here: seconds per unit, bytes that a
range pays for once however many of its units use them (`Shared`), storages kept from forward to
backward (`Saved`), and tensors that cross a cut (`Crossing`). A block may be recomputed in
backward: then it takes its forward's seconds once more, and keeps none of what only itself would
keep. Or some of its ops are: that is a `BlockLevel`, which is chosen for a block that a stage has
whole. Where the user has chosen it, the parts of a block that a cut divides have its seconds too,
and are taken to save nothing.
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
    `block` is the number of the recomputable block that makes it and alone keeps it; if that one is
    recomputed, nobody keeps it.
    """

    bytes: int
    producer: int | None
    savers: tuple[int, ...]
    block: int | None = None


@dataclass(frozen=True)
class Crossing:
    """A tensor of `bytes` made in unit `producer`, used in later units `consumers` (ascending).

    Sent to each later stage with a consumer; with `gradient`, one of the same size comes back.
    `divides`: each tensor-parallel rank has it whole, and may send a part of it.
    """

    bytes: int
    producer: int
    consumers: tuple[int, ...]
    gradient: bool
    divides: bool = False


Seconds = tuple[float, ...]


class BlockLevel(NamedTuple):
    """A block's way to keep less of a micro-batch, of which some ops run again in backward.

    Args:
        dropped: bytes that it does not keep.
        seconds: of each kind of device, what running the ops again takes in each of its units.
    """

    dropped: int
    seconds: tuple[Seconds, ...]


@dataclass(frozen=True)
class Profile:
    """What one micro-batch of `rows` rows costs, by unit.

    Args:
        forward, backward: of each kind of device the seconds of each unit.
        recompute: of each recomputable block of the problem and each kind of device, the seconds
            that recomputing takes in each of the block's units.
        exchange: of each kind the seconds of each unit, of `forward` and `backward` together, in
            which tensor-parallel ranks exchange something; none at all if there are none.
        levels: of each recomputable block its levels between keeping all and running again whole;
            empty: there are none. Equally many in every profile.
        made: of each unit the bytes that its backward makes, at its fullest moment, where stages
            are compiled; empty: they are not counted.
        passing: of each unit the bytes that a loss has for a moment; empty: none has.
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
    passing: tuple[int, ...] = ()


WHOLE: Final = -1
"""The number of the level at which all of a block runs again."""


class Again(NamedTuple):
    """A recomputable block of the problem, by its number, and the level that it runs again at."""

    block: int
    level: int = WHOLE


@dataclass(frozen=True)
class Constraints:
    """What the user has fixed; None leaves it to the planner.

    `micro_batch_size` are the rows of a micro-batch, from which their number follows in each mesh.
    `chunks` are the stages on each rank under the schedule interleaved; `window` and `depth` hold
    at every boundary: receives posted ahead, and the micro-batches in flight besides. `recompute`
    are recomputable blocks of the problem: those, and no others, run again, at these levels.
    `offload` are the numbers of those that offload what they keep, and no others.
    `transfers` is one of `planfile.parts.TRANSFERS`: how tensors that divide go to later stages.
    `turns` are the ranks that take turns at each stage; of no number: each stage has one.
    `programs` is a schedule that the user has written: `schedule` is then `WRITTEN`, and pp and
    micro_batches are those it is for.
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


EAGER = "eager-1f1b"
"""The name of the schedule that takes a depth for each boundary."""

WRITTEN = "written"
"""The name of a schedule from a file."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything a planner may read. Compared and hashed by identity.

    Args:
        units: how many units the model has.
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
        copies: what forward reads of those `parameters` that are fp32 masters, in 16 bits: half as
            large. Under ZeRO-3 they are there only while they are gathered.
        frozen: parameters that are not trained; ZeRO-3 shards and gathers them too.
        largest: of each unit the bytes of the largest gradient that it makes, beside the sum that
            it is added to; empty where that is not counted.
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
        """That of micro-batches of so many rows; there is one."""
        return next(profile for profile in self.profiles if profile.rows == rows)

    def seen_beyond(self, config: Config) -> int:
        """Bytes of each device that plans of such a config may not use: see `beyond`."""
        return self.beyond.get((config.schedule, config.zero), 0)


def splits(problem: Problem, schedule: str) -> bool:
    """Whether a schedule has backward in halves; what is split cannot be recomputed."""
    programs = problem.constraints.programs
    return halved(programs) if programs else named(schedule).splits


FEWEST_CHUNKS = 2
"""With one stage on each rank the schedule interleaved is 1f1b."""


class Config(NamedTuple):
    """A candidate before its cuts: a mesh, the number of micro-batches, and how they run.

    `pp` are the pipeline's ranks and `dp` its replicas; `zero` is the ZeRO stage. `depth` are the
    additional micro-batches in flight at every boundary, which eager-1f1b alone has. `chunks` are
    the stages on each rank, of a schedule that leaves their number open: interleaved. `turns` are
    the ranks that take turns at each stage (`planfile.turns`), pp in all; nothing: one each.
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
        """Rows of one micro-batch, of a whole batch of so many rows."""
        return batch // (self.dp * self.micro_batches)

    def __str__(self) -> str:
        words = f"pp={self.pp} dp={self.dp} micro_batches={self.micro_batches}"
        if self.zero:
            words += f" zero={self.zero}"
        return words


@dataclass(frozen=True)
class Decision:
    """A planner's answer: the config, the cuts, what is recomputed, and whose devices are whose.

    A pipeline has one stage more than cuts; each of its pp ranks holds equally many, or some take
    turns at one.

    Args:
        cuts: numbers of units, ascending: cuts[s] is the first unit of stage s + 1, so that stage s
            has the units [cuts[s - 1], cuts[s]).
        recompute: of each stage the blocks of which something runs again, ascending.
        groups: of each of the pp ranks the number of its group of `dp` devices
            (`Machine.groups`); empty: they stand in that order.
        offload: of each stage the blocks that offload what they keep, ascending.
    """

    config: Config
    cuts: tuple[int, ...]
    recompute: tuple[tuple[Again, ...], ...] = ()
    groups: tuple[int, ...] = ()
    offload: tuple[tuple[int, ...], ...] = ()

    @property
    def stages(self) -> int:
        """How many stages a pipeline has, on all its ranks together."""
        return len(self.cuts) + 1
