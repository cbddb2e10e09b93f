"""A model of the zoo as a pipe in real processes, beside the same model in one process.

    plan = planned("gpt", pp=2, dp=2, micro_batches=4)      every rank calls it, at the same place
    pipe = piped("gpt", plan)
    together(pipe)                                          three steps of both: they stay together

Each story of `pipe_stories` and `step_stories` is a function that every rank of its world runs; it
is entered here, and `pipe_worker` tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopipe
from autopipe import Pipe, Plan
from autopipe.batch.cut import slice_rows
from autopipe.batch.description import describe
from autopipe.batch.digest import digest
from autopipe.batch.tree import flatten, rebuild
from autopipe.cluster.cluster import Cluster
from autopipe.ir.graph import Graph
from autopipe.planfile import programs
from autopipe.planfile.placements import I, own_rows
from autopipe.runtime import cut_again
from autopipe.runtime.step import prepare
from autopipe.schedules.instructions import holders
from autopipe.sharding.collectives import in_rows, own_part
from autopipe.sharding.plan_io import read_back
from autopipe.stages.dry_run import Known, Rehearsal, rehearse
from autopipe.tracing import source, symbolic_sequence
from autopipe.tracing.source import trace_source
from autopipe.tracing.trace import trace
from autopipe.tracing.traced import Trace
from tests.support import models, zoo
from tests.support.inprocess import machine
from tests.support.models import CLASSES, WIDTH
from tests.support.remembered import findings_remembered, name_of
from tests.support.traces import kept
from tests.support.zoo import Batch, Case

ZOO = {
    **zoo.ZOO,
    "linear": Case(
        lambda: nn.Linear(WIDTH, CLASSES),
        lambda rows: {"input": zoo.noise(rows, WIDTH), "labels": zoo.integers(rows, below=CLASSES)},
        zoo.entropy,
    ),
    "gaps": Case(lambda: models.GPT(0.0), zoo.gaps, zoo.entropy),
    "calls": Case(models.Counting, zoo.vectors, zoo.entropy),
    "masked": Case(lambda: models.GPT(0.0), zoo.gaps, zoo.masked_entropy),
}
Story = Callable[[], None]
STORIES: dict[int, list[Story]] = {2: [], 3: [], 4: [], 8: []}
LONG_STORIES: set[Story] = set()
"""Those of them that only the long run tells."""


def story(world: int, name: str | None = None, *, long: bool = False) -> Callable[[Story], Story]:
    """Enter a story under the number of processes it needs."""

    def enter(told: Story) -> Story:
        told.__name__ = name or told.__name__
        STORIES[world].append(told)
        if long:
            LONG_STORIES.add(told)
        return told

    return enter


def without_inductor() -> AbstractContextManager[object]:
    """Within, stages are compiled to the same graphs, by what waits for no compiler of C++."""
    return patch.object(prepare, "Compiler", partial(prepare.Compiler, "aot_eager"))


@contextmanager
def once() -> Iterator[None]:
    """Rehearse the stages of a graph once, and trace what evaluates and what is shorter once.

    Plans find it once as well. Every pipe of every rank and every plan would find the same, and
    finding it takes longer than the steps that stories tell of.
    """
    known: dict[int, tuple[Graph, Known]] = {}

    def rehearsed(graph: Graph, *args: Any, **kwargs: Any) -> Rehearsal:
        _, learnt = known.setdefault(id(graph), (graph, {}))
        name = name_of("rehearsed by a rank", graph, args, sorted(kwargs.items()))
        return kept(name, lambda: rehearse(graph, *args, **kwargs, known=learnt))

    def evaluating(model: nn.Module, example: Any, specs: Any, *args: Any, **kwargs: Any) -> Trace:
        name = f"{model.name_in_zoo} {kwargs.get('outputs')} {kwargs.get('kept')}"
        name += f" {[spec.shape for spec in specs]}, evaluating"
        return kept(name, lambda: trace_source(model, example, specs, *args, **kwargs))

    def shorter(model: Any, example: Any, specs: Any, *args: Any, **kwargs: Any) -> Trace:
        shapes = [spec.shape for spec in specs]
        name = f"{kwargs['original'].name_in_zoo} {kwargs.get('kept')} {shapes}"
        name += f" {digest(flatten(example))}, of other lengths"
        return kept(name, lambda: trace(model, example, specs, *args, **kwargs))

    with (
        findings_remembered(),
        patch.object(prepare, "rehearse", rehearsed),
        patch.object(cut_again, "trace_source", evaluating),
        patch.object(symbolic_sequence, "trace", shorter),
    ):
        yield


_TRACES: dict[str, Trace] = {}
_SHARED: set[str] = set()


def share_trace(name: str) -> None:
    """Give every rank what rank 0 has traced, if it has: each would find the same, on few cores."""
    if dist.is_initialized() and name not in _SHARED:
        known: list[Any] = [_TRACES.get(name)]
        dist.broadcast_object_list(known)
        if known[0] is not None:
            _TRACES[name] = known[0]
            _SHARED.add(name)


@contextmanager
def traced_once(name: str) -> Iterator[None]:
    """Trace a model for the first plan or pipe of it, and for no later one.

    The graph is the same every time; to find it takes far longer than all that is told of it.
    """

    def again(find: Callable[..., Trace]) -> Callable[..., Trace]:
        def found(*args: Any, **kwargs: Any) -> Trace:
            dtype = kwargs.get("kept")
            own = name if dtype is None else f"{name} in {dtype}"
            if own not in _TRACES:
                _TRACES[own] = kept(own, lambda: find(*args, **kwargs))
            return _TRACES[own]

        return found

    with patch.object(source, "trace", again(source.trace)):
        yield


@cache
def planned(
    name: str,
    pp: int,
    dp: int,
    micro_batches: int,
    schedule: str = "1f1b",
    on: Callable[[int], Cluster] = machine,
    **constraints: Any,
) -> Plan:
    """A plan of a zoo's model with two rows a micro-batch; rank 0 makes it for all.

    Args:
        on: of so many processes, what they stand on.
    """
    if dist.is_initialized() and dist.get_rank() > 0:
        made: list[Any] = [None]
    else:
        case = ZOO[name]
        with traced_once(name), findings_remembered():
            plan = autopipe.plan(
                case.model,
                case.inputs,
                loss=case.loss,
                cluster=on(pp * dp * constraints.get("tp", 1)),
                batch_size=2 * dp * micro_batches,
                pp=pp,
                dp=dp,
                micro_batches=micro_batches,
                schedule=schedule,
                **constraints,
            )
        made = [plan]
    if dist.is_initialized():
        dist.broadcast_object_list(made)
    return made[0]  # type: ignore[no-any-return]


def piped(name: str, plan: Plan, **options: Any) -> Pipe:
    """The zoo's model with the zoo's weights, as planned."""
    case = ZOO[name]
    share_trace(name)
    model = case.model()
    model.name_in_zoo = name  # type: ignore[assignment]  # for `once`
    with traced_once(name):
        return autopipe.parallelize(model, plan, loss=case.loss, **options)


def whole_loss(name: str, model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the whole batch in one process, in one go."""
    found = ZOO[name].eager(model, batch)
    return found if isinstance(found, Tensor) else found[0] / found[1]


def drawn(name: str, rows: int, number: int) -> Batch:
    """Another batch for each number: rows further down the zoo's."""
    case = ZOO[name]
    batch = case.inputs(rows * (number + 1))
    specs = describe(case.inputs(2), case.inputs(3), 2, 3)
    leaves = slice_rows(specs, flatten(batch), rows * number, rows * (number + 1))
    return rebuild(batch, leaves)  # type: ignore[no-any-return]


def rows_of(batch: Any, first: int, stop: int) -> Any:
    """The rows [first, stop) of a batch that is a dict of tensors."""
    return {name: tensor[first:stop] for name, tensor in batch.items()}


def own(pipe: Pipe, name: str, whole: Tensor) -> Tensor:
    """This rank's part of one process's parameter or gradient: its shard, under ZeRO its rows."""
    plan, place = pipe.plan, pipe.place
    lies = read_back(plan).states.get(name, I)
    if lies.sharded:
        whole = own_part(whole, lies, plan.mesh.tp, place.tp)
    if not plan.deals and not plan.scatters:
        return whole
    if plan.scatters:  # over replicas alone
        return in_rows(whole, own_rows(whole.shape, plan.mesh.dp, place.dp))
    having = zip(plan.stages, holders(programs.compute(plan)), strict=True)
    sharing = sorted({rank for stage, rank in having if name in stage.parameters})
    position = sharing.index(place.pp) * plan.mesh.dp + place.dp
    return in_rows(whole, own_rows(whole.shape, len(sharing) * plan.mesh.dp, position))


def full(tensor: Tensor) -> Tensor:
    """All of a tensor; of a DTensor, every rank that has a part of it calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: Tensor, expected: Tensor, said: str = "", to: float = 1e-5) -> None:
    """Equal to a part of the largest entry."""
    assert found.shape == expected.shape, f"{said}: {found.shape}, expected {expected.shape}"
    if not expected.numel():
        return
    most = to * float(expected.detach().abs().max().clamp_min(1e-6))
    off = float((found.detach() - expected.detach()).abs().max())
    assert off <= most, f"{said}: off by {off:.2e}, allowed {most:.2e}"


def close_gradients(pipe: Pipe, model: nn.Module, to: float = 1e-5) -> None:
    """Each parameter of the rank, whole, has the gradient that it has in the model."""
    for name, parameter in pipe.named_parameters():
        gradient = model.get_parameter(name).grad
        assert parameter.grad is not None and gradient is not None
        close(parameter.grad, gradient, name, to)


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises `kind`, and its sentence has these words."""
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def together(name: str, pipe: Pipe, *, steps: int = 3, clip: float = 0.5) -> None:
    """So many steps beside one process: losses, gradients, norms and weights stay together."""
    model = ZOO[name].model()
    ours, theirs = sgd(pipe.parameters()), sgd(model.parameters())
    for number in range(steps):
        batch = drawn(name, pipe.plan.batch.rows, number)
        expected = whole_loss(name, model, batch)
        theirs.zero_grad()
        expected.backward()
        close(pipe.step(batch), expected, f"loss {number}")
        for key, parameter in pipe.named_parameters():
            gradient = model.get_parameter(key).grad
            assert (parameter.grad is None) == (gradient is None), key
            if gradient is not None and parameter.grad is not None:
                part = own(pipe, key, gradient)
                close(parameter.grad, part, f"gradient of {key}, step {number}", 5e-5)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        close(pipe.clip_grad_norm_(clip), norm, f"norm {number}")
        ours.step()
        theirs.step()
    for key, parameter in pipe.named_parameters():
        close(parameter, own(pipe, key, model.get_parameter(key)), f"{key} after {steps} steps")
    for key, tensor in pipe.state_dict().items():
        close(full(tensor), model.state_dict()[key], f"{key} in the state dict")
