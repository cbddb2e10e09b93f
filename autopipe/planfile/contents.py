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

import codecs
import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopipe.cluster import checks
from autopipe.cluster.cluster import Cluster
from autopipe.errors import PlanError
from autopipe.planfile import consistency, turns
from autopipe.planfile.consistency import Refuse
from autopipe.planfile.parts import (
    Batch,
    BlockClass,
    Boundary,
    Collective,
    InputSpec,
    Mesh,
    PlannerNote,
    Prediction,
    Read,
    StagePlan,
    WrittenPlacement,
)
from autopipe.planfile.regions import Region
from autopipe.planfile.work import Work
from autopipe.util import codec

FORMAT = 3
"""The version of the file format; raised when a field changes its meaning."""

ROWS, MICRO_BATCH, BATCH = "rows", "micro-batch", "batch"
LOSS_OVER = (ROWS, MICRO_BATCH, BATCH)
"""What a step's loss is over: a mean over all rows of the batch, however they are cut; the mean of
its micro-batches' losses, which may be anything; or whatever the loss makes of the whole batch, in
two passes (`stages.whole_loss`)."""


@dataclass(frozen=True)
class Plan:
    """A decision about how to split one model over one cluster; see the module's picture.

    A pipeline of `mesh.pp` ranks holds `len(stages)` stages, each rank equally many: more than one
    under the schedules interleaved and zb-v. A stage at which ranks take turns stands once for each
    of them (`planfile.turns`). `programs` are the lines of a schedule that the user has written,
    `rank 0: 0F0 0F1 ...`; empty for a named schedule. `states` and `collectives` are those outside
    of blocks. `products` are the dtypes of the model's own matrix products, as keys of a device's
    `flops`; "fp32" if the model names none. `compiled`: stages run through torch.compile, and keep
    for backward what `joint.run_again` chooses. `loss_over` is one of `LOSS_OVER`. `loss`: whether
    there is a loss function beside the model (null: unknown). `loss_parts`: the number of parts of
    the vocabulary from which the loss is computed; 0: all at once, as in the model.
    `fused_attention`: each attention that the model writes out is one op. `loss_seconds`: seconds
    of a loss over the whole batch, between the two passes of a step. `lengths`: the lengths of rows
    that were asked for, in tokens, ascending, the last one that of `inputs`; if empty, rows may
    still be shorter. `regions` run as the user wrote them. `rows_fixed`: the graph is only for
    micro-batches of the planned number of rows. `asks_for_one_row`: the user's lines by which a
    micro-batch of one row would have another graph, and is refused. For the precisions bf16 and
    fp16, `grad_dtype` is the dtype in which gradients are summed, and `optimizer_dtype` that of
    what the optimizer changes: fp32 master weights, or parameters of 16 bits; `low_buffers` are the
    fp32 buffers that forward reads in 16 bits, since they meet activations. `work`: what a step
    computes; null if unknown, or if there is no matrix product. `made` has a short hash of each
    part as the planner left it, by which `edited` finds later changes.
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
    states: tuple[WrittenPlacement, ...] = ()
    collectives: tuple[Collective, ...] = ()
    products: tuple[str, ...] = ("fp32",)
    compiled: bool = False
    loss_over: str = ROWS
    loss: bool | None = None
    work: Work | None = None
    loss_parts: int = 0
    fused_attention: bool = False
    loss_seconds: float = 0.0
    lengths: tuple[int, ...] = ()
    grad_dtype: str = "fp32"
    optimizer_dtype: str = "fp32"
    low_buffers: tuple[str, ...] = ()
    regions: tuple[Region, ...] = ()
    rows_fixed: bool = False
    asks_for_one_row: tuple[str, ...] = ()
    made: dict[str, str] = field(default_factory=dict)

    @property
    def edited(self) -> tuple[str, ...]:
        """Paths of the parts that were changed by hand: the prediction is of the plan before."""
        texts = _texts(self) if self.made else {}
        # A part that this version's planner marks and an older one's did not is left alone.
        return tuple(
            path
            for path, text in texts.items()
            if path in self.made and self.made[path] not in _marks(text)
        )

    @property
    def traced_rows(self) -> int:
        """Rows of the batch on which the model is traced: two stand for any number of rows."""
        return self.batch.microbatch_rows(self.mesh.dp) if self.rows_fixed else 2

    @property
    def once(self) -> tuple[StagePlan, ...]:
        """The stages, each once, also if ranks take turns at it."""
        return turns.each_once(self.stages)

    @property
    def turns(self) -> tuple[int, ...]:
        """For each stage the number of ranks that take turns at it; empty: one each."""
        return turns.of_each(self.stages)

    @property
    def zero(self) -> int:
        """The ZeRO stage, one of `ZERO`: one for all stages of the pipeline."""
        return self.stages[0].zero

    @property
    def forwards(self) -> int:
        """How often a step runs each micro-batch forward, recomputation aside."""
        return 2 if self.loss_over == BATCH else 1

    @property
    def deals(self) -> bool:
        """Whether ZeRO-1 shards optimizer state, over replicas and ranks that take turns."""
        return self.zero == 1 and (self.mesh.dp > 1 or bool(self.turns))

    @property
    def zero_at_work(self) -> int:
        """The ZeRO stage; 0 where it has no ranks to shard over."""
        return self.zero if self.mesh.dp > 1 or self.deals else 0

    @property
    def scatters(self) -> bool:
        """Whether every backward scatters its gradients: ZeRO-2 and 3, with replicas."""
        return self.zero >= 2 and self.mesh.dp > 1

    @property
    def fully_sharded(self) -> bool:
        """Whether parameters are sharded too: ZeRO-3, with more than one replica."""
        return self.zero == 3 and self.mesh.dp > 1

    @property
    def parted(self) -> bool:
        """Whether a rank has parts of what is trained: stages, shards or rows."""
        return self.mesh.pp > 1 or self.mesh.tp > 1 or self.deals or self.scatters

    @property
    def gathered_share(self) -> float:
        """Bytes of parameters that ZeRO gathers, for each byte of their gradients.

        With fp32 masters it is half, since 16 bits are gathered; it is 1 if gradients are of 16
        bits too, unless each backward scatters them, which is done in fp32. (Parameters that a
        model keeps in fp32 beside masters are not counted separately.)
        """
        wide = self.grad_dtype == "fp32" or self.scatters
        return 0.5 if self.masters and wide else 1.0

    @property
    def scattered_share(self) -> float:
        """Bytes that ranks send in a sum of gradients, for each byte of a gradient."""
        low = self.masters and self.grad_dtype != "fp32"
        return 0.5 if low and self.scatters else 1.0

    @property
    def masters(self) -> bool:
        """Whether parameters of 16 bits have fp32 master weights."""
        return self.precision in ("bf16", "fp16") and self.optimizer_dtype == "fp32"

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
    """The plan with its marks (`made`), by which later changes by hand are found."""
    return replace(plan, made={path: _marks(text)[-1] for path, text in _texts(plan).items()})


def on_edits(plan: Plan) -> str | None:
    """The sentence for a plan that was changed by hand, if it was."""
    paths = [f"plan.{path}" for path in plan.edited]
    if not paths:
        return None
    *most, last = paths
    were = f"{', '.join(most)} and {last} were" if most else f"{last} was"
    return f"{were} changed by hand after planning: the predicted figures are of another plan"


_LATER = (', "part_of": null', ', "tied": 0', ', "hop": 0.0')
"""Fields that older planners did not write, as marks came to leave them out, one after the other:
with them their plans would seem to be changed."""


def _texts(plan: Plan) -> dict[str, str]:
    """Each part that the prediction depends on, and the prediction, as JSON by path."""
    data: Any = codec.to_json(plan)
    parts: dict[str, Any] = {
        f"{name}.{of}": data[name][of] for name in ("batch", "prediction") for of in data[name]
    }
    whole = "inputs cluster mesh precision compiled optimizer loss schedule programs loss_parts "
    whole += "fused_attention blocks states collectives grad_dtype optimizer_dtype loss_over "
    whole += "loss_seconds low_buffers"
    parts |= {name: data[name] for name in whole.split()}
    for name in ("boundaries", "stages"):
        for of in data[name][0] if data[name] else ():
            parts[f"{name}[].{of}"] = [entry[of] for entry in data[name]]
    return {path: json.dumps(part) for path, part in parts.items()}


def _marks(text: str) -> list[str]:
    """Short hashes of a text: of how planners of other ages wrote it, today's last."""
    marks = []
    for later in _LATER:
        text = text.replace(later, "")
        marks.append(hashlib.blake2b(text.encode(), digest_size=4).hexdigest())
    return marks


def check(plan: Plan) -> None:
    """Refuse a plan whose parts contradict each other, naming the path of the part.

    Raises:
        PlanError: as `Plan.load`.
    """
    mesh, stages = plan.mesh, plan.stages

    def refuse(path: str, asked: str, found: str) -> None:
        raise PlanError(f"plan.{path}: expected {asked}, found {found}")

    checks.check(plan.cluster, "plan.cluster")
    consistency.check_mesh(mesh, refuse)
    if not stages or len(stages) % mesh.pp:
        refuse("stages", f"equally many on each of {mesh.pp} ranks (mesh.pp)", str(len(stages)))
    consistency.check_boundaries(plan.boundaries, len(plan.once) - 1, refuse)
    consistency.check_devices(mesh, plan.cluster, refuse)
    if plan.loss_over not in LOSS_OVER:
        refuse("loss_over", f"one of {', '.join(LOSS_OVER)}", plan.loss_over)
    if list(plan.lengths) != sorted({*plan.lengths}) or min(plan.lengths, default=1) < 1:
        refuse("lengths", "numbers of tokens from 1 on, ascending", str(plan.lengths))
    if plan.loss_parts < 0:
        refuse("loss_parts", "at least 0", str(plan.loss_parts))
    if plan.batch.micro_batches < 1:
        refuse("batch.micro_batches", "at least 1", str(plan.batch.micro_batches))
    if plan.batch.rows < 1 or plan.batch.rows % (mesh.dp * plan.batch.micro_batches):
        refuse(
            "batch.rows",
            f"a multiple of dp * micro_batches = {mesh.dp * plan.batch.micro_batches}",
            str(plan.batch.rows),
        )
    turns.check(stages, plan.schedule, plan.batch.micro_batches, refuse)
    if plan.turns and plan.loss_over == BATCH:
        asked = f"{ROWS} or {MICRO_BATCH}, as ranks take turns at a stage"
        refuse("loss_over", asked, plan.loss_over)
    consistency.check_stages(stages, refuse)
    consistency.check_transfers(stages, refuse)
    _check_work(plan, refuse)


def _check_work(plan: Plan, refuse: Refuse) -> None:
    """Check that each pipeline rank has a peak, that figures are finite and not negative, and that
    shares and limits are some."""
    work, pp = plan.work, plan.mesh.pp
    consistency.check_figures({"loss_seconds": plan.loss_seconds}, "", refuse)
    consistency.check_figures({"step_seconds": plan.prediction.step_seconds}, "prediction.", refuse)
    if not -1e-6 <= plan.prediction.bubble <= 1:  # but for rounding
        refuse("prediction.bubble", "a share of the step, from 0 to 1", str(plan.prediction.bubble))
    if min(plan.planner.limits, default=1) < 1:
        refuse("planner.limits", "bytes from 1 on", str(plan.planner.limits))
    if work is None:
        return
    if len(work.peaks) != pp or min(work.peaks) <= 0:
        refuse("work.peaks", f"{pp} rates above 0, one for each rank of mesh.pp", str(work.peaks))
    peaks = {f"peaks[{rank}]": peak for rank, peak in enumerate(work.peaks)}
    consistency.check_figures({**vars(work), "measured": None, **peaks}, "work.", refuse)


def names_module(source: str) -> bool:
    """Whether a model's source is `package.module:factory` or `hf:FOLDER`, and not a file's path,
    in which the name of a folder may have a colon too: `2026-11-30T14:30/model.py`."""
    return ":" in source and not source.endswith((".py", ".onnx"))


def names_plan(what: str) -> bool:
    """Whether a word that may be a plan, a model or a schedule is a plan's path: `plan.json`, or a
    file of another name that begins as JSON does."""
    if (named := what.endswith(".json")) or not os.path.isfile(what):
        return named  # of a pipe nothing is read here: what is read is gone
    try:
        with open(what, "rb") as file:
            return file.read(100).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    except OSError:  # it may not be read
        return False


def stage_file(plan: Plan, stage: int, part: int) -> str:
    """The name of the file that `autopipe emit` writes for a stage, or for a part of one.

    Args:
        part: the tensor-parallel coordinate.
    """
    return f"stage_{stage}_tp{part}.py" if plan.mesh.tp > 1 else f"stage_{stage}.py"
