"""Write the stages of a planned model as ONNX files that run one after another.

    FOLDER/stage_0.onnx   tokens                                  -> tensors for the next stage
    FOLDER/stage_1.onnx   these tensors, and inputs of its own    -> the model's outputs
    FOLDER/chain.json     the names of the tensors that pass between stages

A stage is whole, whatever the tensor-parallel degree: onnxruntime has no collectives. It is in
evaluation mode, in the dtypes that the model was built with, and for one number of rows: the loss
is left out. The folder is written under a temporary name and renamed.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autopipe.batch.cut import two_rows
from autopipe.errors import AutopipeError
from autopipe.frontend.model_file import ModelFile
from autopipe.ir.blocks import find_blocks
from autopipe.ir.graph import READ_OP, Graph, Ref, resolve, shape_at
from autopipe.ir.partition import Stage
from autopipe.planfile.contents import Plan
from autopipe.runtime.checkpoint import trained
from autopipe.runtime.parameters.materialize import Origin, materialize
from autopipe.runtime.start import trace_planned
from autopipe.stages.bind import RankTrace, split_as_planned, split_for_evaluation
from autopipe.stages.lower import lower
from autopipe.tracing.source import bare, trace_source
from autopipe.tracing.traced import Trace
from autopipe.util import atomic_file
from autopipe.util.progress import phase


class OnnxStage(NamedTuple):
    """A stage as a module, with names and examples of its inputs, and names of its outputs."""

    module: fx.GraphModule
    takes: Mapping[str, Tensor]
    gives: Sequence[str]


def write_stages(
    file: ModelFile,
    plan: Plan,
    folder: Path,
    *,
    rows: int,
    weights: Path | None = None,
    seed: int = 0,
) -> None:
    """Write a folder of stages.

    Args:
        rows: of every input, from 1.
        weights: a checkpoint, as `parallelize` takes it; None: the model's own.
        seed: the seed of the initialisation, if there are no weights.

    Raises:
        AutopipeError: the folder exists already; onnxscript is not installed; the plan is for
            another model; or torch cannot export one of its ops.
    """
    if folder.exists():
        raise AutopipeError(f"{folder} is there already", hint="name a folder that is not")
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise AutopipeError(
            "torch exports to ONNX by onnxscript, which is not installed",
            hint="pip install 'autopipe[onnx]'",
        ) from error
    trace, stages = _cut(file, plan)
    origin = Origin(file.model, bare(file.model), weights or file.weights, seed, read=trained.read)
    chain: list[dict[str, Any]] = []
    with atomic_file.folder(folder) as partial, phase("writing stages", of=len(stages)) as done:
        for stage in stages:
            states = materialize(trace.graph, list(stage.states), origin)
            model = onnx_stage(trace, stage, states, rows, last=stage is stages[-1])
            name = f"stage_{stage.index}.onnx"
            _export(model, partial / name)
            chain.append({"file": name, "takes": list(model.takes), "gives": list(model.gives)})
            done()
        text = json.dumps({"rows": rows, "stages": chain}, indent=1) + "\n"
        (partial / "chain.json").write_text(text)


def _cut(file: ModelFile, plan: Plan) -> tuple[Trace, Sequence[Stage]]:
    """The model in evaluation mode with its own outputs, and its stages by the plan's cuts."""
    training = trace_planned(file.model, file.example_for(plan), file.loss, plan)
    split = split_as_planned(training.trace, plan)
    example = two_rows(training.example, plan.inputs)
    found = trace_source(file.model, example, plan.inputs, file.loss, training=False, outputs=True)
    stages = split_for_evaluation(RankTrace(found, find_blocks(found.graph)), split).once
    return found, stages


def onnx_stage(
    trace: Trace, stage: Stage, states: Mapping[str, Tensor], rows: int, *, last: bool
) -> OnnxStage:
    """A stage as a module that torch can export: without loss, reads and unused inputs."""
    graph = trace.graph
    lowered = lower(graph, stage, find_blocks(graph), states, None, rows, last=last)
    module = lowered.module
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _without_reads(part)
            _attention_in_order(part)
    gives = [str(ref) for ref in stage.outgoing]
    if last:  # an input and an output may both be called 0
        gives += [f"output.{path}" if path in graph.inputs else path for path in trace.outputs]
    output = next(iter(module.graph.find_nodes(op="output")))
    (results,) = output.args
    losses = len(results) - len(gives) if last else 0
    outgoing = len(stage.outgoing)
    output.args = ((*results[:outgoing], *results[outgoing + losses :]),)
    module.graph.eliminate_dead_code()
    takes: dict[str, Tensor] = {}
    values: list[Ref | str] = [*stage.incoming, *stage.inputs]
    for value, node in zip(values, module.graph.find_nodes(op="placeholder"), strict=True):
        if node.users:
            takes[str(value)] = _example(graph, value, rows)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return OnnxStage(module.eval(), takes, gives)


def _without_reads(module: fx.GraphModule) -> None:
    """Leave out the marks of values that Python read: nobody checks them here."""
    for node in module.graph.find_nodes(op="call_function", target=resolve(READ_OP)):
        module.graph.erase_node(node)
    module.recompile()


def _attention_in_order(module: fx.GraphModule) -> None:
    """Lay an attention's result out in memory as its dims are ordered.

    On a CPU it lies as [rows, tokens, heads, width], so that torch.export writes the reshape behind
    it as a view. torch's exporter to ONNX takes it for contiguous, and refuses that view.
    """
    attention = torch.ops.aten.scaled_dot_product_attention.default
    for node in module.graph.find_nodes(op="call_function", target=attention):
        with module.graph.inserting_after(node):
            ordered = module.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        for user in [*node.users]:
            if user is not ordered:
                user.replace_input_with(node, ordered)
    module.recompile()


def _example(graph: Graph, value: Ref | str, rows: int) -> Tensor:
    spec = graph.inputs[value] if isinstance(value, str) else graph.spec(value)
    return torch.zeros(shape_at(spec, rows), dtype=spec.dtype)


def _export(stage: OnnxStage, path: Path) -> None:
    """Write one file.

    Raises:
        AutopipeError: names what torch cannot export.
    """
    with _quiet():
        try:
            torch.onnx.export(
                stage.module,
                tuple(stage.takes.values()),
                path,
                input_names=list(stage.takes),
                output_names=list(stage.gives),
                verbose=False,
                dynamo=True,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = str(error.__cause__ or error).strip().partition("\n")[0]
            raise AutopipeError(
                f"{path.name}: torch {torch.__version__} cannot export this stage: {reason}"
            ) from error


@contextmanager
def _quiet() -> Any:
    """Within, notes of torch's exporter about other packages are suppressed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
