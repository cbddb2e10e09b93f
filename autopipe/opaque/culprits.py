"""Which call of a user's module or method cannot be captured: by an error, or by its hooks.

model.forward  ->  encoder.forward  ->  encoder.route  ->  x[mask]: refused
                                        ^^^^^^^^^^^^^ the innermost; then those around it
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch import nn

from autopipe.errors import Uncaptured
from autopipe.ir.torch_private import module_backward_hooks
from autopipe.opaque.scripted import Scripted
from autopipe.opaque.sites import LossCall, Site
from autopipe.planfile.regions import COMPILED, LOSS, WHOLE


def sites_of(error: Uncaptured, models: Sequence[nn.Module]) -> list[Site]:
    """The calls around the place of an error, the innermost first; the model's own is left out
    unless the error says otherwise.

    Args:
        models: the model, and others of the same modules that may have run in its place.
    """
    paths = {id(module): path for model in models for path, module in model.named_modules()}
    found = [site for frame in _deepest(error, paths) if (site := _site(frame, paths)) is not None]
    if not found and error.module == LOSS:
        found.append(Site("", LOSS))
    elif not found and error.module:
        path = error.module
        while path:
            found.insert(0, Site(path, WHOLE))
            path = path.rpartition(".")[0]
    own = Site("", WHOLE)
    return [site for site in dict.fromkeys(reversed(found)) if error.whole or site != own]


def _deepest(error: BaseException, paths: dict[int, str]) -> list[FrameType]:
    """Of the frames that an error and its causes went through those in the model, the most."""
    best: list[FrameType] = list(getattr(error, "frames", ()))
    one: BaseException | None = error
    while one is not None:
        frames = [frame for frame, _ in traceback.walk_tb(one.__traceback__)]
        mine = [frame for frame in frames if _site(frame, paths) is not None]
        best = mine if len(mine) > len(best) else best
        one = one.__cause__ or one.__context__
    return best


def _site(frame: FrameType, paths: dict[int, str]) -> Site | None:
    """The call that a frame runs, if it is one of a module's forward or of a user's method."""
    own_name, name = frame.f_code.co_varnames[:1], frame.f_code.co_name
    module: Any = frame.f_locals.get(own_name[0]) if own_name else None  # most write `self`
    if isinstance(module, LossCall):
        return Site("", LOSS)
    if not isinstance(module, nn.Module) or id(module) not in paths:
        return None
    own = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
    if own is None or not callable(vars(own)[name]):
        return None
    torchs = own.__module__.partition(".")[0] == "torch"
    if name != WHOLE and (torchs or name.startswith("__")):
        return None
    return Site(paths[id(module)], name)


def made_so(model: nn.Module) -> dict[Site, str]:
    """The modules that no trace can look into, whatever they are given: why, by their sites."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Scripted):
            found[Site(path, WHOLE)] = COMPILED
        if path and module_backward_hooks(module):
            found[Site(path, WHOLE)] = f"{path} has a backward hook"
    return found
