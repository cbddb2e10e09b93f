"""Trace a model; what cannot be captured runs as it is, in as small a call as can be.

trace        ->  refused in encoder.route(): the call of encoder.route, and of its siblings
measure      ->  it gives a tensor whose size depends on values: the call of encoder
measure      ->  a `Region` for each
trace again  ->  goes well
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from autopipe.errors import Uncaptured
from autopipe.opaque.culprits import made_so, sites_of
from autopipe.opaque.sites import Site, Wider, outermost, with_siblings
from autopipe.planfile.regions import LOSS, WHOLE, Region

T = TypeVar("T")

MOST = 24
"""Attempts, each with other calls."""

Measure = Callable[[Sequence[Site], Mapping[Site, str]], tuple[Region, ...]]
"""Gives the regions of some sites, or raises `Wider`; the texts say why each cannot be captured."""


@dataclass
class _Trouble:
    """One thing that cannot be captured, and the calls around it, the innermost first."""

    error: Uncaptured
    around: list[Site]
    wider: str = ""
    tried: tuple[Site, ...] = ()

    def sites(self, model: nn.Module) -> dict[Site, str]:
        """The innermost call that may still do, and its siblings; why they cannot be captured."""
        if not self.around:
            raise _refusal(self.error, self.wider, self.tried)
        return dict.fromkeys(with_siblings(model, self.around[0]), self.error.message)


def with_regions(
    model: nn.Module,
    twins: Callable[[], Sequence[nn.Module]],
    trace: Callable[[tuple[Region, ...]], T],
    measure: Measure,
) -> T:
    """The trace of a model, with regions where it needs them; most need none.

    Args:
        twins: gives other models of the same modules that may have run in the place of `model`.

    Raises:
        CaptureError: not even its largest parts can run as they are.
    """
    troubles = [
        _Trouble(Uncaptured(why), _modules_around(site)) for site, why in made_so(model).items()
    ]
    shared: list[Site] = []
    for _ in range(MOST):
        why = {site: text for one in troubles for site, text in one.sites(model).items()}
        sites = (*outermost(list(why)), *(site for site in shared if site in why))
        try:
            return trace(measure(sites, why) if sites else ())
        except Wider as wider:
            one = next(one for one in troubles if wider.site in one.sites(model))
            one.tried += (one.around.pop(0),)
            one.wider = f"{one.tried[-1]} cannot, for {wider}"
        except Uncaptured as error:
            around = [site for site in sites_of(error, [model, *twins()]) if site not in sites]
            if not around:
                raise _refusal(error, "") from error
            if around[0] in why:  # within a wider one, and called from outside of it too
                shared.append(around[0])
                continue
            troubles.append(_Trouble(error, around))
    raise troubles[-1].error


def _modules_around(site: Site) -> list[Site]:
    """The modules around a module, itself first."""
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
