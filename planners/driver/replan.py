"""A plan made again, for the devices that are left of those it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autopipe.cluster.cluster import left_of
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.planners.driver.make_plan import plan
from autopipe.util.progress import Say


def replan(old: Plan, file: ModelFile, nodes: Sequence[int], source: str, say: Say) -> Plan:
    """The best plan of the same step on fewer devices, or more: rows and precision stay.

    Rates are those in the old plan: nothing is measured, and every process finds the same.

    Args:
        nodes: how many devices each node has now.
        source: where the model comes from, for the plan to remember.

    Raises:
        InfeasibleError: no plan fits them, all of them used.
    """
    plan_again = partial(
        plan,
        file.model,
        file.inputs,
        loss=file.loss,
        optimizer=file.optimizer_for(old),
        cluster=left_of(old.cluster, nodes),
        batch_size=old.batch.rows,
        precision=old.precision,
        grad_dtype=old.grad_dtype,
        optimizer_dtype=old.optimizer_dtype,
        compile=old.compiled,
        fuse_attention=old.fused_attention,
        loss_over=old.loss_over,
        lengths=old.lengths,
        source=source,
        say=say,
    )
    replanned = plan_again()
    if len(replanned.mesh.places) == sum(nodes):
        return replanned
    # Every process that was started is a rank; a pipeline asks for nothing to divide by them.
    return plan_again(pp=sum(nodes), dp=1, tp=1)
