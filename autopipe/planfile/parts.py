"""The parts of a plan, each a frozen dataclass: one leaf of the batch, one stage, one transfer, ...

    InputSpec, Read                             what a batch is like, and what Python read from it
    Place, Mesh, Batch, Boundary                where a rank runs, how a step goes through stages
    PartOf, Transfer, StagePlan                 what a stage holds, receives and sends
    WrittenPlacement, Collective, BlockClass    how tensors lie over the ranks of tensor parallelism
    Memory, StagePrediction, Prediction, Alternative, PlannerNote    why it is this plan

Seconds and bytes are the only units. `planfile.contents` puts them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.planfile.work import Spent
from autopipe.util.numbers import VISIBLE, percent

BUCKET_BYTES = 25 * 2**20
"""How much goes in one sum of gradients: large enough for the link's bandwidth, small enough that
the copy it needs is small beside a model (the default of torch's DistributedDataParallel)."""


@dataclass(frozen=True)
class InputSpec:
    """One leaf of the batch.

    `path` is the leaf's place in the batch tree: `input_ids`, `0`, `image.mask`. A tensor has a
    `shape` whose entries are integers or expressions in `b`, the rows of a micro-batch, and a
    `batch_dim` (None: every micro-batch gets the whole tensor). Integer tensors carry the bounds
    seen while tracing. A leaf that is no tensor has `dtype` "python" and its `value`. `within` are
    its containers (`list`, `named x y`, a dataclass's `fields x y`), if `path` does not tell them.
    """

    path: str
    shape: tuple[int | str, ...]
    dtype: str
    batch_dim: int | None
    low: int | None = None
    high: int | None = None
    value: bool | int | float | str | None = None
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class Read:
    """A value that Python read from a tensor while tracing, so a branch the graph has taken.

    Every rank checks it again in every micro-batch: another value is an error, never a wrong
    gradient. A number on which nothing depends, for a log, is not `checked`.
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

    @property
    def processes_per_node(self) -> tuple[int, ...]:
        """Ranks on each node that has any, in the order of nodes: the order of launchers."""
        counts = Counter(place.node for place in self.places)
        return tuple(counts[node] for node in sorted(counts))

    def rank(self, pp: int, dp: int, tp: int = 0) -> int:
        """The rank at a coordinate."""
        return (pp * self.dp + dp) * self.tp + tp


@dataclass(frozen=True)
class Batch:
    """`rows` of the whole batch: each of dp shares goes through in `micro_batches` equal parts."""

    rows: int
    micro_batches: int

    def microbatch_rows(self, dp: int) -> int:
        """Rows of one micro-batch of one of `dp` replicas."""
        return self.rows // (dp * self.micro_batches)


@dataclass(frozen=True)
class Boundary:
    """Between stage i and i + 1: receives posted ahead, and extra micro-batches in flight."""

    window: int
    depth: int


WHOLE, IN_PARTS = "whole", "parts"
TRANSFERS = (WHOLE, IN_PARTS)
"""How a tensor that all tensor-parallel ranks have goes to a later stage: whole from each, or each
sends a part (`PartOf`)."""


@dataclass(frozen=True)
class PartOf:
    """A replicated tensor of which each of the tp ranks sends one of tp equal parts.

    Parts are along `dim`. The receivers gather them; the gradient comes back in parts too.
    """

    tensor: str
    dim: int


@dataclass(frozen=True)
class Transfer:
    """A tensor that enters or leaves a stage, as each tensor-parallel rank sends it.

    `shape` is in `b`, the rows of a micro-batch. `part_of` is the tensor of which this one is a
    part, if it goes in parts; null: each rank sends all that it has, of a replicated tensor all.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    peer: int
    gradient: bool
    part_of: PartOf | None = None

    @property
    def text(self) -> str:
        """`h.3/add/1 float32[b, 64]`; `h.3/add/1 in parts of dim 1, each float32[b, 32]`."""
        what = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        if self.part_of is None:
            return f"{self.name} {what}"
        return f"{self.part_of.tensor} in parts of dim {self.part_of.dim}, each {what}"

    def __str__(self) -> str:
        return f"{self.text}{'' if self.gradient else ' without gradient'}"


@dataclass(frozen=True)
class WrittenPlacement:
    """How a parameter or a node's result lies over the tensor-parallel ranks: `S(0)`, `P`.

    For a node `inputs` are the placements of the distinct tensors that it reads, in order.
    `planfile.placements` explains the words. Parameters and nodes not listed are replicated, `I`.
    """

    name: str
    state: str
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collective:
    """An exchange of one tensor between tensor-parallel ranks, in every micro-batch.

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
    those of the last block.
    """

    name: str
    members: tuple[str, ...]
    states: tuple[WrittenPlacement, ...] = ()
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Bytes of one stage, by what they are for, at the fullest moment of the device it is on.

    A device of several stages has their sum; a tensor that two of them share counts with the first.
    `parameters` are masters where there are any; `copies` are their 16-bit copies and, under
    ZeRO-3, gathered parameters. `activations` are saved for backward by all micro-batches in
    flight, received tensors included, and made in it by compiled stages; `transfers` are receives
    posted ahead and sends under way; `passing` are gradients just made, in buckets, of logits.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    transfers: int
    passing: int = 0
    copies: int = 0

    @property
    def peak(self) -> int:
        """The sum of all parts."""
        return sum(vars(self).values())

    @property
    def seen(self) -> int:
        """The sum of the parts that a run counts too: all but `passing`."""
        return self.peak - self.passing


@dataclass(frozen=True)
class StagePrediction:
    """Seconds of one micro-batch, and the stage's bytes when its device is fullest.

    Seconds include what ZeRO-3 gathers, and what ZeRO-2 and 3 scatter. `spent` has them by cause,
    or is null. `fullest` is the instruction at which the device holds these bytes, `0B3`; empty:
    unknown. `tied`: bytes of gradients that are summed with those of other pipeline ranks.
    """

    forward_seconds: float
    backward_seconds: float
    memory: Memory
    spent: Spent | None = None
    fullest: str = ""
    tied: int = 0


@dataclass(frozen=True)
class StagePlan:
    """One stage: the nodes from `first` to `last` in the graph's order.

    `parameters` are under the model's own names; one that is in two stages is tied, and its
    gradients are summed. `recompute` names the blocks that run a second time in backward and keep
    no results, and the single nodes of other blocks that do. `offload` names the blocks whose
    tensors for backward are kept in host memory. `turns`: the number of ranks of a pipeline that
    take turns at the stage; it stands in the list once for each (`planfile.turns`).
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
    offload: tuple[str, ...] = ()
    turns: int = 1

    @property
    def blocks_again(self) -> tuple[str, ...]:
        """The paths of the blocks that run a second time whole."""
        return tuple(name for name in self.recompute if "/" not in name)

    @property
    def ops_again(self) -> tuple[str, ...]:
        """The names of the nodes that run a second time, in blocks that do not."""
        return tuple(name for name in self.recompute if "/" in name)


@dataclass(frozen=True)
class Prediction:
    """One step, by the longest path through its programs: its seconds, without the optimizer's,
    and the bubble, the share of them for which the mean rank does not compute."""

    step_seconds: float
    bubble: float


@dataclass(frozen=True)
class Alternative:
    """Another mesh that was considered, and what keeps it from being the plan.

    `step_seconds` is null if no step is known: the mesh does not fit, or only a bound was computed.
    `slower`: by which share the step, or its bound, is longer than the plan's; null if the mesh
    does not fit. `cause`: what the seconds go to, or what is short.
    """

    pp: int
    dp: int
    tp: int
    micro_batches: int
    schedule: str
    step_seconds: float | None
    slower: float | None
    cause: str
    zero: int = 0

    @property
    def why(self) -> str:
        """`29 % slower, by the bubble`; `stage 0 needs 83.1 of 80.0 GiB`."""
        if self.slower is None:
            return self.cause
        if self.step_seconds is not None and self.slower <= VISIBLE:
            return "as fast; ties go to fewer stages, then to more replicas and fewer micro-batches"
        least = "at least " if self.step_seconds is None else ""
        return f"{least}{percent(self.slower)} slower, {self.cause}"


def data_parallel(alternatives: Iterable[Alternative]) -> Alternative | None:
    """Data parallelism alone, on the most replicas, if it is among them."""
    alone = [other for other in alternatives if other.pp == other.tp == 1 < other.dp]
    return max(alone, key=lambda other: other.dp, default=None)


@dataclass(frozen=True)
class PlannerNote:
    """Who made the plan and why it is this one: the bound it meets, what binds, the next best mesh
    and `others` after it.

    `step_seconds` of this plan, `bound_seconds` (no plan is faster) and all other seconds here are
    by the planners' estimate, which is rougher than the plan's prediction: the predicted step may
    be shorter. If it is visibly longer, plans of other meshes are made too and the fastest is
    taken; those have the seconds of their longest paths, and say so.

    `limits`: the user's on devices' bytes, each once; none, if none is below the largest memory.
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
        """All alternatives, the next best first."""
        return () if self.next_best is None else (self.next_best, *self.others)
