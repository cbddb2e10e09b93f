"""What Megatron-LM's layers do not wait for in backward, and autopipe's do.

Tensor-parallel ranks exchange the inputs of a column-parallel layer, of which a transformer's layer
has two, twice in backward, while they multiply:

    sequence parallelism    gather the input once more    beside the product for its gradient
                            scatter its gradient          beside the product for the weight's
    without                 sum its gradient              beside the product for the weight's

(`megatron/core/tensor_parallel/layers.py`, LinearWithGradAccumulationAndAsyncCommunication;
Korthikanti et al., 2022, section 4.2.2.) Computing loses `efficiency.BESIDE` of these seconds.

The product for a weight's gradient adds it to the sum over micro-batches
(`gradient_accumulation_fusion`, apex's `fused_weight_gradient_mlp_cuda`): the pass that does so
here, two reads and a write, is not there.
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.efficiency import BESIDE
from autopipe.ir.op_seconds import ADDING
from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import StagePlan
from autopipe.planfile.placements import ALL_REDUCE, REDUCE_SCATTER
from autopipe.planners.costs.tp_degrees import move_seconds
from benchmarks.published.rows import Run

COLUMNS = 2
"""Column-parallel layers of a transformer's layer: queries, keys and values; the first of the
feed-forward part."""


def without_waits(run: Run, cluster: Cluster, plan: Plan) -> Plan:
    """The plan, its backwards as much shorter as they are in Megatron-LM, and its step with them;
    the plan itself, if the run's software does nothing of this.

    Args:
        cluster: on which it ran.
    """
    seconds = _hidden(run, cluster) + _added(run, cluster)
    if not seconds:
        return plan

    def quicker(stage: StagePlan) -> StagePlan:
        found = stage.predicted
        backward = found.backward_seconds - seconds * _layers(stage)
        return replace(stage, predicted=replace(found, backward_seconds=max(0.0, backward)))

    return predict.with_prediction(replace(plan, stages=tuple(map(quicker, plan.stages))))


def _hidden(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer's exchanges that run beside its products."""
    if run.tp == 1 or not run.software.asynchronous:
        return 0.0
    size = 2 * run.micro_batch * run.model.seq * run.model.hidden
    times, move = (2, REDUCE_SCATTER) if run.sequence_parallel else (1, ALL_REDUCE)
    return COLUMNS * times * (1 - BESIDE) * move_seconds(move, size, cluster.within, run.tp)


def _added(run: Run, cluster: Cluster) -> float:
    """Seconds of adding up the gradients of a layer's weights."""
    if not run.software.adds:
        return 0.0
    gradients = (2 if run.low_gradients else 4) * run.model.layer_parameters / run.tp
    return ADDING * gradients / cluster.copying


def _layers(stage: StagePlan) -> int:
    """The layers of a stage."""
    names = (name.split(".") for name in stage.parameters)
    return len({parts[1] for parts in names if parts[0] == "layers"})
