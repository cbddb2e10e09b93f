"""Lets several plans of one graph share observations, dry runs and traces that `plan` makes anew.

    with findings_remembered(): ...      autopipe.plan(...), as often as one likes
    with traces_remembered(): ...        the same, and a model that a function builds is traced once
    with file_remembered(path): ...      the same of a model file, wherever a file of this text lies

To plan, autopipe observes which tensors autograd keeps, and rehearses stages. Both run the model on
fake tensors, which takes most of the time after tracing. Both results (findings) depend only on the
graph, the other arguments of the call, and on whether it is for GPUs (`for_gpus`), so a later call
with equal ones gets the earlier result.

All processes of a run of the tests share findings; each process has its own traces.

Tests of a plan's decisions may use remembered traces too. Tests of tracing, or of whether two
traces agree, must not.
"""

import hashlib
import pickle
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from autopipe.batch.digest import digest
from autopipe.batch.tree import flatten
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Graph
from autopipe.ir.repeats import Short
from autopipe.joint.dry_run_repeats import rehearse_deep
from autopipe.planners.costs import plan_memory
from autopipe.planners.driver import against_eager, arguments, checked_trace, make_plan
from autopipe.planners.driver.request import PlanRequest
from autopipe.planners.saved import saved_tensors
from autopipe.planners.saved.observe import Levels, Seen, eager_levels, observe_saved
from autopipe.rewriting.for_gpus import of_gpus
from autopipe.rows import loss_grouping, row_mixing
from autopipe.stages.dry_run import Known, Rehearsal
from autopipe.tracing.source import Source, bare, trace_source
from autopipe.tracing.traced import Trace
from tests.support.traces import kept
from tests.support.zoo import ZOO

_LEARNT: dict[tuple[int, bool], tuple[Graph, Known]] = {}
"""By graph, and whether for GPUs; the graph is kept, so that its id stays its own."""

_TEXTS: dict[int, tuple[Graph, str]] = {}
_TRACES: dict[Hashable, Trace] = {}
_SKELETONS: dict[Source, nn.Module] = {}
_CHECKED: dict[Hashable, tuple[Any, list[str]]] = {}
_OF_FILES: dict[str, tuple[Trace, list[str]]] = {}


@contextmanager
def findings_remembered() -> Iterator[None]:
    """Observe each graph once for a number of rows, and rehearse each kind of its stages once.

    What was found inside of one such block is known in the next ones, in other processes too.
    """

    def rehearsed(flow: Dataflow, *args: Any, **kwargs: Any) -> Rehearsal:
        _, known = _LEARNT.setdefault((id(flow.graph), of_gpus()), (flow.graph, {}))
        how = {name: value for name, value in kwargs.items() if name != "known"}
        return kept(
            name_of("rehearsed", of_gpus(), flow.graph, args, how),
            lambda: rehearse_deep(flow, *args, **how, known=known),
        )

    def observed(short: Short, precision: str, rows: int, **how: Any) -> Seen:
        return kept(
            name_of("observed", of_gpus(), short, precision, rows, how),
            lambda: observe_saved(short, precision, rows, **how),
        )

    def levels(*how: Any) -> Levels:
        return kept(name_of("levels", of_gpus(), *how), lambda: eager_levels(*how))

    with (
        patch.object(plan_memory, "rehearse_deep", rehearsed),
        patch.object(saved_tensors, "observe_saved", observed),
        patch.object(saved_tensors, "eager_levels", levels),
    ):
        yield


def name_of(kind: str, *asked: Any) -> str:
    """What is asked for by its text; one that has an address in it is this process's alone."""
    return f"{kind}: {hashlib.sha256(' '.join(map(_text, asked)).encode()).hexdigest()}"


def _text(asked: Any) -> str:
    if isinstance(asked, Short):
        parts = asked.graph, asked.kept, asked.like.tolist(), asked.runs, asked.states
        return " ".join(map(_text, parts))
    if not isinstance(asked, Graph):
        return repr(asked)
    if id(asked) not in _TEXTS:
        held = {name: _digest(tensor) for name, tensor in asked.constants.items()}
        parts = asked.inputs, asked.states, asked.nodes, asked.outputs, held, asked.regions
        _TEXTS[id(asked)] = asked, repr(parts)
    return _TEXTS[id(asked)][1]


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(pickle.dumps((tensor.dtype, tensor.tolist()))).hexdigest()


@contextmanager
def traces_remembered() -> Iterator[None]:
    """Remember findings, and build, trace and check each model that a function or class makes once
    for a batch. The zoo's traces, of its own batches, are those of `staged.traced`.

    A module that was built already is traced each time: its weights may have changed.
    """

    def built(model: Source, say: Any = None) -> nn.Module:
        if isinstance(model, nn.Module):
            return bare(model, say)
        if model not in _SKELETONS:
            _SKELETONS[model] = bare(model, say)
        return _SKELETONS[model]

    def traced(model: Source, example: Any, specs: Any, loss: Any, **how: Any) -> Trace:
        if isinstance(model, nn.Module):
            return trace_source(model, example, specs, loss, **how)
        own = {name: value for name, value in how.items() if name not in ("skeleton", "say")}
        seen = digest(flatten(example))
        asked = (model, loss, seen, f"{specs} {own}")
        if asked not in _TRACES:
            name = _name_in_zoo(model, loss, seen) if own.get("symbolic", True) else None

            def make() -> Trace:
                return trace_source(model, example, specs, loss, **how)

            low = "" if own.get("kept") is None else f" in {own['kept']}"
            _TRACES[asked] = make() if name is None else kept(f"{name}{low}", make)
        return _TRACES[asked]

    with (
        findings_remembered(),
        patch.object(make_plan, "bare", built),
        patch.object(checked_trace, "trace_source", traced),
        patch.object(against_eager, "check", _once(against_eager.check)),
        patch.object(loss_grouping, "check", _once(loss_grouping.check)),
        patch.object(row_mixing, "remark", _once(row_mixing.remark, says=False)),
    ):
        yield


def _name_in_zoo(model: Source, loss: Any, seen: int) -> str | None:
    """The name of the zoo's model that is asked for with its own loss and an example of 2 rows."""
    for name, case in ZOO.items():
        if model == case.model and loss == case.loss:
            own = digest(flatten(case.inputs(2)))
            return name if own == seen else None
    return None


def _once(check: Callable[..., Any], *, says: bool = True) -> Callable[..., Any]:
    """A check that looks at a remembered trace once; it finds and says the same each time.

    Args:
        says: whether its last argument takes lines.
    """

    def checked(*args: Any) -> Any:
        traced = next(arg for arg in args if isinstance(arg, Trace))
        if not any(traced is known for known in _TRACES.values()):
            return check(*args)
        how = [_text_of_request(arg) for arg in args if isinstance(arg, str | PlanRequest)]
        asked = (check, id(traced), *how)
        if asked not in _CHECKED:
            said: list[str] = []
            given = (*args[:-1], said.append) if says else args
            _CHECKED[asked] = check(*given), said
        found, said = _CHECKED[asked]
        for line in said:
            args[-1](line)
        return found

    return checked


def _text_of_request(asked: str | PlanRequest) -> str:
    """As much of a request as checks go by."""
    if isinstance(asked, str):
        return asked
    limits, gpus = asked.constraints, arguments.on_gpus(asked.cluster)
    return f"{asked.precision} {asked.loss_over} {gpus} {limits.dp} {limits.micro_batches}"


@contextmanager
def file_remembered(path: Path) -> Iterator[None]:
    """Remember findings, and trace the model of a file once for all files of the same text.

    That of a model which reads no value, keeps nothing for its next call, and has no call that
    runs as it is. Only the lines of its nodes say where the file lies.
    """
    text, folder = path.read_text(), str(path.parent)

    def traced(model: Source, example: Any, specs: Any, loss: Any, **how: Any) -> Trace:
        say, said = how.pop("say", None), list[str]()
        own = {name: value for name, value in how.items() if name not in ("skeleton", "others")}
        name = name_of("file", text, loss is None, specs, sorted(own.items()))
        if name in _OF_FILES:
            elsewhere, said = _OF_FILES[name]
            found = _moved(elsewhere, _FOLDER, folder)
        else:
            found = trace_source(model, example, specs, loss, **how, say=said.append)
            elsewhere = _moved(found, folder, _FOLDER)
            plain = not found.reads and not found.regions and not found.unsteady
            if plain and folder not in f"{elsewhere} {said}":
                _OF_FILES[name] = elsewhere, said
        for line in said if say else ():
            say(line)
        return found

    with findings_remembered(), patch.object(checked_trace, "trace_source", traced):
        yield


_FOLDER = "<folder>"


def _moved(trace: Trace, old: str, new: str) -> Trace:
    """The trace of a file that has been moved from one folder to another."""
    nodes = tuple(replace(n, place=n.place.replace(old, new)) for n in trace.graph.nodes)
    return replace(trace, graph=replace(trace.graph, nodes=nodes))
