"""Measure calls that will run as they are: what they read, return, write and save for backward.

    runs on 2 rows, 4 rows, 2 other rows      ->      a `Region` for each call

The first two runs give each size as a straight line in the rows; the third shows that it does not
depend on values. The model has its weights, since the rows that an expert gets depend on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from autopipe.eager.draws import Generators
from autopipe.eager.refused_effects import RefusedEffects
from autopipe.errors import CaptureError
from autopipe.ir.tensors import bytes_of, tensors_in
from autopipe.ir.torch_private import TorchDispatchMode, no_function_modes, storage_key, version
from autopipe.opaque.origins import InnerGradients, Origins, SetForOthers
from autopipe.opaque.results import in_all_runs, rising
from autopipe.opaque.sites import Site, SiteCall, Wider, left_in, standing_in
from autopipe.opaque.sparse import is_sparse, owned
from autopipe.opaque.states import ChangedStates, SetBefore, first_names, named, states_of, writable
from autopipe.opaque.trees import NotPlain, distinct_tensors, parts_of, returned, to_text, whole_of
from autopipe.planfile.regions import WHOLE, Region

_NO_HOOKS = ("saved tensor hooks", "that doesn't have storage")
"""What torch says where hooks on saved tensors may not be, or get a tensor of a transform."""


@dataclass
class _Seen:
    """The measurements of one call in one run; `given` and `finds` as in a `Region`.

    Attributes:
        carrying: for each tensor argument, whether a gradient may be taken by it.
        grad: whether gradients are recorded where the call stands.
        made, left: its result; by name, tensors in attributes that other code reads after it.
        written: bytes of the buffers that it writes, by name.
        sets: the names of attributes that it changes.
        strided: storages that it reads by `as_strided`.
        owners: the position of an argument, or the name of a state, by its storage.
        packed: what autograd has been given to keep.
        unseen: all that was made, if that could not be looked at.
    """

    given: str
    finds: str
    carrying: tuple[bool, ...]
    grad: bool
    owners: Mapping[int, str | int]
    made: Any = None
    left: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, None] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    sets: set[str] = field(default_factory=set)
    random: bool = False
    flops: int = 0
    saved: int = 0
    keeps: set[str | int] = field(default_factory=set)
    launches: int = 0
    looked: bool = True
    strided: set[int] = field(default_factory=set)
    packed: list[weakref.ref[Tensor]] = field(default_factory=list)
    unseen: list[Tensor] = field(default_factory=list)

    def count_kept(self) -> None:
        """Set `keeps` and `saved` to what autograd keeps, now that the run holds no tensors."""
        packed = [tensor for ref in self.packed if (tensor := ref()) is not None]
        tensors = [*self.unseen, *packed]
        kept = {storage_key(tensor): bytes_of(tensor) for tensor in tensors}
        self.keeps = {self.owners[key] for key in kept if key in self.owners}
        self.saved = sum(size for key, size in kept.items() if key not in self.owners)
        self.packed, self.unseen = [], []

    @property
    def gives(self) -> str:
        """The tree of what the call returns and leaves, as text."""
        return to_text(parts_of(returned(self.made, self.left), self.results))

    @property
    def results(self) -> list[Tensor]:
        """The tensors that the call returns and leaves."""
        return distinct_tensors(returned(self.made, self.left))


@dataclass(frozen=True)
class Runs:
    """Runs of a model on few rows.

    Attributes:
        rows: the number of rows of each run but `twice`, which has twice as many.
        first: the run whose results are recorded.
        others: runs on other rows.
        drawn: runs on the rows of `first` with other random numbers, for calls that draw some.
    """

    rows: int
    first: Run
    twice: Run
    others: Sequence[Run]
    drawn: Sequence[Run] = ()


Run = AbstractContextManager[Callable[[], object]]
"""A `with` block that gives a function to run the model, and at its end undoes the changes."""


class Fails(Exception):
    """A run raises `error`, in the call of `site` or after it."""

    def __init__(self, site: Site, error: Exception) -> None:
        super().__init__(str(error))
        self.site, self.error = site, error


def measured(
    model: nn.Module, sites: Sequence[Site], runs: Runs, why: Mapping[Site, str]
) -> tuple[Region, ...]:
    """The regions of all calls of the sites in a forward of `model`, which has its weights.

    Raises:
        Wider: a call gives or takes what no op can, or a size that depends on values.
        Fails: the model does not run at all.
        CaptureError: a call has an effect that no stage may have (`RefusedEffects`).
    """
    found = [_run(model, sites, runs.first)]
    try:
        found.append(_run(model, sites, runs.twice))
    except Fails as failed:
        raised = type(failed.error).__name__
        raise Wider(failed.site, f"it raises {raised} on {2 * runs.rows} rows") from failed
    draws = any(seen.random for seen in found[0].values())
    for run in (*runs.others, *(runs.drawn if draws else ())):
        with suppress(Fails):  # for its values
            found.append(_run(model, sites, run))
    for seen in found[1:]:
        if unlike := seen.keys() ^ found[0].keys():
            raise Wider(min(unlike)[0], "it is called more or less often, by what it computes")
    written = {key: [n for calls in found for n in calls[key].written] for key in found[0]}
    others = writable(model, chain.from_iterable(written.values()))
    for key, call in found[0].items():
        gives = bool(call.results or written[key])  # else the graph would not have it
        call.written |= others(call.states, every=not gives)
    return tuple(
        _region(*key, [seen[key] for seen in found], runs.rows, why[key[0]]) for key in found[0]
    )


def _region(site: Site, number: int, seen_runs: Sequence[_Seen], rows: int, why: str) -> Region:
    """The region of a call that was seen in each of `Runs`."""
    first, twice, *others = seen_runs
    left = sorted(set[str]().union(*(seen.left for seen in seen_runs)))
    for seen in seen_runs:
        seen.left = {name: seen.left[name] for name in left if name in seen.left}
    if any(seen.finds != first.finds for seen in seen_runs):
        raise Wider(site, "what forward sets in its modules differs from one call to the next")
    if any((seen.given, seen.gives) != (first.given, first.gives) for seen in seen_runs):
        raise Wider(site, "its arguments or results differ from one call to the next")
    written = {name: size for seen in seen_runs for name, size in seen.written.items()}
    states = dict.fromkeys(n for seen in seen_runs for n in seen.states if n not in written)
    places = {name: len(first.carrying) + n for n, name in enumerate(states)}
    keeps = set[str | int]().union(*(seen.keeps for seen in seen_runs))
    results = [seen.results for seen in seen_runs]
    alike = [first, *others]
    copies = sum(size for name, size in written.items() if name in keeps)  # a call has its own
    kept_places = (places.get(kept, kept) for kept in keeps)  # type: ignore[arg-type]
    return Region(
        module=site.module,
        method=site.method,
        call=number,
        why=why,
        given=first.given,
        gives=first.gives,
        states=tuple(states),
        written=tuple(sorted(written)),
        results=tuple(in_all_runs(site, tensors, rows) for tensors in zip(*results, strict=True)),
        random=any(seen.random for seen in seen_runs),
        flops=rising(max(seen.flops for seen in alike), twice.flops, rows),
        saved=rising(max(seen.saved for seen in alike) + copies, twice.saved + copies, rows),
        keeps=tuple(sorted(place for place in kept_places if isinstance(place, int))),
        launches=max(seen.launches for seen in seen_runs),
        seen=all(seen.looked for seen in seen_runs),
        left=tuple(left),
        finds=first.finds,
        carrying=tuple(n for n, carries in enumerate(first.carrying) if carries),
        grad=first.grad,
        sets=tuple(sorted(set[str]().union(*(seen.sets for seen in seen_runs)))),
    )


def _run(model: nn.Module, sites: Sequence[Site], run: Run) -> dict[tuple[Site, int], _Seen]:
    with run as called, torch.enable_grad():
        watching = _Watching(model, {site: states_of(model, site) for site in sites})
        try:
            with (
                watching.sets.noting(),
                watching.origins,
                watching.aside.watching(),
                standing_in(model, sites, watching.called),
            ):
                called()
        except (Wider, CaptureError):
            raise
        except Exception as error:  # the user's code may raise anything
            raise Fails(watching.last or sites[0], error) from error
        watching.origins.forget()
        for seen in watching.seen.values():
            seen.count_kept()
    return watching.seen


class _Watching:
    """Stands in for the sites of a run, and measures each call."""

    def __init__(self, model: nn.Module, states: Mapping[Site, Sequence[str]]) -> None:
        self.seen: dict[tuple[Site, int], _Seen] = {}
        self.last: Site | None = None
        self._model = model
        self._states = states
        self._names = first_names(model)
        self.sets, self.aside = SetBefore(model), SetForOthers(model)
        self._generators = Generators(model)
        everything = left_in(model, Site("", WHOLE)).items()
        kept = {id(tensor): name for name, tensor in everything if tensor.grad_fn is not None}
        self.origins = Origins(self._names, kept)

    def called(self, call: SiteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a site's call, and measure it."""
        self.last = site = call.site
        given = distinct_tensors((args, kwargs))
        arguments = self._as_text(site, args, kwargs, given)
        tensors = named(self._model)
        if any(isinstance(t, nn.Parameter) and id(t) not in self._names for t in tensors.values()):
            raise Wider(site, "its module has other parameters for this call (functional_call)")
        with no_function_modes():  # to look at a buffer is no read of the model's
            before = ChangedStates(self._model, self._states[site])
        memory = [(version(tensor), storage_key(tensor)) for tensor in given]
        finds = self.sets.before(site)
        owners: dict[int, str | int] = {storage_key(t): n for t, n in self._owned(given)}
        drawn, attributes = self._generators.places(), left_in(self._model, site)
        carrying, grad = tuple(t.requires_grad for t in given), torch.is_grad_enabled()

        def run(*, looking: bool) -> tuple[_Seen, Any]:
            states = dict.fromkeys(self._states[site])
            seen = _Seen(arguments, finds, carrying, grad, owners, states=states, looked=looking)
            known = [*given, *(tensors[name] for name in self._states[site])]
            with (
                self.sets.inside(),
                _counting(seen),
                self.origins.within(site, given, states),
                self.aside.within(site, seen.sets),
            ):
                with InnerGradients(site, known):
                    return seen, call.run(*args, **kwargs)

        try:
            seen, result = run(looking=True)
        except RuntimeError as error:  # torch.func, and kernels that know no hooks
            if not any(words in str(error) for words in _NO_HOOKS):
                raise
            seen, result = run(looking=False)
        if self._generators.places() != drawn:
            raise CaptureError(
                f"{site} draws from Python's random or from numpy.random, whose numbers differ "
                "from rank to rank",
                hint="draw with torch",
            )
        if memory != [(version(tensor), storage_key(tensor)) for tensor in given]:
            raise Wider(site, "it writes a tensor that it is given")
        after = distinct_tensors((args, kwargs))
        same = [*map(id, after)] == [*map(id, given)]
        if not same or self._as_text(site, args, kwargs, after) != arguments:
            raise Wider(site, "it changes a list or a dict that it is given")
        if any(storage_key(t) in seen.strided and not t.is_contiguous() for t in given):
            raise Wider(site, "as_strided() depends on the memory layout of a tensor it is given")
        with no_function_modes():
            seen.written = {self._names.get(id(t), n): size for n, t, size in before.written(site)}
        try:
            own_results = distinct_tensors(result)  # in lists and dicts that later code may change
            seen.made = whole_of(parts_of(result, own_results), own_results)
            results, _ = seen.results, seen.gives
        except NotPlain as error:
            raise Wider(site, str(error)) from error
        now = left_in(self._model, site)
        new = {name: tensor for name, tensor in now.items() if attributes.get(name) is not tensor}
        self.origins.gives(results, new, seen.left)
        self.seen[site, call.number] = seen
        return result

    def _as_text(
        self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Sequence[Tensor]
    ) -> str:
        """The tree of a call's arguments as text, and the tensors in it."""
        try:
            return to_text(parts_of((args, dict(kwargs)), given, owned(self._model)))
        except NotPlain as error:
            raise Wider(site, str(error)) from error

    def _owned(self, given: Sequence[Tensor]) -> Iterator[tuple[Tensor, str | int]]:
        for name, tensor in named(self._model).items():
            if not is_sparse(tensor):  # a buffer that an earlier call has assigned has its own name
                yield tensor, self._names.get(id(tensor), name)
        yield from ((tensor, number) for number, tensor in enumerate(given))


@contextmanager
def _counting(seen: _Seen) -> Iterator[None]:
    """Within, count operations, and note what is saved for backward."""

    def pack(tensor: Tensor) -> Tensor:
        with no_function_modes():
            kept = tensor.detach()  # a result that held its own function would never go
        seen.packed.append(weakref.ref(kept))
        return kept

    looking = saved_tensors_hooks(pack, lambda tensor: tensor)
    with looking if seen.looked else nullcontext(), _Ops(seen), RefusedEffects():
        yield


class _Ops(TorchDispatchMode):
    """Counts ops and the operations of products, notes random ones, and what unseen ones make."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen.launches += func is not torch.ops.aten.detach.default
        self._seen.random |= torch.Tag.nondeterministic_seeded in func.tags
        if func is torch.ops.aten.as_strided.default:
            self._seen.strided.add(storage_key(args[0]))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self._seen.flops += int(count(*args, **(kwargs or {}), out_val=result))
        if not self._seen.looked:
            self._seen.unseen.extend(tensors_in(result))
        return result
