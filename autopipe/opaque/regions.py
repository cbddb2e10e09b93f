"""The op that runs a call of the user's own code: the kernels for real and for fake tensors.

    h.0.moe(x)      traced as    autopipe::region([x, [h.0.moe.router.weight], ...], [], b, ...)

    real tensors    the module's own forward runs on them; autograd records it
    fake tensors    results of the measured shapes, and the measured bytes kept for backward

The op's last argument is a key of the process that traced it: it leads to the code (`Running`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.frontend.construct import fake_copy, off_gpus
from autopipe.frontend.loss import Loss
from autopipe.frontend.transformers_adapter import without_cache
from autopipe.ir import opaque_ops
from autopipe.ir.graph import REGION_OP, Graph, Node
from autopipe.ir.torch_patches import one_process, own_of, replacing
from autopipe.ir.torch_private import is_fake, no_saved_tensors_hooks, version
from autopipe.opaque.calls.attributes import BeforeCall, differ, put
from autopipe.opaque.calls.sites import LossCall, SiteCall, call, site_of, standing_in, state_of
from autopipe.opaque.calls.sparse import owned, to_device
from autopipe.opaque.calls.states import Homes
from autopipe.opaque.calls.trees import (
    distinct_tensors,
    from_text,
    parts_of,
    returned,
    to_text,
    whole_of,
)
from autopipe.opaque.custom_functions import as_written
from autopipe.opaque.results import as_measured, at_rows, check_sets, check_writes, write_back
from autopipe.opaque.shaped import shaped
from autopipe.planfile.regions import LOSS, Region
from autopipe.rewriting.flex_attention import written_out

_library = torch.library.Library("autopipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "region(Tensor[] tensors, Tensor(a!)[] written, SymInt rows, SymInt flops, SymInt saved, "
    "int launches, bool random, str call) -> Tensor[]"
)

_numbers = itertools.count()
_running: dict[str, Running] = {}
_copies = threading.local()
_copying = threading.Lock()
"""Fake tensors of one model are copied by one thread at a time."""


@dataclass(frozen=True, eq=False)
class Running:
    """A region that this process can run.

    Attributes:
        model: the model whose code runs; the op's tensors take the place of its own.
        training: whether the model runs in training mode.
        number: differs from that of equally named regions in other traces of this process.
        loss: the user's loss, if the region may be a call of it.
    """

    region: Region
    model: nn.Module
    training: bool
    number: int
    loss: Loss | None = None

    @property
    def key(self) -> str:
        """The last argument of the op."""
        return f"{self.number}:{self.region.name}"


def registered(
    regions: Sequence[Region], model: nn.Module, loss: Loss | None = None, *, training: bool
) -> tuple[Running, ...]:
    """Register regions of a model and its loss, so that the op can run them in this process."""
    found = tuple(Running(region, model, training, next(_numbers), loss) for region in regions)
    _running.update({running.key: running for running in found})
    for running in found:
        if not running.region.states:
            # Before the trace, where its tensors may have values and others none: no copy is made.
            _copied(running)
    return found


def with_region_names(graph: Graph, running: Sequence[Running]) -> Graph:
    """Replace keys of `running` in a graph's nodes by the regions' names, equal in any trace."""
    names = {each.key: each.region.name for each in running}

    def renamed(node: Node) -> Node:
        if node.op != REGION_OP:
            return node
        return replace(node, args=(*node.args[:-1], names[str(node.args[-1])]))

    used = {each.region.name: each for each in running}
    return replace(graph, nodes=tuple(map(renamed, graph.nodes)), regions=used)


@contextmanager
def as_ops(model: nn.Module, running: Sequence[Running], rows: Any) -> Iterator[None]:
    """Within, the calls of regions are ops of a trace.

    Args:
        model: the model that is traced; that of `running` may have other parameters.
        rows: the rows of the batch, an integer or a symbol.

    Raises:
        CaptureError: a call gets other arguments than when it was measured.
    """
    by_call = {(site_of(each.region), each.region.call): each for each in running}

    def stand_in(site_call: SiteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        found = by_call.get((site_call.site, site_call.number))
        given = distinct_tensors((args, kwargs))
        arguments = to_text(parts_of((args, dict(kwargs)), given, owned(model)))
        if found is None or arguments != found.region.given or differ(model, found.region.finds):
            raise CaptureError(
                f"{user_lines.here()}: {site_call.site} is called otherwise than it was when its "
                "calls were measured",
                hint="what it is given besides tensors, and what forward sets in its modules, must "
                "be the same in each micro-batch",
            )
        return _op(found, model, given, rows)

    with standing_in(model, tuple(dict.fromkeys(site for site, _ in by_call)), stand_in):
        yield


def _op(running: Running, model: nn.Module, given: Sequence[Tensor], rows: Any) -> Any:
    region = running.region
    states, written = (
        [state_of(model, name) for name in names] for names in (region.states, region.written)
    )
    results = torch.ops.autopipe.region.default(
        [*given, *states],
        written,
        rows,
        at_rows(region.flops, rows),
        at_rows(region.saved, rows),
        region.launches,
        region.random,
        running.key,
    )
    given_back = whole_of(from_text(region.gives), results)
    if not region.left:
        return given_back
    returned_alone, left = given_back
    for name, tensor in left.items():
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, tensor)
    return returned_alone


def _run(
    tensors: Sequence[Tensor],
    written: Sequence[Tensor],
    rows: Any,
    flops: Any,
    saved: Any,
    launches: int,
    random: bool,
    key: str,
) -> list[Tensor]:
    running = _running[key]
    if any(map(is_fake, (*tensors, *written))):
        carrying = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        results = shaped(running.region.results, rows, (*tensors, *written))
        if carrying:
            kept = [tensors[number] for number in running.region.keeps]
            opaque_ops.keep(kept, saved, results)
        return results
    with as_written(), nullcontext() if running.region.seen else no_saved_tensors_hooks():
        results = _called(running, tensors, written)
    return as_measured(running.region, results, tensors, rows)


_library.impl("region", _run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _cond(*args: Any, **kwargs: Any) -> Any:
    """torch.cond by its compiler: without it, torch.cond refuses tensors lent to a model."""
    with torch.compiler.set_stance("default"):
        return own_of(torch.cond)(*args, **kwargs)


def _called(running: Running, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> Any:
    """The result of the call; buffers that it writes or assigns are written at its end.

    The call writes copies of these buffers: autograd saves the copies, while the next micro-batch
    may write the buffers before this one's backward. It gets views of its arguments, so that a
    gradient that it takes itself ends at the views.

    Its backward may run its code again, as a checkpoint does, or read attributes that its forward
    has set. For that the tensors and attributes of this micro-batch are restored first.
    """
    region, copied = running.region, _copied(running)
    model = copied.model
    tensors = [tensor.view_as(tensor) for tensor in tensors]
    for number in region.carrying:
        tensors[number].requires_grad_()  # no graph says that forward has asked for it
    count = len(tensors) - len(region.states)
    buffers = [buffer.clone() for buffer in written]
    lent = dict(zip((*region.states, *region.written), (*tensors[count:], *buffers), strict=True))
    copied.homes.lend(lent)
    taken, versions = ([(t, version(t)) for t in known] for known in (tensors, buffers))
    if tensors:
        to_device(model, tensors[0].device)
    args, kwargs = whole_of(from_text(region.given), tensors[:count], model)
    inner = dict(model.get_submodule(region.module).named_modules(prefix=region.module))
    _set(inner, copied.latest)  # a backward may have come back to those of an earlier micro-batch
    put(model, region.finds)
    before = BeforeCall(model, region.module)
    with _as_in_eager(region, tensors), without_cache(model.get_submodule(region.module)):
        result = _code(running, model, tensors)(*args, **kwargs)
    check_sets(region, model, before, (args, dict(kwargs)), running.loss)
    check_writes(region, taken, [state_of(model, name) for name in region.states])
    for name, buffer, lent_buffer in zip(region.written, written, versions, strict=True):
        write_back(buffer, state_of(model, name), *lent_buffer)
    set_here = before.set_since()
    copied.latest = {
        path: copied.latest.get(path, {}) | values for path, values in set_here.items()
    }

    def restore(_: Tensor) -> None:
        copied.homes.lend(lent)
        _set(inner, set_here)

    found = returned(result, _left(region, set_here))
    tensors = distinct_tensors(found)
    given_back = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
    for tensor in given_back:  # hooks of the user's on a result itself come behind this one
        if tensor.requires_grad:
            tensor.register_hook(restore)  # type: ignore[no-untyped-call]
    return whole_of(parts_of(found, tensors, owned(model)), given_back, model)


@contextmanager
def _as_in_eager(region: Region, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Within, the user's code runs as it was measured: uncompiled, alone, its constants on CPUs."""
    with ExitStack() as until:
        # `is_initialized` would count as a question of the model's.
        if torch.distributed.group.WORLD is not None:
            until.enter_context(one_process())
        if all(tensor.device.type == "cpu" for tensor in tensors):
            until.enter_context(off_gpus())
        if not region.grad:
            until.enter_context(torch.no_grad())
        # A compiler would look at the tensors that are lent, which are no leaves, and their sizes.
        until.enter_context(torch.compiler.set_stance("force_eager"))
        until.enter_context(replacing(torch.cond, _cond))
        until.enter_context(written_out())
        yield


def _left(region: Region, set_here: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The tensors of `region.left` by name, from all that a call has set in modules, by path."""
    tensors = {
        f"{path}.{name}".lstrip("."): value
        for path, values in set_here.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    return {name: tensors[name] for name in region.left if name in tensors}


def _code(running: Running, model: nn.Module, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """The function of a call: the user's loss itself, or a module or method of the copied model."""
    if running.region.method != LOSS:
        return call(model, site_of(running.region))
    assert running.loss is not None, "a trace without a loss has no region of it"
    if isinstance(running.loss, nn.Module) and tensors:
        running.loss.to(tensors[0].device)
    return LossCall(running.loss)


def _set(inner: Mapping[str, nn.Module], values: Mapping[str, Mapping[str, Any]]) -> None:
    for path, attributes in values.items():
        inner[path].__dict__.update(attributes)


@dataclass(eq=False)
class _Copied:
    """A copy of a model in which one thread runs the calls of a `Running`.

    Its tensors stay those of the last call or backward until the next one.

    Attributes:
        homes: the places of its parameters and buffers.
        latest: what its calls have set in the modules of the region: path -> name -> value.
    """

    model: nn.Module
    homes: Homes
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)


def _copied(running: Running) -> _Copied:
    """This thread's own copy of the model; ranks may be threads of one process."""
    copies: dict[int, _Copied] = vars(_copies).setdefault("by_number", {})
    if running.number not in copies:
        with _copying:
            model = fake_copy(running.model)
        if model.training != running.training:
            model.train(running.training)
        copies[running.number] = _Copied(model, Homes(model))
    return copies[running.number]
