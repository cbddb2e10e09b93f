"""The planner's problem: what a model costs, cut into units, with nothing of torch left in it.

The graph's nodes are grouped into *units*, the finest pieces between cuts that are allowed. A stage
is a range of units [i, j); a candidate is a mesh, a number of micro-batches and the cuts.

    units      0    1    2    3    4    5
             |----|----|----|----|----|----|
    cuts          ^         ^                    cuts (1, 3): stages [0,1) [1,3) [3,6)

Everything a stage pays is a sum over its range of what is here: seconds per unit, bytes that a
range pays for once however many of its units use them (`Shared`), storages kept from forward to
backward (`Saved`), and tensors that cross a cut (`Crossing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.schedule import Programs


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
    """

    bytes: int
    producer: int | None
    savers: tuple[int, ...]


@dataclass(frozen=True)
class Crossing:
    """A tensor of `bytes` made in unit `producer`, used in later units `consumers` (ascending).

    Sent to each later stage with a consumer; with `gradient`, one of the same size comes back.
    """

    bytes: int
    producer: int
    consumers: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True)
class Profile:
    """What one micro-batch of `rows` rows costs on one device, by unit.

    `forward` and `backward` are seconds per unit, as many as the problem has units.
    """

    rows: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved: tuple[Saved, ...]
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class Constraints:
    """What the user has fixed; None leaves it to the planner.

    `chunks` are the stages on each rank under the schedule interleaved; `window` and `depth` hold
    at every boundary: receives posted ahead, and the micro-batches in flight besides. `programs` is
    a schedule that the user has written: `schedule` is then `WRITTEN`, and pp and micro_batches are
    those it is for.
    """

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    memory: int | None = None
    chunks: int | None = None
    window: int | None = None
    depth: int | None = None
    programs: Programs = ()


WRITTEN = "written"
"""The name of a schedule from a file."""


@dataclass(frozen=True)
class Problem:
    """All that a planner may look at.

    Args:
        units: how many units the model has.
        blocks: ranges [first, last) of units, one per repeated block, in order; may be empty.
        parameters: trainable parameters; each also has a gradient and optimizer state.
        constants: frozen parameters and buffers.
        optimizer_factor: bytes of optimizer state per byte of trainable parameter.
        profiles: one per micro-batch size worth considering, `rows` ascending.
        batch: rows of the whole batch.
        devices: for how many pp * dp there are devices; all are taken for equal to the weakest.
        memory: bytes of the smallest device, or the user's lower limit.
        latency: seconds before the first byte between two devices.
        bandwidth: bytes a second between two devices, one direction.
        window: receives posted ahead per boundary.
        constraints: what the user has fixed.
        zero: the ZeRO stage.
        tp: the tensor-parallel degree that the profiles are for.
    """

    units: int
    blocks: tuple[tuple[int, int], ...]
    parameters: tuple[Shared, ...]
    constants: tuple[Shared, ...]
    optimizer_factor: float
    profiles: tuple[Profile, ...]
    batch: int
    devices: int
    memory: int
    latency: float
    bandwidth: float
    window: int
    constraints: Constraints
    zero: int = 0
    tp: int = 1


@dataclass(frozen=True)
class Decision:
    """A planner's answer: the mesh, the micro-batches, the schedule and the cuts between units.

    A pipeline has one stage more than cuts; each of its pp ranks holds equally many.
    """

    pp: int
    dp: int
    micro_batches: int
    schedule: str
    cuts: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages a pipeline has, on all its ranks together."""
        return len(self.cuts) + 1
