"""A plan's schedule for torch.distributed.pipelining: a row a rank, a cell an instruction.

    0F0,0F1,0B0,0B1          stage 0: F forward, B backward; I and W are its two halves
    1F0,1B0,1F1,1B1

torch puts the transfers in. (torch 2.13, _PipelineScheduleRuntime._load_csv, compute_only.)
"""

from __future__ import annotations

from autopipe.interop.exported import Exported
from autopipe.interop.layers import layers_of
from autopipe.interop.precisions import EVERY, KEPT
from autopipe.interop.unsupported import BLOCKS, Vocabulary, unsupported
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan

WORDS = Vocabulary(
    "a schedule of torch.distributed.pipelining",
    modules=True,
    inside=True,
    schedules=None,
    zero=frozenset({0, 1, 3}),
    recompute=BLOCKS,
    tensors=True,
    devices=True,
    precisions=EVERY,
    gradients=KEPT,
    optimizer=KEPT,
    own_model=True,
)


def schedule(plan: Plan) -> Exported:
    """The schedule's CSV, and what stands outside of it."""
    rows = [",".join(map(str, program)) for program in programs.compute(plan)]
    mesh, sends = plan.mesh, {sent.peer - i for i, s in enumerate(plan.stages) for sent in s.sends}
    missing = [
        *unsupported(plan, WORDS, layers_of(plan)),
        f"anything but the order of a step: the cuts of {len(plan.stages)} stages, dp={mesh.dp} "
        f"and tp={mesh.tp} are the code's",
    ]
    if sends - {1}:
        missing.append("tensors that skip a stage: torch sends to the next stage alone")
    return Exported("\n".join(rows) + "\n", tuple(missing))
