"""The plan: every decision about one training step, as plain data that comes back equal from disk.

    Plan
    +-- what it was made for    fingerprint, trail, versions, source, inputs, reads
    +-- where it runs           cluster, mesh (rank -> coordinate -> node and device)
    +-- how a step goes         batch, schedule (programs), boundaries (window, depth), precision,
    |                           optimizer, loss
    +-- what each stage does    stages: first and last node, parameters, what enters and leaves
    +-- how tensors lie         blocks, states: of all that is not replicated over tp ranks
    +-- why                     prediction (seconds, bytes), planner (bound, next best, what binds)

A plan names things (`first="transformer.h.4/layer_norm/0"`), never node numbers. Seconds and bytes
are the only units. `save` writes beside the file and renames, so a reader never meets half a plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopipe import cluster, codec
from autopipe.cluster import Cluster
from autopipe.errors import PlanError

FORMAT = 2
"""The version of the file format; raised when a field changes its meaning."""

ZERO = (0, 1, 3)
"""The ZeRO stages there are, by what they deal out; the least is preferred."""


ROWS, MICRO_BATCH = "rows", "micro-batch"
LOSS_OVER = (ROWS, MICRO_BATCH)
"""What a step's loss is a mean over: all rows of the batch, however they are cut, or the losses of
its micro-batches, which may be anything."""


@dataclass(frozen=True)
class InputSpec:
    """One leaf of the batch.

    `path` is the leaf's place in the batch tree: `input_ids`, `0`, `image.mask`. A tensor has a
    `shape` whose entries are integers or expressions in `b`, the rows of a micro-batch, and a
    `batch_dim` (None: every micro-batch gets the whole tensor). Integer tensors carry the bounds
    seen while tracing. A leaf that is no tensor has `dtype` "python" and its `value`.
    """

    path: str
    shape: tuple[int | str, ...]
    dtype: str
    batch_dim: int | None
    low: int | None = None
    high: int | None = None
    value: bool | int | float | str | None = None


@dataclass(frozen=True)
class Read:
    """A value that Python read from a tensor while tracing, so a branch the graph has taken.

    Every rank re-checks it on every micro-batch: a branch that stops being true is an error,
    never a wrong gradient. What nothing depends on, a number for a log, is not `checked`.
    """

    kind: str
    value: bool | int | float | str
    place: str
    checked: bool = True


@dataclass(frozen=True)
class Place:
    """Where a rank runs: rank = (pp * DP + dp) * TP + tp."""

    rank: int
    pp: int
    dp: int
    tp: int
    node: int
    local: int
    device: str


@dataclass(frozen=True)
class Mesh:
    """The degrees of pipeline, data and tensor parallelism and the rank at each coordinate."""

    pp: int
    dp: int
    tp: int
    places: tuple[Place, ...]

    def rank(self, pp: int, dp: int, tp: int = 0) -> int:
        """The rank at a coordinate."""
        return (pp * self.dp + dp) * self.tp + tp


@dataclass(frozen=True)
class Batch:
    """`rows` of the whole batch: each of dp shares goes through in `micro_batches` equal parts."""

    rows: int
    micro_batches: int


@dataclass(frozen=True)
class Boundary:
    """Between stage i and i + 1: receives posted ahead, and extra micro-batches in flight."""

    window: int
    depth: int


@dataclass(frozen=True)
class Transfer:
    """A tensor that enters or leaves a stage; `shape` is in `b`, the rows of a micro-batch."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    peer: int
    gradient: bool

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"{self.name} {self.dtype}[{shape}]{'' if self.gradient else ' without gradient'}"


@dataclass(frozen=True)
class Sharding:
    """How a parameter lies over the tensor-parallel ranks, or what a node makes: `S(0)`, `P`.

    Of a node `inputs` are the placements of the distinct tensors that it reads, in their order.
    `autopipe.placements` has the states. What is not named is replicated, `I`.
    """

    name: str
    state: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collective:
    """What tensor-parallel ranks exchange of one tensor, in every micro-batch.

    `forward` and `backward` are empty, or all-reduce, all-gather, reduce-scatter, all-to-all;
    `size` is in bytes of the whole tensor.
    """

    tensor: str
    forward: str
    backward: str
    size: int


@dataclass(frozen=True)
class BlockClass:
    """Blocks of one structure, by module path, and the tensor states they share.

    Names in `states` begin at the block: `mlp.up.weight`, `mlp.up/linear/0`. `collectives` are
    those of one block, the last.
    """

    name: str
    members: tuple[str, ...]
    states: tuple[Sharding, ...] = ()
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage, by what they are for, at the fullest moment of the device it is on.

    A device that holds several stages has the sum of theirs; what two of them share counts with the
    first. `parameters` are with copies in low precision and, under ZeRO-3, what is gathered.
    `activations` are those saved from forward to backward for all micro-batches in flight,
    received tensors included; `transfers` are the buffers of receives posted ahead and of sends
    under way. `passing` is what a backward makes beside all that: a gradient on its way into its
    sum, a bucket that is summed over ranks. A run that measures itself does not see it.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    transfers: int
    passing: int = 0

    @property
    def peak(self) -> int:
        """All of them."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.buffers
            + self.activations
            + self.transfers
            + self.passing
        )


@dataclass(frozen=True)
class StagePrediction:
    """Seconds of one micro-batch, and the stage's bytes when its device is fullest.

    Under ZeRO-3 a forward gathers the stage's parameters, and a backward does and scatters their
    gradients: the seconds are with that.
    """

    forward_seconds: float
    backward_seconds: float
    memory: Memory


@dataclass(frozen=True)
class StagePlan:
    """One stage: the nodes from `first` to `last` in the graph's order.

    `parameters` are under the model's own names; one that stands in two stages is tied, and its
    gradients are summed. `recompute` names the blocks whose activations are made again in backward.
    """

    first: str
    last: str
    nodes: int
    parameters: tuple[str, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    recompute: tuple[str, ...]
    zero: int
    predicted: StagePrediction


@dataclass(frozen=True)
class Prediction:
    """Of one step, by the longest path through its programs: its seconds, before the optimizer's,
    and the bubble, the share of them for which the mean rank does not compute."""

    step_seconds: float
    bubble: float


@dataclass(frozen=True)
class Alternative:
    """Another mesh that was considered, and what keeps it from being the plan."""

    pp: int
    dp: int
    tp: int
    micro_batches: int
    schedule: str
    step_seconds: float | None
    why: str
    zero: int = 0


def data_parallel(alternatives: Iterable[Alternative]) -> Alternative | None:
    """Data parallelism alone, on the most replicas, if it is among them."""
    alone = [other for other in alternatives if other.pp == other.tp == 1 < other.dp]
    return max(alone, key=lambda other: other.dp, default=None)


@dataclass(frozen=True)
class PlannerNote:
    """Who made the plan and why it is this one: the bound it meets, what binds, the next best mesh
    and `others` after it.

    `step_seconds` of this plan, `bound_seconds` that none goes below, and all other seconds here
    are by the estimate that planners search with. It is rougher than the plan's prediction, and the
    step that is predicted may take less. Where it takes visibly more, other meshes are written down
    too and the fastest is taken; those have the seconds of their longest paths, and say so.

    `limits` are the bytes that its user let devices hold at most, where that is less than the
    largest device has, each number once, ascending.
    """

    name: str
    step_seconds: float
    bound_seconds: float
    binding: str
    next_best: Alternative | None
    others: tuple[Alternative, ...] = ()
    limits: tuple[int, ...] = ()

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """All of them, the next best first."""
        return () if self.next_best is None else (self.next_best, *self.others)


@dataclass(frozen=True)
class Plan:
    """A decision about how to split one model over one cluster; see the module's picture.

    A pipeline of `mesh.pp` ranks holds `len(stages)` stages, each rank equally many: more than one
    under the schedules interleaved and zb-v. `programs` are the lines of a schedule that the user
    has written, `rank 0: 0F0 0F1 ...`; none for a schedule that has a name. `states` and
    `collectives` are those of what is in no block. `products` are the dtypes that the model itself
    multiplies matrices in, as keys of a device's `flops`; "fp32" where it says nothing. `loss_over`
    is one of `LOSS_OVER`. `loss` is whether there is a loss function beside the model (null: nobody
    has said). `made` has a few digits of each part as the planner has left it, by which `edited`
    finds what was changed since.
    """

    format: int
    versions: dict[str, str]
    source: str | None
    fingerprint: str
    trail: str
    inputs: tuple[InputSpec, ...]
    reads: tuple[Read, ...]
    cluster: Cluster
    mesh: Mesh
    batch: Batch
    precision: str
    optimizer: str
    schedule: str
    programs: tuple[str, ...]
    boundaries: tuple[Boundary, ...]
    blocks: tuple[BlockClass, ...]
    stages: tuple[StagePlan, ...]
    prediction: Prediction
    planner: PlannerNote
    states: tuple[Sharding, ...] = ()
    collectives: tuple[Collective, ...] = ()
    products: tuple[str, ...] = ("fp32",)
    loss_over: str = ROWS
    loss: bool | None = None
    made: dict[str, str] = field(default_factory=dict)

    @property
    def edited(self) -> tuple[str, ...]:
        """Paths of the parts that were changed by hand: what is predicted is not of this plan."""
        now = _marks(self) if self.made else {}
        return tuple(path for path, mark in now.items() if self.made.get(path) != mark)

    @property
    def zero(self) -> int:
        """The ZeRO stage, 0, 1 or 3: one for all stages of the pipeline."""
        return self.stages[0].zero

    @property
    def fully_sharded(self) -> bool:
        """Whether parameters are dealt out too: ZeRO-3 with replicas to deal them out to."""
        return self.zero == 3 and self.mesh.dp > 1

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON: beside `path`, then renamed. The same plan is the same bytes."""
        codec.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan back.

        Raises:
            PlanError: the file is missing, truncated, of another format version, has an unknown
                or missing field or one of the wrong type (`plan.stages[1].first: ...`), or its
                parts do not agree with each other.
        """
        plan = codec.load(cls, Path(path), root="plan", format=FORMAT)
        check(plan)
        return plan


def signed(plan: Plan) -> Plan:
    """A plan as its planner leaves it, which can tell later what was changed by hand."""
    return replace(plan, made=_marks(plan))


def on_edits(plan: Plan) -> str | None:
    """The sentence for a plan that was changed by hand, if it was."""
    paths = [f"plan.{path}" for path in plan.edited]
    if not paths:
        return None
    *most, last = paths
    were = f"{', '.join(most)} and {last} were" if most else f"{last} was"
    return f"{were} changed by hand after planning: the predicted figures are of another plan"


def _marks(plan: Plan) -> dict[str, str]:
    """A few digits of each part that the prediction stands on, and of itself, by its path."""
    data: Any = codec.to_json(plan)
    parts: dict[str, Any] = {
        f"{name}.{of}": data[name][of] for name in ("batch", "prediction") for of in data[name]
    }
    whole = ("inputs", "cluster", "mesh", "precision", "optimizer", "loss", "schedule", "programs")
    parts |= {name: data[name] for name in (*whole, "blocks", "states", "collectives")}
    for name in ("boundaries", "stages"):
        for of in data[name][0] if data[name] else ():
            parts[f"{name}[].{of}"] = [entry[of] for entry in data[name]]
    return {
        path: hashlib.blake2b(json.dumps(part).encode(), digest_size=4).hexdigest()
        for path, part in parts.items()
    }


def check(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other, naming the path of the part.

    Raises:
        PlanError: as `Plan.load`.
    """
    mesh, stages = plan.mesh, plan.stages
    world = mesh.pp * mesh.dp * mesh.tp

    def refuse(path: str, asked: str, found: str) -> None:
        raise PlanError(f"plan.{path}: expected {asked}, found {found}")

    cluster.check(plan.cluster, "plan.cluster")
    for name, degree in (("pp", mesh.pp), ("dp", mesh.dp), ("tp", mesh.tp)):
        if degree < 1:
            refuse(f"mesh.{name}", "a degree of at least 1", str(degree))
    if not stages or len(stages) % mesh.pp:
        refuse("stages", f"equally many on each of {mesh.pp} ranks (mesh.pp)", str(len(stages)))
    if len(plan.boundaries) != len(stages) - 1:
        refuse("boundaries", f"{len(stages) - 1}, one between stages", str(len(plan.boundaries)))
    if len(mesh.places) != world:
        refuse("mesh.places", f"{world} places (pp * dp * tp)", str(len(mesh.places)))
    for rank, place in enumerate(mesh.places):
        expected = mesh.rank(place.pp, place.dp, place.tp)
        if place.rank != rank or expected != rank:
            refuse(
                f"mesh.places[{rank}]",
                f"rank {rank} = (pp * {mesh.dp} + dp) * {mesh.tp} + tp",
                f"rank {place.rank} at pp={place.pp} dp={place.dp} tp={place.tp}",
            )
    _check_devices(plan, refuse)
    if plan.loss_over not in LOSS_OVER:
        refuse("loss_over", f"one of {', '.join(LOSS_OVER)}", plan.loss_over)
    if plan.batch.micro_batches < 1:
        refuse("batch.micro_batches", "at least 1", str(plan.batch.micro_batches))
    if plan.batch.rows < 1 or plan.batch.rows % (mesh.dp * plan.batch.micro_batches):
        refuse(
            "batch.rows",
            f"a multiple of dp * micro_batches = {mesh.dp * plan.batch.micro_batches}",
            str(plan.batch.rows),
        )
    for index, boundary in enumerate(plan.boundaries):
        if boundary.window < 1:
            refuse(f"boundaries[{index}].window", "at least 1", str(boundary.window))
        if boundary.depth < 0:
            refuse(f"boundaries[{index}].depth", "at least 0", str(boundary.depth))
    for index, stage in enumerate(stages):
        if stage.zero not in ZERO:
            refuse(f"stages[{index}].zero", f"one of {ZERO}", str(stage.zero))
        if stage.zero != plan.zero:
            refuse(f"stages[{index}].zero", f"{plan.zero}, as of stage 0", str(stage.zero))
        for part, figures in (("", stage.predicted), ("memory.", stage.predicted.memory)):
            for name, figure in vars(figures).items():
                if isinstance(figure, int | float) and figure < 0:
                    refuse(f"stages[{index}].predicted.{part}{name}", "at least 0", str(figure))
        for word in ("receives", "sends"):
            for slot, transfer in enumerate(getattr(stage, word)):
                low, high = (0, index) if word == "receives" else (index + 1, len(stages))
                if not low <= transfer.peer < high:
                    side = "an earlier" if word == "receives" else "a later"
                    refuse(
                        f"stages[{index}].{word}[{slot}].peer",
                        f"{side} stage",
                        str(transfer.peer),
                    )
    _check_transfers(plan, refuse)


def _check_transfers(plan: Plan, refuse: Callable[[str, str, str], None]) -> None:
    """What a stage receives is what the other one sends, and nothing is sent to nobody."""
    for word, other in (("sends", "receives"), ("receives", "sends")):
        for index, stage in enumerate(plan.stages):
            for slot, transfer in enumerate(getattr(stage, word)):
                theirs = [
                    t
                    for t in getattr(plan.stages[transfer.peer], other)
                    if t.name == transfer.name and t.peer == index
                ]
                if theirs != [replace(transfer, peer=index)]:
                    refuse(
                        f"stages[{index}].{word}[{slot}]",
                        f"what stages[{transfer.peer}].{other} has",
                        f"{transfer} here and {theirs[0] if theirs else 'nothing'} there",
                    )


def _check_devices(plan: Plan, refuse: Callable[[str, str, str], None]) -> None:
    """Every rank is on a device that the cluster has, and on one of its own."""
    sizes, taken = plan.cluster.devices_per_node, dict[tuple[int, int], int]()
    for rank, place in enumerate(plan.mesh.places):
        here = f"mesh.places[{rank}]"
        if not 0 <= place.node < len(sizes):
            refuse(f"{here}.node", f"one of {len(sizes)} nodes, from 0", str(place.node))
        if not 0 <= place.local < sizes[place.node]:
            found = str(place.local)
            refuse(f"{here}.local", f"one of the node's {sizes[place.node]} devices, from 0", found)
        other = taken.setdefault((place.node, place.local), rank)
        if other != rank:
            where = f"node {place.node}, device {place.local}"
            refuse(here, "a device of its own", f"{where}, which is rank {other}'s")


def stage_file(plan: Plan, stage: int, part: int) -> str:
    """The name of the file that `autopipe emit` writes for a stage, or for a part of one.

    Args:
        part: the tensor-parallel coordinate.
    """
    return f"stage_{stage}_tp{part}.py" if plan.mesh.tp > 1 else f"stage_{stage}.py"
