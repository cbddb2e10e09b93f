"""The attributes of modules that are set before a call, and those that a call sets itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import nn

from autopipe.ir.torch_patches import seeing_sets
from autopipe.opaque.calls.names_in_code import classes, loads, words
from autopipe.opaque.calls.sites import Site
from autopipe.opaque.calls.trees import (
    NotPlain,
    distinct_tensors,
    from_text,
    parts_of,
    to_text,
    whole_of,
)
from autopipe.planfile.regions import LOSS, NOTHING, WHOLE


class SetBefore:
    """Notes the attributes of modules that a forward sets before a call that reads them.

        self.part.mode = "tanh"; h = self.part(h)      {"part.mode": "tanh"}
        self.part.eval(); h = self.part(h)             {"part.training": False, ...}
        block.H, block.W = h, w; x = block(x)          {"block.H": 14, "block.W": 14}

    Made before the model runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[tuple[nn.Module, str], None] = {}
        self._inside = False

    def noting(self) -> AbstractContextManager[None]:
        """Within, the forward runs, and what it sets is noted."""
        return seeing_sets(self._note)

    def _note(self, module: nn.Module, name: str) -> None:
        if not self._inside:
            self._known[module, name] = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within, a site's call runs; what it sets itself is not noted."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def before(self, site: Site) -> str:
        """The noted attributes of a site's modules that its code may read, with values, as text."""
        if site.method == LOSS:
            return NOTHING
        named = self._model.get_submodule(site.module).named_modules(prefix=site.module)
        paths = {module: path for path, module in named}
        found = {
            f"{paths[module]}.{name}".lstrip("."): vars(module)[name]
            for module, name in self._known
            if module in paths and name in vars(module) and _may_read([*paths], name)
        }
        return _as_text({name: found[name] for name in sorted(found) if _is_plain(found[name])})


def differ(model: nn.Module, finds: str) -> bool:
    """Whether a model's attributes differ from those that `SetBefore.before` gave."""
    homes = {name: _home(model, name) for name in from_text(finds)}
    now = {name: attributes.get(leaf, attributes) for name, (attributes, leaf) in homes.items()}
    return not all(map(_is_plain, now.values())) or _as_text(now) != finds


def put(model: nn.Module, finds: str) -> None:
    """Set a model's attributes to those that `SetBefore.before` gave."""
    for name, value in whole_of(from_text(finds), ()).items():
        attributes, leaf = _home(model, name)
        attributes[leaf] = value


def _home(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, leaf = name.rpartition(".")
    return vars(model.get_submodule(path)), leaf


_TORCHS = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set)


class Change(NamedTuple):
    """An attribute that a call has changed.

    Attributes:
        name: its name in the model, `part.mode`; in `module` it is `leaf`.
        value: its value after the call.
        replaced: whether that is another object than before, and not the same list with more in it.
    """

    name: str
    module: nn.Module
    leaf: str
    value: object
    replaced: bool


class BeforeCall:
    """The attributes of a module and of those in it before a call, to find those that it sets."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self._model, self._path = model, path
        self._inner = dict(self._modules())
        self._values = {inner: {**vars(module)} for inner, module in self._inner.items()}
        self._lengths = {
            (inner, name): len(value)
            for inner, attributes in self._values.items()
            for name, value in attributes.items()
            if name not in _TORCHS and isinstance(value, _CONTAINERS)
        }

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self._model.get_submodule(self._path).named_modules(prefix=self._path)

    def set_since(self) -> dict[str, dict[str, Any]]:
        """The attributes that are other objects than before: path of a module -> name -> value."""
        return {
            path: {
                name: value
                for name, value in vars(module).items()
                if self._values[path].get(name, self) is not value
            }
            for path, module in self._inner.items()
        }

    def changes(self) -> Iterator[Change]:
        """The attributes that have another value than before, or hold more or less.

        Private ones of torch do not count.
        """
        for path, module in self._modules():
            known = self._values.get(path, {})
            of_torch = type(module).__module__.startswith("torch.")
            for name, value in vars(module).items():
                if name in _TORCHS or (of_torch and name.startswith("_")):
                    continue
                before = known.get(name, NotImplemented)
                length = len(value) if isinstance(value, _CONTAINERS) else None
                if before is value and self._lengths.get((path, name)) == length:
                    continue
                plain = type(before) is type(value) and _is_plain(before) and _is_plain(value)
                if not plain or before != value:
                    full_name = f"{path}.{name}".lstrip(".")
                    yield Change(full_name, module, name, value, replaced=before is not value)


def read_by_others(model: nn.Module, site: Site, name: str, loss: object) -> bool:
    """Whether code outside of a site may read an attribute, by its name: all methods of the
    model's classes count, but those that the site's own method calls, and the loss."""
    leaf = name.rpartition(".")[2]
    inner = model.get_submodule(site.module)
    if leaf == "training":
        return True
    called = set[str]()  # by the site's method
    if site.method != WHOLE:
        list(words(type(inner), site.method, called))
    own = classes(inner.modules() if site.method == WHOLE else [inner])
    functions = [
        method
        for kind in classes(model.modules())
        for word, method in vars(kind).items()
        if kind not in own or (site.method != WHOLE and word not in called)
    ]
    of_loss = (method for kind in classes([loss]) for method in vars(kind).values())
    return loads([*functions, loss, *of_loss], leaf)


def _as_text(values: Mapping[str, Any]) -> str:
    return to_text(parts_of(dict(values), ()))


def _is_plain(value: Any) -> bool:
    if distinct_tensors(value):  # a tensor has its origin (`origins`)
        return False
    try:
        to_text(parts_of(value, ()))
    except NotPlain:
        return False
    return True


def _may_read(modules: Sequence[nn.Module], attribute: str) -> bool:
    """Whether code of one of the modules reads an attribute of this name."""
    if attribute == "training":
        return True
    return loads((f for kind in classes(modules) for f in vars(kind).values()), attribute)
