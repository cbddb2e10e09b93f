"""Find calls that share something with code around them besides arguments, results and attributes.

    def route(self, h):                      no trace runs a call that runs as it is: code behind it
        library.SCALE = float(h.mean())      would have the SCALE of some earlier rows for good, and
        return h[h > 0].sum()                on other stages nobody sets it

That code computes with it is found by a run in which each call

    finds         what stood there before the model ran, in all places that can be listed
                  (`holders_of`): the code before it does not run where the call does
    leaves        what stood there before the call, in these places; and elsewhere (in a file of an
                  installed package, bytes, an object of C) what it leaves that is given other rows
    reads         plain tensors in the place of its parameters
    gives         tensors with memory of their own, as an op does: what writes one in place does not
                  write another
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopipe.eager.assigned_buffers import as_before
from autopipe.eager.holders import Holder, holders_of
from autopipe.eager.kept import KeptNow, restoring, restoring_kept
from autopipe.frontend.transformers_adapter import without_cache
from autopipe.ir.torch_private import no_function_modes, storage_key, tree_map
from autopipe.opaque.calls.sites import Site, SiteCall, Wider, site_of, standing_in, state_of
from autopipe.opaque.calls.states import Homes
from autopipe.opaque.calls.trees import distinct_tensors, parts_of, to_text, whole_of
from autopipe.opaque.measure import Fails
from autopipe.planfile.regions import LOSS, Region
from autopipe.tracing.capture.program import Program
from autopipe.tracing.module_calls import CallsAround

Run = Callable[[], AbstractContextManager[Callable[[], object]]]
"""Gives a `with` block that gives a function to run the model, and at its end undoes changes."""

_Key = tuple[Site, int]


class _Gave(NamedTuple):
    """What a call has given: its tree as text, and copies of its tensors."""

    tree: str
    tensors: list[Tensor]


@dataclass
class _RunOfSites:
    """A run: the calls of torch outside of the sites, and what each call of a site has given.

    `names` are those of the values that were put back; `loss` is None where the run has failed.
    """

    outside: Mapping[str, Sequence[object]] = field(default_factory=dict)
    gave: dict[_Key, _Gave] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    loss: _Gave | None = None


def check(
    eager: Program, regions: Sequence[Region], run: Run, other_runs: Sequence[Run], context: Context
) -> None:
    """Refuse regions that share something with code around them.

    Args:
        eager: the program that runs, whose model has its weights.
        regions: the calls, as they were measured.
        run: runs it on a few rows.
        other_runs: run it on other rows.
        context: context variables as they were before the model ran.

    Raises:
        Wider: names the call.
        Fails: the model does not run where its calls are watched.
    """
    watched = _WatchedSites(eager, regions, context)
    sites = watched.sites
    if not sites:
        return
    try:
        usual = watched.seen(run, ())
    except Exception as error:  # whatever the user's code raises where it is watched
        raise Fails(sites[0], error) from error
    watched.note_arguments(other_runs)
    all_of_them = watched.seen(run, sites)
    if all_of_them.outside != usual.outside:
        for site in sites:
            seen = watched.seen(run, [site])
            if seen.outside != usual.outside:
                raise Wider(site, f"it {_what(seen.names)}, with which other code computes")
        raise Wider(sites[0], f"it {_what(all_of_them.names)}, with which other code computes")
    for key, known in usual.gave.items():
        given = all_of_them.gave.get(key)
        if key[0].method != LOSS and not _same(known, given):
            raise Wider(key[0], _OTHERWISE)
    if not _same(usual.loss, all_of_them.loss):
        alone = (site for site in sites if not _same(usual.loss, watched.seen(run, [site]).loss))
        raise Wider(next(alone, sites[0]), _IN_PLACE)


_OTHERWISE = (
    "it computes otherwise without what other code sets for it, or with plain tensors in the place "
    "of its parameters"
)
_IN_PLACE = "other code writes in place what shares memory with its results"


def _what(names: Sequence[str]) -> str:
    return f"sets {', '.join(names)}" if names else "leaves something outside of modules"


class _WatchedSites:
    """A model whose sites are watched in some runs."""

    def __init__(self, eager: Program, regions: Sequence[Region], context: Context) -> None:
        self._eager, self._context = eager, context
        self.sites = [*dict.fromkeys(map(site_of, regions))]
        self._states = {(site_of(region), region.call): region.states for region in regions}
        self._homes = Homes(eager.model)
        self._others: defaultdict[_Key, list[tuple[Any, Any]]] = defaultdict(list)

    def note_arguments(self, runs: Sequence[Run]) -> None:
        """Note what the calls are given in runs on other rows."""

        def called(call: SiteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            self._others[call.site, call.number].append(tree_map(_copied, (args, dict(kwargs))))
            return call.run(*args, **kwargs)

        for run in runs:
            with run() as once, torch.enable_grad():
                with standing_in(self._eager.model, self.sites, called), suppress(Exception):
                    self._context.copy().run(once)

    def seen(self, run: Run, disturbed: Sequence[Site]) -> _RunOfSites:
        """A run in which the calls of some sites find and leave something else than they do."""
        found, names = _RunOfSites(), dict[str, None]()
        inside: list[str | None] = [""]
        around = CallsAround(lambda: inside[-1])
        places = self._context.copy().run(_Places, self._eager) if disturbed else None

        def called(call: SiteCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            part = f"{call.site} {call.number}"
            inside.append(part)
            try:
                if places is None or call.site not in disturbed:
                    result = call.run(*args, **kwargs)
                else:
                    first = places.as_at_first(call.site)
                    with first as changed, without_cache(self._eager.model):
                        inside.append(None)
                        self._make_before(call)
                        inside.pop()
                        with self._lent(call):
                            result = self._context.copy().run(call.run, *args, **kwargs)
                        names.update(dict.fromkeys(changed()))
                    inside.append(None)
                    self._write_over(call)
                    inside.pop()
            finally:
                inside.pop()
            around.returned(part, result)
            found.gave[call.site, call.number] = _result(result)
            if call.site in disturbed:
                return self._apart(result, (args, kwargs), around)
            return result

        with run() as once, torch.enable_grad(), around:
            with standing_in(self._eager.model, self.sites, called):
                # A call, and the code behind it, may miss what was put back.
                with suppress(Exception) if disturbed else nullcontext():
                    found.loss = _result(self._context.copy().run(once))
        found.outside = around.of_others([part for part in around.parts if part])
        found.names = [*names]
        return found

    @contextmanager
    def _lent(self, call: SiteCall) -> Iterator[None]:
        """Within, plain tensors are in the place of the parameters that a call reads, as an op has
        them: no `nn.Parameter`, no leaf, none of a user's class."""
        originals = {name: state_of(self._eager.model, name) for name in self._states[call[:2]]}
        with no_function_modes(), torch.enable_grad():
            self._homes.lend({name: state.view_as(state) for name, state in originals.items()})
        try:
            yield
        finally:
            self._homes.lend(originals)

    def _apart(self, result: Any, arguments: Any, around: CallsAround) -> Any:
        """A result whose tensors have memory of their own, as those of an op have."""
        with no_function_modes():
            tensors = distinct_tensors(result)
            states = [*self._eager.model.parameters(), *self._eager.model.buffers()]
            taken = set(map(storage_key, (*distinct_tensors(arguments), *states)))
            apart = []
            for tensor in tensors:
                shared = storage_key(tensor) in taken
                apart.append(tensor.clone() if shared else tensor)
                around.stands_for(apart[-1], tensor)
                taken.add(storage_key(apart[-1]))
            return whole_of(parts_of(result, tensors), apart)

    def _make_before(self, call: SiteCall) -> None:
        """Make a call for other rows, as for an earlier micro-batch; attributes and buffers are put
        back, as a region has them for each micro-batch."""
        attributes = [(vars(module), {**vars(module)}) for module in self._eager.modules()]
        with as_before(*self._eager.parts, holders=()):
            self._on_other_rows(call, self._context.copy())
        for now, before in attributes:
            now.clear()
            now.update(before)

    def _write_over(self, call: SiteCall) -> None:
        """Make a call for other rows; what can be listed is put back."""
        with restoring(*self._eager.parts):
            self._on_other_rows(call, copy_context())

    def _on_other_rows(self, call: SiteCall, context: Context) -> None:
        for args, kwargs in self._others[call.site, call.number]:
            with no_function_modes(), torch.random.fork_rng(devices=[]):
                with suppress(Exception):  # whatever the user's code raises on these rows
                    given = tree_map(_copied, (args, kwargs))
                    context.run(call.run, *given[0], **given[1])


class _Places:
    """The places where a model and its loss keep something. Made before the model runs."""

    def __init__(self, eager: Program) -> None:
        attributes = [vars(module) for module in eager.modules()]
        self._of_modules, self._elsewhere = list[Holder](), list[Holder]()
        for holder in holders_of(*eager.parts):
            own = any(holder.entries is each for each in attributes)
            (self._of_modules if own else self._elsewhere).append(holder)
        self._model = eager.model
        self._first = KeptNow([*self._elsewhere, *self._of_modules])

    @contextmanager
    def as_at_first(self, site: Site) -> Iterator[Callable[[], tuple[str, ...]]]:
        """Within, they hold what they did before the model ran, as on another stage; afterwards,
        what they do now. So do the attributes of the modules outside of a site.

        Yields:
            a function that names the values that have changed within.
        """
        inside = {id(vars(module)) for module in self._model.get_submodule(site.module).modules()}
        own = [holder for holder in self._of_modules if id(holder.entries) in inside]
        others = [holder for holder in self._of_modules if id(holder.entries) not in inside]
        with restoring_kept([*self._elsewhere, *others]):
            now = KeptNow(own)
            self._first.put_back([*self._elsewhere, *others])
            self._first.put_contents_back(own)
            begin = KeptNow([*self._elsewhere, *others]), KeptNow(own)
            try:
                yield lambda: (*begin[0].changed(), *begin[1].changed_contents())
            finally:
                now.put_contents_back(own)


def _copied(arg: Any) -> Any:
    """A copy of a tensor, from which a gradient can be taken if it can be from the tensor."""
    if not isinstance(arg, Tensor) or isinstance(arg, nn.Parameter):
        return arg
    copied = arg.detach().clone()
    return copied.requires_grad_().view_as(copied) if arg.requires_grad else copied


def _result(result: Any) -> _Gave:
    with no_function_modes():
        tensors = distinct_tensors(result)
        return _Gave(to_text(parts_of(result, tensors)), [t.detach().clone() for t in tensors])


def _same(first: _Gave | None, second: _Gave | None) -> bool:
    if first is None or second is None:
        return False
    alike = first.tree == second.tree and len(first.tensors) == len(second.tensors)
    pairs = zip(first.tensors, second.tensors, strict=False)
    return alike and all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same values but for roundings: a copy may lie in memory in
    another order, and a sum over it goes another way."""
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    close = torch.finfo(first.dtype).eps ** 0.75
    return torch.allclose(first, second, rtol=close, atol=close, equal_nan=True)
