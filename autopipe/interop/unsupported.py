"""List the decisions of a plan that another runtime cannot express.

A runtime is described by a `Vocabulary`. Each decision of a plan that it does not cover becomes a
sentence with the plan's own figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.interop.exported import printable
from autopipe.interop.layers import Layers
from autopipe.interop.precisions import FP32, unlike
from autopipe.interop.recomputed import ops_again, recomputes_all, selected
from autopipe.planfile import predict
from autopipe.planfile.again import folded, offloaded
from autopipe.planfile.contents import BATCH, MICRO_BATCH, Plan
from autopipe.util.numbers import count

NONE, ALL, BLOCKS = "none", "all", "blocks"
"""Which blocks a runtime can recompute: no, all, or those that are named."""


@dataclass(frozen=True)
class Vocabulary:
    """The decisions that a runtime can express; flags say whether it can.

    Attributes:
        name: the name of the runtime.
        pipeline: a number of stages.
        uneven: stages with different numbers of layers.
        modules: the modules of a stage, by name.
        inside: cuts within a layer.
        tied: a weight that several stages have.
        schedules: the schedules, by autopipe's names; None: any that can be written down.
        zero: the ZeRO stages.
        recompute: `NONE`, `ALL` or `BLOCKS`.
        selective: parts of all layers that run again, by Megatron-LM's names.
        tensors: the tensors that are sharded over tensor-parallel ranks.
        devices: pipeline ranks on devices of different kinds.
        precisions: the plan's precisions that it has.
        gradients: the dtypes in which it sums gradients.
        optimizer: the dtypes that its optimizer changes; fp32: parameters, or their masters.
        own_model: whether it runs the user's own model, and not a similar model of its own.
    """

    name: str
    pipeline: bool = True
    uneven: bool = False
    modules: bool = False
    inside: bool = False
    tied: bool = False
    schedules: frozenset[str] | None = frozenset()
    zero: frozenset[int] = frozenset({0})
    recompute: str = ALL
    selective: bool = False
    tensors: bool = False
    devices: bool = False
    precisions: frozenset[str] = FP32
    gradients: frozenset[str] = FP32
    optimizer: frozenset[str] = FP32
    own_model: bool = False


def unsupported(plan: Plan, words: Vocabulary, layers: Layers) -> tuple[str, ...]:
    """A sentence for each decision of `plan` that `words` cannot express."""
    return tuple(map(printable, _sentences(plan, words, layers)))


def _sentences(plan: Plan, words: Vocabulary, layers: Layers) -> Iterator[str]:
    mesh, name = plan.mesh, words.name
    if not words.own_model:
        yield (
            f"the model: this says how it is split; {name} brings the code of a model that has "
            "the same layers"
        )
    if mesh.pp > 1:
        yield from _pipeline(plan, words, layers)
    if plan.zero not in words.zero and mesh.dp > 1:
        yield f"ZeRO-{plan.zero} over {mesh.dp} replicas; it has {_listed(words.zero)}"
    yield from _recomputed(plan, words, layers)
    if away := offloaded(plan):
        of = _of_layers(len(away), layers)
        yield f"offload to the host's memory of what backward needs of {of}: {folded(away)}"
    yield from unlike(plan, words.precisions, words.gradients, words.optimizer)
    if plan.loss_parts:
        yield f"a loss in {plan.loss_parts} parts of the vocabulary, whose logits are never whole"
    if mesh.tp > 1 and not words.tensors:
        yield (
            f"which tensors lie over the {mesh.tp} tensor-parallel ranks: its own rules say so, "
            "not the plan"
        )
    kinds = [*dict.fromkeys(kind for rank in kinds_of_ranks(plan) for kind in rank)]
    if len(kinds) > 1 and not words.devices:
        yield f"devices of unlike kinds ({', '.join(kinds)}), to which ranks are bound"
    if plan.loss_over == MICRO_BATCH:
        yield "a loss that is a mean over each micro-batch by itself"
    if plan.loss_over == BATCH:
        yield "a loss over the whole batch, which takes two passes"


def _pipeline(plan: Plan, words: Vocabulary, layers: Layers) -> Iterator[str]:
    """The sentences about stages and their order."""
    pp = plan.mesh.pp
    if not words.pipeline:
        yield f"pipeline parallelism: {count(len(plan.stages), 'stage')} on {pp} ranks"
        return
    if not words.modules:
        if not layers.total:
            yield "the cuts: this model has no repeated blocks, and it cuts between layers"
        elif not layers.even and not words.uneven:
            yield f"stages of {list(layers.counts)} layers: it gives each as many"
    for layer in () if words.inside else layers.cut:
        parts = [i for i, stage in enumerate(plan.stages) if _has(stage.parameters, layer)]
        owner = next(i for i, own in enumerate(layers.stages) if layer in own)
        yield (
            f"a cut inside layer {layer}, between stages {' and '.join(map(str, parts))}: "
            f"the whole layer goes to stage {owner}"
        )
    held = Counter(name for stage in plan.stages for name in {*stage.parameters})
    own = [name for name in held if "." not in name]
    if own and words.modules and not words.own_model:
        yield f"which stage has {', '.join(own)}, of the model itself: it deals out modules"
    several = [name for name, stages in held.items() if stages > 1]
    if several and not words.tied:
        yield f"weights that several stages have and that stay equal: {', '.join(several)}"
    if words.schedules is not None and plan.schedule not in words.schedules:
        yield f"the schedule {plan.schedule}; it has {_listed(words.schedules)}"
    depths = [boundary.depth for boundary in plan.boundaries]
    if any(depths) and words.schedules is not None:
        yield f"depths of {depths}, micro-batches in flight beyond 1f1b's at each boundary"


def _has(parameters: tuple[str, ...], layer: str) -> bool:
    return any(name.startswith(f"{layer}.") for name in parameters)


def _recomputed(plan: Plan, words: Vocabulary, layers: Layers) -> Iterator[str]:
    """The sentences about recomputation."""
    left = selected(plan, layers).left if words.selective else map(str, ops_again(plan))
    for ops in left:
        yield f"recomputation of {ops}, of which the rest is kept"
    again = {block for stage in plan.stages for block in stage.blocks_again}
    if not again or words.recompute == BLOCKS:
        return
    every = recomputes_all(plan, layers)
    if words.recompute == NONE or not every:
        most = "" if words.recompute == NONE else ": it is all layers or none, and here it is none"
        yield f"recomputation of {_of_layers(len(again), layers)}{most}"


def _of_layers(blocks: int, layers: Layers) -> str:
    """`8 of 32 layers`; `8 blocks` of a model whose layers are not known."""
    return f"{blocks} of {layers.total} layers" if layers.total else count(blocks, "block")


def kinds_of_ranks(plan: Plan) -> list[list[str]]:
    """For each rank of a pipeline the kinds of its devices, in all replicas and tensor parts."""
    row = plan.cluster.row
    found: list[dict[str, None]] = [{} for _ in range(plan.mesh.pp)]
    for place, number in zip(plan.mesh.places, predict.devices(plan), strict=True):
        found[place.pp][row[number].kind] = None
    return [[*kinds] for kinds in found]


def _listed(found: frozenset[str] | frozenset[int]) -> str:
    every = sorted(f"ZeRO-{each}" if isinstance(each, int) else each for each in found)
    return ", ".join(every) if every else "none of that kind"
