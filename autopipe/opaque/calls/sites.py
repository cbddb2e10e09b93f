"""Stand in for calls of a model's modules and methods, while the rest of the model runs.

    with standing_in(model, [Site("encoder.moe", "forward")], stand_in):
        model(x)        encoder.moe(h)  ->  stand_in(SiteCall(site, 0, run), (h,), {})

`SiteCall.run(h)` is the call itself: the module with its hooks, or the method. The loss is a site
as well, `Site("", LOSS)`, of a model that runs `with_loss`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from autopipe.frontend.loss import Loss, counted_by_tensor
from autopipe.ir.torch_private import hooks_put_aside
from autopipe.opaque.calls import outlined
from autopipe.planfile.regions import LOSS, WHOLE, Region


class Site(NamedTuple):
    """A method of a module of the model; `regions.WHOLE` is the call of the module."""

    module: str
    method: str

    def holds(self, other: Site) -> bool:
        """Whether every call of the other site is inside a call of this one."""
        inside = not self.module or f"{other.module}.".startswith(f"{self.module}.")
        return self != other and self.method == WHOLE and inside and other.method != LOSS

    def __str__(self) -> str:
        """`the module 'encoder.moe'`, `route() of the module 'encoder'`, `the loss`."""
        if self.method == LOSS:
            return "the loss"
        module = f"module {self.module!r}" if self.module else "model"
        return f"the {module}" if self.method == WHOLE else f"{self.method}() of the {module}"


def site_of(region: Region) -> Site:
    """The site of a region."""
    return Site(region.module, region.method)


class LossCall:
    """A loss as a method of a model, so that a traceback shows its call."""

    def __init__(self, loss: Loss) -> None:
        self.__wrapped__ = loss  # as functools.wraps has it: where it begins is read off

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """The loss; a count beside it as a tensor, for that of chosen tokens is no fixed number."""
        return counted_by_tensor(self.__wrapped__(outputs, batch))


@contextmanager
def with_loss(model: nn.Module, loss: Loss | None) -> Iterator[None]:
    """Within, the model has its loss as a method, for `standing_in`."""
    if loss is None or LOSS in vars(model):
        yield
        return
    vars(model)[LOSS] = LossCall(loss)
    try:
        yield
    finally:
        del vars(model)[LOSS]


class Wider(Exception):
    """Raised where a call cannot be one op; the call around it may be."""

    def __init__(self, site: Site, why: str) -> None:
        super().__init__(why)
        self.site = site


class SiteCall(NamedTuple):
    """A call of a site: the `number`-th in this forward; `run` makes it."""

    site: Site
    number: int
    run: Callable[..., Any]


StandIn = Callable[[SiteCall, tuple[Any, ...], Mapping[str, Any]], Any]
"""What is called in the place of a site: the call, its arguments and its arguments by name."""


@contextmanager
def standing_in(model: nn.Module, sites: Sequence[Site], stand_in: StandIn) -> Iterator[None]:
    """Within, the outermost calls of the sites go to `stand_in`."""
    numbers: Counter[Site] = Counter()
    inside: list[Site] = []
    with ExitStack() as until:
        for site in sites:
            module = model.get_submodule(site.module)
            until.enter_context(_standing_in_one(module, site, numbers, inside, stand_in))
        yield


@contextmanager
def _standing_in_one(
    module: nn.Module, site: Site, numbers: Counter[Site], inside: list[Site], stand_in: StandIn
) -> Iterator[None]:
    method, before = _method(module, site.method), vars(module).get(site.method)
    of_module = site.method == WHOLE
    hooks_aside = ExitStack()

    def run(*args: Any, **kwargs: Any) -> Any:
        leave()
        inside.append(site)
        try:
            return _called(module)(*args, **kwargs) if of_module else method(*args, **kwargs)
        finally:
            inside.pop()
            enter()

    @functools.wraps(method)
    def forwarded(*args: Any, **kwargs: Any) -> Any:
        if inside:
            return method(*args, **kwargs)
        numbers[site] += 1
        return stand_in(SiteCall(site, numbers[site] - 1, run), args, kwargs)

    def enter() -> None:
        if of_module:
            hooks_aside.enter_context(hooks_put_aside(module))
        vars(module)[site.method] = forwarded

    def leave() -> None:
        hooks_aside.close()
        vars(module).pop(site.method)
        if before is not None:
            vars(module)[site.method] = before

    enter()
    try:
        yield
    finally:
        leave()


def call(model: nn.Module, site: Site) -> Callable[..., Any]:
    """The call of a site: the module with its hooks, or the method."""
    module = model.get_submodule(site.module)
    return _called(module) if site.method == WHOLE else _method(module, site.method)


def _called(module: nn.Module) -> Callable[..., Any]:
    """torch's own call of a module, forward and hooks; a `__call__` of the module's class is
    outside of it, and so outside of what stands in."""
    return functools.partial(nn.Module.__call__, module)


def _method(module: nn.Module, name: str) -> Callable[..., Any]:
    """A method, which may be lines of another one."""
    if outlined.is_outlined(name):
        outlined.outline(type(module), name)
    found: Callable[..., Any] = getattr(module, name)
    return found


def state_of(model: nn.Module, name: str) -> Any:
    """The parameter or buffer of a name."""
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)


def left_in(model: nn.Module, site: Site) -> dict[str, Tensor]:
    """The tensors in plain attributes of a site's module and of those in it, by their names."""
    modules = model.get_submodule(site.module).named_modules(prefix=site.module)
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in modules
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def with_siblings(model: nn.Module, site: Site) -> list[Site]:
    """The site, and the same method of modules whose path differs in numbers only.

    A call that cannot be captured in one layer cannot be in any: `h.0.moe`, `h.1.moe`, ...
    """
    form, kind = _form(site.module), type(model.get_submodule(site.module))
    return [
        Site(path, site.method)
        for path, module in model.named_modules()
        if type(module) is kind and _form(path) == form
    ]


def _form(path: str) -> str:
    return re.sub(r"\d+", "0", path)


def outermost(sites: Sequence[Site]) -> tuple[Site, ...]:
    """The sites without those that lie within another one, each once."""
    known = dict.fromkeys(sites)
    return tuple(site for site in known if not any(other.holds(site) for other in known))
