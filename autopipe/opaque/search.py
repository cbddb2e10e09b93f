"""Trace a model, and find the smallest calls that run as they are where it cannot be captured.

trace        ->  refused in encoder.route(): try the call of encoder.route, and of its siblings
measure      ->  its result has a size that depends on values: try the call of encoder
measure      ->  a `Region` for each
trace again  ->  succeeds

Where no call can run as it is, lines of a method are tried (`outlined`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from autopipe.errors import CaptureError, SizesByValues, Uncaptured
from autopipe.ir.torch_private import module_backward_hooks
from autopipe.opaque.calls import outlined
from autopipe.opaque.calls.sites import LossCall, Site, Wider, outermost, site_of, with_siblings
from autopipe.opaque.scripted import Scripted
from autopipe.planfile.regions import COMPILED, LOSS, WHOLE, Region

T = TypeVar("T")

MOST = 24
"""Attempts, each with other calls."""

Measure = Callable[[Sequence[Site], Mapping[Site, str]], tuple[Region, ...]]
"""Gives the regions of sites, each with the reason why it is one; or raises `Wider`."""


@dataclass
class _Trouble:
    """A place that cannot be captured, and the calls around it, the innermost first."""

    error: Uncaptured
    around: list[Site]
    wider: str = ""
    tried: tuple[Site, ...] = ()

    def sites(self, model: nn.Module) -> dict[Site, str]:
        """The innermost call that was not ruled out, and its siblings, each with the reason."""
        if not self.around:
            raise _refusal(self.error, self.wider, self.tried)
        return dict.fromkeys(with_siblings(model, self.around[0]), self.error.message)


def with_regions(
    model: nn.Module,
    twins: Callable[[], Sequence[nn.Module]],
    trace: Callable[[tuple[Region, ...]], T],
    measure: Measure,
) -> T:
    """The trace of a model, with regions where it needs them; most models need none.

    A region cannot be cut. So for one that is most of the model (`forward` calls `training_step`),
    lines in it are tried instead.

    Args:
        twins: gives other models of the same modules that may have run in the place of `model`.
        trace: traces the model with given regions.
        measure: measures sites.

    Raises:
        CaptureError: not even the largest calls can run as they are.
    """
    found, regions = _search(model, twins, trace, measure, ())
    too_large = {site_of(region) for region in regions if _is_most(model, region)}
    if too_large:
        with suppress(CaptureError), outlined.put_back_after_errors():
            found, _ = _search(model, twins, trace, measure, too_large)
    return found


def _is_most(model: nn.Module, region: Region) -> bool:
    """Whether a region is a call that reads more than half of all trained elements."""
    if region.method == LOSS or outlined.is_outlined(region.method):
        return False
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    return 2 * sum(sizes.get(name, 0) for name in region.states) > sum(sizes.values())


def _search(
    model: nn.Module,
    twins: Callable[[], Sequence[nn.Module]],
    trace: Callable[[tuple[Region, ...]], T],
    measure: Measure,
    unwanted: Collection[Site],
) -> tuple[T, tuple[Region, ...]]:
    """A trace and its regions; of a call in `unwanted`, only lines in it may be regions.

    This gives up where sizes depend on values. Lines around `torch.where(chosen == 3)` may give
    tensors that have the same size only in the few rows that are measured.
    """
    troubles = [
        _Trouble(Uncaptured(why), _modules_around(site))
        for site, why in _untraceable(model).items()
    ]
    shared: list[Site] = []
    for _ in range(MOST):
        why = {site: text for trouble in troubles for site, text in trouble.sites(model).items()}
        sites = (*outermost(list(why)), *(site for site in shared if site in why))
        try:
            regions = measure(sites, why) if sites else ()
            return trace(regions), regions
        except Wider as wider:
            trouble = next(trouble for trouble in troubles if wider.site in trouble.sites(model))
            trouble.tried += (trouble.around.pop(0),)
            trouble.wider = f"{trouble.tried[-1]} cannot, for {wider}"
        except Uncaptured as error:
            if unwanted and isinstance(error, SizesByValues):
                raise
            frames = _deepest(error, [model, *twins()])
            around = _around(error, frames, unwanted)
            around = [site for site in around if site not in sites]
            if not around:
                raise _refusal(error, "") from error
            if around[0] in why:  # within a wider one, and called from outside of it too
                shared.append(around[0])
                continue
            troubles.append(_Trouble(error, around))
    raise troubles[-1].error


def _modules_around(site: Site) -> list[Site]:
    """The module of a site and the modules around it, the innermost first."""
    parts = site.module.split(".")
    return [Site(".".join(parts[:n]), WHOLE) for n in range(len(parts), 0, -1)]


def _refusal(error: Uncaptured, wider: str, sites: Sequence[Site] = ()) -> Uncaptured:
    first = f"{error.hint}; or " if error.hint else ""
    if any(site.method == LOSS for site in sites):
        return type(error)(
            error.message,
            hint=f"{first}let the loss compute with what it is given alone, the outputs and the "
            f"batch, and give a scalar: it then runs as it is ({wider})",
        )
    return type(error)(
        error.message,
        hint=f"{first}move these lines to a method, or to a module, that takes tensors and gives "
        f"tensors of fixed sizes: it then runs as it is{f' ({wider})' if wider else ''}",
    )


# Where an error was, by its frames


class _Frame(NamedTuple):
    """A call in the model that an error went through: the code that runs, and its line."""

    site: Site
    kind: type
    code: CodeType
    line: int


def _deepest(error: Uncaptured, models: Sequence[nn.Module]) -> list[_Frame]:
    """The frames in the model that an error went through: of it and its causes, the longest list.

    Args:
        models: the model, and others of the same modules that may have run in its place.
    """
    known = {
        id(vars(module)): (path, module)
        for model in models
        for path, module in model.named_modules()
    }

    def in_model(frames: Iterable[tuple[FrameType, int]]) -> list[_Frame]:
        found = (_frame(frame, line, known) for frame, line in frames)
        return [frame for frame in found if frame is not None]

    best = in_model(error.frames)
    cause: BaseException | None = error
    while cause is not None:
        passed = in_model(traceback.walk_tb(cause.__traceback__))
        best = passed if len(passed) > len(best) else best
        cause = cause.__cause__ or cause.__context__
    return best


def _around(error: Uncaptured, frames: Sequence[_Frame], unwanted: Collection[Site]) -> list[Site]:
    """The sites to try for an error: calls, then lines, then the model's own forward.

    The model's own forward comes last, and only if the error allows it (`whole`): such a model
    cannot be cut. An unwanted call is replaced by the lines in it, and ends the list.
    """
    calls, model_forward = _calls_around(error, frames), Site("", WHOLE)
    for number, site in enumerate(calls):
        if site in unwanted:
            begin = next((n for n, frame in enumerate(frames) if frame.site == site), len(frames))
            return [*calls[:number], *_lines_of(error, frames[begin:])]
    within = [*(site for site in calls if site != model_forward), *_lines_of(error, frames)]
    return [*within, model_forward] if error.whole and model_forward in calls else within


def _calls_around(error: Uncaptured, frames: Sequence[_Frame]) -> list[Site]:
    """The calls around the place of an error, the innermost first."""
    found = [frame.site for frame in frames]
    if not found and error.module == LOSS:
        found.append(Site("", LOSS))
    elif not found and error.module:
        path = error.module
        while path:
            found.insert(0, Site(path, WHOLE))
            path = path.rpartition(".")[0]
    return list(dict.fromkeys(reversed(found)))


def _lines_of(error: Uncaptured, frames: Sequence[_Frame]) -> list[Site]:
    """Sites of lines around the place of an error that can be a method, the innermost first."""
    names = (
        Site(frame.site.module, name)
        for frame in (reversed(frames) if error.lines else ())
        if frame.site.method != LOSS
        for name in outlined.candidates(frame.kind, frame.code, frame.line)
    )
    return list(dict.fromkeys(names))


def _frame(
    frame: FrameType, line: int, known: Mapping[int, tuple[str, nn.Module]]
) -> _Frame | None:
    """A frame, if it runs a module's forward, a user's method or the loss.

    Args:
        known: the path and the module to the id of a module's attributes. Where a model has one
            module in two places, export calls copies of its modules, which share the attributes.
    """
    own_name, name = frame.f_code.co_varnames[:1], frame.f_code.co_name
    module: Any = frame.f_locals.get(own_name[0]) if own_name else None  # most write `self`
    if isinstance(module, LossCall):
        return _Frame(Site("", LOSS), LossCall, frame.f_code, line)
    if not isinstance(module, nn.Module) or id(vars(module)) not in known:
        return None
    path, module = known[id(vars(module))]
    owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    if owner is None or not callable(vars(owner)[name]):
        return None
    torchs = owner.__module__.partition(".")[0] == "torch"
    if name != WHOLE and (torchs or name.startswith("__")):
        return None
    return _Frame(Site(path, name), type(module), frame.f_code, line)


def _untraceable(model: nn.Module) -> dict[Site, str]:
    """The sites of modules that no trace can look into in any call, each with the reason."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Scripted):
            found[Site(path, WHOLE)] = COMPILED
        if path and module_backward_hooks(module):
            found[Site(path, WHOLE)] = f"{path} has a backward hook"
    return found
