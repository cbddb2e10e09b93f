"""The states that a call may read, the attributes set before it, and those that it sets itself.

the call of a module      all parameters and buffers of the module, though one run may not read
                          some of them (experts without rows)
the call of a method      those that are named in its code or in methods that it calls; all of the
                          module's if its code looks them up otherwise (`getattr`)
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopipe.eager.contents import MOST_ELEMENTS
from autopipe.frontend.user_lines import codes_in
from autopipe.ir.tensors import attributes_of, bytes_of
from autopipe.ir.torch_patches import seeing_sets
from autopipe.ir.torch_private import lend, version
from autopipe.opaque.sites import Site, Wider, call
from autopipe.opaque.sparse import is_sparse
from autopipe.opaque.trees import (
    NotPlain,
    distinct_tensors,
    from_text,
    parts_of,
    to_text,
    whole_of,
)
from autopipe.planfile.regions import LOSS, NOTHING, WHOLE


def named(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a model under all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by its identity; a sparse one is no state."""
    found: dict[int, str] = {}
    for name, tensor in named(model).items():
        if not is_sparse(tensor):
            found.setdefault(id(tensor), name)
    return found


class Homes:
    """The places of a model's parameters and buffers, where other tensors can be lent to it."""

    def __init__(self, model: nn.Module) -> None:
        names: dict[int, list[str]] = {}
        for named_tensors in (model.named_parameters, model.named_buffers):
            for name, tensor in named_tensors(remove_duplicate=False):
                names.setdefault(id(tensor), []).append(name)

        def home(name: str) -> tuple[nn.Module, str]:
            path, _, leaf = name.rpartition(".")
            return model.get_submodule(path), leaf

        self._places = {
            name: [*map(home, alike)] for alike in names.values() for name in alike
        }  # under each of its names all places of a tensor

    def lend(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in the place of the states of these names, with the states' attributes."""
        for name, tensor in tensors.items():
            for module, leaf in self._places[name]:
                vars(tensor).update(attributes_of(getattr(module, leaf)))
                lend(module, leaf, tensor)


LOOKUPS = frozenset(
    "getattr vars __dict__ get_submodule get_parameter get_buffer modules named_modules children "
    "named_children parameters named_parameters buffers named_buffers _modules _parameters "
    "_buffers".split()
)
"""Names by which code can reach any state of a module, as `getattr(self, f"head{task}")` does."""


def states_of(model: nn.Module, site: Site) -> list[str]:
    """The names of the parameters and buffers that a call may read; the loss reads none."""
    if site.method == LOSS:
        return []
    module = model.get_submodule(site.module)
    call(model, site)  # lines of a method have code of their own from now on
    prefix = f"{site.module}." if site.module else ""
    names, reads_any = first_names(model), site.method == WHOLE
    words = set[str]() if reads_any else set(_words(type(module), site.method, set()))
    reads_any = reads_any or bool(words & LOOKUPS)
    return list(
        dict.fromkeys(
            names[id(tensor)]
            for name, tensor in named(model).items()
            if name.startswith(prefix)
            and id(tensor) in names
            and (reads_any or name.removeprefix(prefix).partition(".")[0] in words)
        )
    )


class ChangedStates:
    """Finds the parameters and buffers that a call has replaced or written; made before the call.

    Args:
        states: names of those that the call may read. Buffers among them are compared by value,
            as batch norm and `.data` write without a new version of the tensor.
    """

    def __init__(self, model: nn.Module, states: Sequence[str]) -> None:
        self._model = model
        tensors = named(model)
        self._versions = {name: (tensor, version(tensor)) for name, tensor in tensors.items()}
        self._values = {
            name: tensors[name].clone() for name in states if _is_small_buffer(tensors[name])
        }

    def written(self, site: Site) -> Iterator[tuple[str, Tensor, int]]:
        """The name of each, the tensor before, and its bytes.

        Raises:
            Wider: it is a parameter, is new, or has another shape than before.
        """
        for name, tensor in named(self._model).items():
            before, count = self._versions.get(name, (None, 0))
            values = self._values.get(name)
            same = before is tensor and version(tensor) == count
            if same and (values is None or torch.equal(tensor, values)):
                continue
            kept = before is not None and before.shape == tensor.shape and not is_sparse(tensor)
            if before is None or isinstance(before, nn.Parameter) or not kept:
                raise Wider(site, f"it writes {name!r}, or gives it another shape")
            yield name, before, bytes_of(tensor)


class Writable(Protocol):
    """Gives the buffers among these states that a call may write, with their bytes."""

    def __call__(self, states: Iterable[str], *, every: bool) -> dict[str, int]: ...


def writable(model: nn.Module, written: Iterable[str]) -> Writable:
    """What says of a call's states which ones it may write, though no measured run wrote them.

    A micro-batch may take a branch that no measured run took: where a class has no row in them, an
    expert no token. So a call may write a buffer if one of the same name is written in a module of
    the same class; and every buffer, if nothing is known of what the call does.

    Args:
        written: the names of the buffers that calls were seen to write.
    """
    buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not is_sparse(b)}

    def kind(name: str) -> tuple[type, str]:
        path, _, leaf = name.rpartition(".")
        return type(model.get_submodule(path)), leaf

    known = {*map(kind, written)}

    def among(states: Iterable[str], *, every: bool) -> dict[str, int]:
        own = (name for name in states if name in buffers)
        return {name: bytes_of(buffers[name]) for name in own if every or kind(name) in known}

    return among


def _is_small_buffer(tensor: Tensor) -> bool:
    excluded = isinstance(tensor, nn.Parameter) or is_sparse(tensor)
    return not excluded and tensor.numel() <= MOST_ELEMENTS


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


_TORCHS = frozenset(vars(nn.Module())) - {"training"}

Attributes = Mapping[str, tuple[object, int | None]]
"""Values of modules' attributes by their names in the model; of a container with its length."""


def attributes_in(model: nn.Module, path: str) -> Attributes:
    """The attributes of a module and of those in it, but for private ones of torch."""
    return {
        f"{inner}.{name}".lstrip("."): (value, _held(value))
        for inner, module in model.get_submodule(path).named_modules(prefix=path)
        for name, value in vars(module).items()
        if name not in _TORCHS
        and not (name.startswith("_") and type(module).__module__.startswith("torch."))
    }


def _held(value: object) -> int | None:
    return len(value) if isinstance(value, list | dict | set) else None


def changes(before: Attributes, after: Attributes) -> Iterator[str]:
    """The names of attributes that have another value than before, or hold more or less."""
    for name, (value, length) in after.items():
        known, held = before.get(name, (NotImplemented, None))
        if known is value and held == length:
            continue
        plain = type(known) is type(value) and _is_plain(known) and _is_plain(value)
        if not plain or known != value:
            yield name


def read_by_others(model: nn.Module, site: Site, name: str, loss: object) -> bool:
    """Whether code outside of a site may read an attribute, by its name: all methods of the
    model's classes count, but those that the site's own method calls, and the loss."""
    leaf = name.rpartition(".")[2]
    inner = model.get_submodule(site.module)
    if leaf == "training":
        return True
    called = set[str]()  # by the site's method
    if site.method != WHOLE:
        list(_words(type(inner), site.method, called))
    own = _classes(inner.modules() if site.method == WHOLE else [inner])
    functions = [
        method
        for kind in _classes(model.modules())
        for word, method in vars(kind).items()
        if kind not in own or (site.method != WHOLE and word not in called)
    ]
    of_loss = (method for kind in _classes([loss]) for method in vars(kind).values())
    return _loads([*functions, loss, *of_loss], leaf)


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
    return _loads((f for kind in _classes(modules) for f in vars(kind).values()), attribute)


def _classes(objects: Iterable[object]) -> set[type]:
    """The classes of modules and a loss, but the bases of all modules."""
    return {base for each in objects for base in type(each).__mro__} - {*nn.Module.__mro__}


def _loads(functions: Iterable[object], attribute: str) -> bool:
    """Whether the code of functions or methods loads an attribute of this name."""
    plain = (inspect.unwrap(_plain(function)) for function in functions)
    codes = (code for function in plain for code in codes_in(getattr(function, "__code__", None)))
    loads = (
        instruction
        for code in codes
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith("LOAD_")  # getattr(self, "mode") too
    )
    return any(load.argval == attribute for load in loads)


def _plain(method: Any) -> Any:
    """The function of a property, a static or a class method."""
    return getattr(method, "fget", None) or getattr(method, "__func__", method)


def _words(kind: type, method: str, known: set[str]) -> Iterator[str]:
    """The names and texts in the code of a method and of the methods whose names are in it."""
    known.add(method)
    for inner in codes_in(getattr(getattr(kind, method, None), "__code__", None)):
        yield from (text.partition(".")[0] for text in inner.co_consts if isinstance(text, str))
        for word in inner.co_names:
            yield word
            if word not in known and callable(getattr(kind, word, None)):
                yield from _words(kind, word, known)
