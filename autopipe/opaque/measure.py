"""Measure calls that will run as they are: what they read, return, write and save for backward.

    runs on 2 rows, 4 rows, 2 other rows      ->      a `Region` for each call

The first two runs give each size as a straight line in the rows; the third shows that it does not
depend on values. The model has its weights, since the rows that an expert gets depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.eager.draws import Generators
from autopipe.errors import CaptureError
from autopipe.ir.torch_private import no_function_modes, storage_key, version
from autopipe.opaque.calls.attributes import SetBefore
from autopipe.opaque.calls.sites import Site, SiteCall, Wider, left_in, standing_in
from autopipe.opaque.calls.sparse import is_sparse, owned
from autopipe.opaque.calls.states import ChangedStates, first_names, named, states_of, writable
from autopipe.opaque.calls.trees import (
    NotPlain,
    distinct_tensors,
    parts_of,
    returned,
    to_text,
    whole_of,
)
from autopipe.opaque.counted_ops import NO_HOOKS, CountedOps, counting
from autopipe.opaque.origins import InnerGradients, Origins, SetForOthers
from autopipe.opaque.results import in_all_runs, rising
from autopipe.planfile.regions import WHOLE, Region


@dataclass(frozen=True)
class _CallStart:
    """What a call finds when it begins; `given` and `finds` as in a `Region`.

    Attributes:
        carrying: for each tensor argument, whether a gradient may be taken by it.
        grad: whether gradients are recorded where the call stands.
        owners: the position of an argument, or the name of a state, by its storage.
    """

    given: str
    finds: str
    carrying: tuple[bool, ...]
    grad: bool
    owners: Mapping[int, str | int]


@dataclass
class _Seen:
    """The measurements of one call in one run.

    Attributes:
        ops: what its ops have done.
        states: the names of the parameters and buffers that it reads.
        written: bytes of the buffers that it writes, by name.
        sets: the names of attributes that it changes.
        made, left: its result; by name, tensors in attributes that other code reads after it.
    """

    start: _CallStart
    ops: CountedOps
    states: dict[str, None]
    written: dict[str, int] = field(default_factory=dict)
    sets: set[str] = field(default_factory=set)
    made: Any = None
    left: dict[str, Tensor] = field(default_factory=dict)

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
    draws = any(seen.ops.random for seen in found[0].values())
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
    start = first.start
    if any(seen.start.finds != start.finds for seen in seen_runs):
        raise Wider(site, "what forward sets in its modules differs from one call to the next")
    if any((seen.start.given, seen.gives) != (start.given, first.gives) for seen in seen_runs):
        raise Wider(site, "its arguments or results differ from one call to the next")
    written = {name: size for seen in seen_runs for name, size in seen.written.items()}
    states = dict.fromkeys(n for seen in seen_runs for n in seen.states if n not in written)
    places = {name: len(start.carrying) + n for n, name in enumerate(states)}
    keeps = set[str | int]().union(*(seen.ops.keeps for seen in seen_runs))
    results = [seen.results for seen in seen_runs]
    counted = [seen.ops for seen in seen_runs]
    alike = [seen.ops for seen in (first, *others)]
    copies = sum(size for name, size in written.items() if name in keeps)  # a call has its own
    kept_places = (places.get(kept, kept) for kept in keeps)  # type: ignore[arg-type]
    return Region(
        module=site.module,
        method=site.method,
        call=number,
        why=why,
        given=start.given,
        gives=first.gives,
        states=tuple(states),
        written=tuple(sorted(written)),
        results=tuple(in_all_runs(site, tensors, rows) for tensors in zip(*results, strict=True)),
        random=any(ops.random for ops in counted),
        flops=rising(max(ops.flops for ops in alike), twice.ops.flops, rows),
        saved=rising(max(ops.saved for ops in alike) + copies, twice.ops.saved + copies, rows),
        keeps=tuple(sorted(place for place in kept_places if isinstance(place, int))),
        launches=max(ops.launches for ops in counted),
        seen=all(ops.looked for ops in counted),
        left=tuple(left),
        finds=start.finds,
        carrying=tuple(n for n, carries in enumerate(start.carrying) if carries),
        grad=start.grad,
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
            seen.ops.count_kept(seen.start.owners)
    return watching.seen


class _Given:
    """The arguments of a call before it, to check after it that they are as they were."""

    def __init__(
        self, model: nn.Module, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._model, self._site, self._arguments = model, site, (args, kwargs)
        self.tensors = distinct_tensors(self._arguments)
        self.text = self._as_text(self.tensors)
        self._memory = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        return [(version(tensor), storage_key(tensor)) for tensor in self.tensors]

    def _as_text(self, tensors: Sequence[Tensor]) -> str:
        """The tree of the arguments as text, with a place for each tensor."""
        args, kwargs = self._arguments
        try:
            return to_text(parts_of((args, dict(kwargs)), tensors, owned(self._model)))
        except NotPlain as error:
            raise Wider(self._site, str(error)) from error

    def check_untouched(self, ops: CountedOps) -> None:
        """Refuse a call that has written its arguments, or that depends on their memory layout.

        Raises:
            Wider: says which of them.
        """
        if self._memory != self._versions():
            raise Wider(self._site, "it writes a tensor that it is given")
        after = distinct_tensors(self._arguments)
        same = [*map(id, after)] == [*map(id, self.tensors)]
        if not same or self._as_text(after) != self.text:
            raise Wider(self._site, "it changes a list or a dict that it is given")
        if any(storage_key(t) in ops.strided and not t.is_contiguous() for t in self.tensors):
            raise Wider(
                self._site, "as_strided() depends on the memory layout of a tensor it is given"
            )


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
        given = _Given(self._model, site, args, kwargs)
        tensors = named(self._model)
        if any(isinstance(t, nn.Parameter) and id(t) not in self._names for t in tensors.values()):
            raise Wider(site, "its module has other parameters for this call (functional_call)")
        with no_function_modes():  # to look at a buffer is no read of the model's
            before = ChangedStates(self._model, self._states[site])
        start = _CallStart(
            given.text,
            self.sets.before(site),
            carrying=tuple(tensor.requires_grad for tensor in given.tensors),
            grad=torch.is_grad_enabled(),
            owners={storage_key(tensor): n for tensor, n in self._owned(given.tensors)},
        )
        drawn, attributes = self._generators.places(), left_in(self._model, site)

        def run(*, looking: bool) -> tuple[_Seen, Any]:
            states = dict.fromkeys(self._states[site])
            seen = _Seen(start, CountedOps(looked=looking), states)
            known = [*given.tensors, *(tensors[name] for name in self._states[site])]
            with (
                self.sets.inside(),
                counting(seen.ops),
                self.origins.within(site, given.tensors, states),
                self.aside.within(site, seen.sets),
            ):
                with InnerGradients(site, known):
                    return seen, call.run(*args, **kwargs)

        try:
            seen, result = run(looking=True)
        except RuntimeError as error:  # torch.func, and kernels that know no hooks
            if not any(words in str(error) for words in NO_HOOKS):
                raise
            seen, result = run(looking=False)
        if self._generators.places() != drawn:
            raise CaptureError(
                f"{site} draws from Python's random or from numpy.random, whose numbers differ "
                "from rank to rank",
                hint="draw with torch",
            )
        given.check_untouched(seen.ops)
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

    def _owned(self, given: Sequence[Tensor]) -> Iterator[tuple[Tensor, str | int]]:
        for name, tensor in named(self._model).items():
            if not is_sparse(tensor):  # a buffer that an earlier call has assigned has its own name
                yield tensor, self._names.get(id(tensor), name)
        yield from ((tensor, number) for number, tensor in enumerate(given))
