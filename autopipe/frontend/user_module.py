"""A user's module: import it from a file or by its name; look its names up, and check them.

model.py                    a file, run as `python model.py` would run it
package.module:factory      a module that Python finds
hf:FOLDER, model.onnx       an object with the same names, made from what is in there
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from autopipe.errors import ModelError
from autopipe.frontend import hf_folder, user_lines
from autopipe.frontend.construct import off_gpus
from autopipe.onnx_files import source as onnx_source
from autopipe.onnx_files.module import OnnxModule
from autopipe.planfile.contents import names_module

OF_FILES = "autopipe_model_"
"""What a model file's name among the loaded modules begins with, before its own."""


_RESULTS = {
    "nn.Module": nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.lr_scheduler.LRScheduler": LRScheduler,
}


NAMES = (
    *("model", "inputs", "loss", "batches", "optimizer", "scheduler"),
    *("batch_size", "max_grad_norm", "loss_over", "lengths"),
)
"""What a model file may define."""


_OTHER_WORDS = {
    **dict.fromkeys(
        ("criterion", "losses", "lossfn", "lossfunc", "lossfunction", "computeloss"), "loss"
    ),
    **dict.fromkeys(("loader", "dataloader", "trainloader", "traindataloader"), "batches"),
    **dict.fromkeys(("configureoptimizers", "optim", "opt"), "optimizer"),
    **dict.fromkeys(("sched", "lrscheduler"), "scheduler"),
    **dict.fromkeys(("gradclip", "clipgradnorm", "maxnorm"), "max_grad_norm"),
}
"""Other words for these, in small letters -> the name here."""

_VERBS = "get", "make", "build", "create", "my", "train"
_PUT_ASIDE = "no", "old", "without", "unused"
"""First words of a name: those that change nothing, and those of what is not to be taken."""


def imported(source: str) -> tuple[Any, str]:
    """The module with a source's functions, and the name of the one that builds the model."""
    if source.startswith(hf_folder.SCHEME):
        return hf_folder.as_module(source), "model"
    if source.endswith(".onnx"):
        return onnx_source.as_module(source), "model"
    name, _, factory = source.partition(":")
    with as_program(source):
        if names_module(source):
            return _by_name(name), factory or "model"
        return _by_path(Path(source)), "model"


def facts_of(model: nn.Module) -> list[str]:
    """What is worth telling of the files that a model is made from, a sentence each."""
    read = [part for part in model.modules() if isinstance(part, OnnxModule)]
    return [fact for part in read for fact in part.facts()]


@contextmanager
def as_program(source: str) -> Iterator[None]:
    """Within, `sys.argv` has a file's name alone, as `python model.py` sets it: options that the
    file reads have their defaults, and none is taken from autopipe's own command line. Afterwards
    `sys.argv` is as before."""
    before = sys.argv
    name = source.partition(":")[0] if names_module(source) else source
    sys.argv = [name or source]
    try:
        yield
    finally:
        sys.argv = before


@dataclass(frozen=True)
class UserModule:
    """The names in a user's module, looked up and checked; an error says where it stands."""

    names: Any
    source: str

    def any(self, name: str) -> Any:
        """What has this name; None: nothing has."""
        return getattr(self.names, name, None)

    def function(self, name: str, gives: str | None = None) -> Any:
        """The function of this name, its results checked; None: the module has no such name."""
        found = self.any(name)
        if found is None:
            return None
        if not callable(found):
            raise ModelError(
                f"{self.source}: {name} is a {type(found).__name__}, expected a function",
                hint=f"def {name}(...): ..., which gives it",
            )
        return _guarded(found, self.source, name, gives)

    def required(self, name: str, arguments: str, does: str, gives: str | None = None) -> Any:
        """As `function`, for one that each model file has."""
        found = self.any(name)
        if not callable(found) or isinstance(found, nn.Module):
            is_it = f": it is a {type(found).__name__}, built already" if callable(found) else ""
            raise ModelError(
                f"{self.source} has no function {name}({arguments}), which {does}{is_it}",
                hint=f"def {name}({arguments}): ...",
            )
        return self.function(name, gives)

    def setting(self, name: str, default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        """The value of this name, or the default; one that does not fit is refused."""
        found = getattr(self.names, name, default)
        if found is not default and not fits(found):
            raise ModelError(f"{self.source}: {name} is {found!r}, expected {expected}")
        return found


def check_names(names: Any, source: str) -> None:
    """Refuse a name of a model file that nothing in it uses, and that is nearly one of `NAMES`
    which the file has not: it would be passed over, and something else trained.

    A module of a package (`package.module:factory`) may have other names for the rest of it.

    Raises:
        ModelError: says which is meant.
    """
    if names_module(source):
        return
    try:
        data = Path(getattr(names, "__file__", None) or "").read_bytes()
        text = importlib.util.decode_source(data)
        tree, scope = ast.parse(text), symtable.symtable(text, source, "exec")
    except (OSError, SyntaxError, ValueError):  # no file has it, or only its byte code is there
        return
    used = {*NAMES, *_told_in(tree), *_read_in(scope)}
    absent = [name for name in NAMES[2:] if not hasattr(names, name)]  # two are required anyway
    for name, line in _defined_in(tree):
        meant = None if name in used else _meant(name)
        if meant in absent and _can_be(meant, getattr(names, name, None)):
            raise ModelError(
                f"{source}:{line} defines {name!r}, which nothing uses: what a model file may "
                f"define is {', '.join(NAMES)}",
                hint=f"call it {meant!r}; or {'_' + name!r}, if it is something else",
            )


def _can_be(name: str, value: Any) -> bool:
    """Whether a value is of the kind that a model file has under this name."""
    if name in ("batch_size", "max_grad_norm"):
        return isinstance(value, int | float)
    if name == "lengths":
        return isinstance(value, tuple | list)
    if name == "loss_over":
        return isinstance(value, str)
    listed = name == "batches" and isinstance(value, Iterable) and not isinstance(value, str)
    return callable(value) or listed


def _defined_in(tree: ast.Module) -> list[tuple[str, int]]:
    """Functions and variables of a file, but for private ones, with their lines."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append((node.name, node.lineno))
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in (node.target,) if isinstance(node, ast.AnnAssign) else targets:
            if isinstance(target, ast.Name):
                found.append((target.id, node.lineno))
    return [(name, line) for name, line in found if not name.startswith("_")]


def _told_in(tree: ast.Module) -> set[str]:
    """Names of functions with a decorator, which may keep them, and all texts (`__all__`)."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    kept = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list)
    return {text for text in texts if isinstance(text, str)} | {node.name for node in kept}


def _read_in(scope: symtable.SymbolTable) -> set[str]:
    """Names of the file that it reads, in functions too: not those of arguments."""
    top = scope.get_type() == "module"
    own = {
        symbol.get_name()
        for symbol in scope.get_symbols()
        if symbol.is_referenced() and (top or symbol.is_global())
    }
    return own.union(*map(_read_in, scope.get_children()))


def _meant(name: str) -> str | None:
    """The name of a model file's that another one stands for: `optimisers`, `make_batches`."""
    words = name.lower().split("_")
    if words[0] in _PUT_ASIDE:
        return None
    if len(words) > 1 and words[0] in _VERBS:
        words = words[1:]
    plain = "".join(words)
    if plain in _OTHER_WORDS:
        return _OTHER_WORDS[plain]
    by_letters = {known.replace("_", ""): known for known in NAMES}
    close = difflib.get_close_matches(plain, by_letters, 1, cutoff=0.82)
    return by_letters[close[0]] if close else None


def _guarded(function: Callable[..., Any], source: str, name: str, gives: str | None = None) -> Any:
    """Wrap a user's function: check its result, name the line of its errors, build on the CPU."""
    what = f"{source}: {name}"

    def call(*args: Any, **kwargs: Any) -> Any:
        with (
            user_lines.as_model_errors(what),
            as_program(source),
            off_gpus() if gives in (None, "nn.Module") else nullcontext(),
        ):
            result = function(*args, **kwargs)
        if gives is not None and not isinstance(result, _RESULTS[gives]):
            raise ModelError(
                f"{what}() returned {result!r}, expected {gives}",
                hint="does it end without a `return`?"
                if result is None
                else f"def {name}(...): return an object of it",
            )
        return result

    call.__module__ = function.__module__
    return call


def _by_path(path: Path) -> ModuleType:
    if not path.is_file():
        hint = hf_folder.hint_for(path) or "autopipe plan model.py"
        if path.suffix not in ("", ".py") and all(map(str.isidentifier, str(path).split("."))):
            hint = f"{path}:model names the function model() of a module"
        what = ", it is a folder" if path.is_dir() else ""
        raise ModelError(f"there is no model file {str(path)!r}{what}", hint=hint)
    if path.suffix != ".py":
        raise ModelError(f"{path} is no Python file", hint="autopipe plan model.py")
    name = f"{OF_FILES}{path.stem}"
    loader = _FromText(name, str(path.absolute()))
    spec = importlib.util.spec_from_file_location(name, loader.path, loader=loader)
    assert spec is not None, "it has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    # As `python model.py` does, of a symbolic link too: its neighbours are those of the file.
    sys.path.insert(0, str(path.resolve().parent))
    user_lines.run_module(lambda: loader.exec_module(module), str(path))
    return module


class _FromText(SourceFileLoader):
    """Loads a file from its text: byte code from before an edit in the same second looks new."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _by_name(name: str) -> ModuleType:
    if name.endswith(".py"):
        raise ModelError(
            f"{name!r} is a file, and what stands before a colon is a module",
            hint=f"autopipe plan {name}, where the function is called model(); "
            f"or {name.removesuffix('.py').replace('/', '.')}:FUNCTION",
        )
    if not all(map(str.isidentifier, name.split("."))):
        raise ModelError(
            f"{name!r} is no name of a module, which is what stands before a colon",
            hint="autopipe plan package.module:function",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        module: ModuleType = user_lines.run_module(lambda: importlib.import_module(name), name)
    except ModelError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and f"{name}.".startswith(
            f"{missing}."
        ):
            raise ModelError(
                f"there is no module {missing!r}, asked for the model in {name!r}",
                hint=f"modules are looked for in {Path.cwd()} and where packages are installed",
            ) from error
        raise
    return module
