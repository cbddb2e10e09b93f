"""A user's module: import it from a file or by its name; look its names up, and check them.

model.py                    a file, run as `python model.py` would run it
package.module:factory      a module that Python finds
hf:FOLDER, model.onnx       an object with the same names, made from what is in there
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
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

OF_FILES = "autopipe_model_"
"""What a model file's name among the loaded modules begins with, before its own."""


_RESULTS = {
    "nn.Module": nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "torch.optim.lr_scheduler.LRScheduler": LRScheduler,
}


def imported(source: str) -> tuple[Any, str]:
    """The module with a source's functions, and the name of the one that builds the model."""
    if source.startswith(hf_folder.SCHEME):
        return hf_folder.as_module(source), "model"
    if source.endswith(".onnx"):
        return onnx_source.as_module(source), "model"
    name, colon, factory = source.partition(":")
    return _by_name(name) if colon else _by_path(Path(source)), factory or "model"


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
        return _guarded(found, f"{self.source}: {name}", gives)

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


def _guarded(function: Callable[..., Any], what: str, gives: str | None = None) -> Any:
    """Wrap a user's function: check its result, name the line of its errors, build on the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with (
            user_lines.as_model_errors(what),
            off_gpus() if gives in (None, "nn.Module") else nullcontext(),
        ):
            result = function(*args, **kwargs)
        if gives is not None and not isinstance(result, _RESULTS[gives]):
            raise ModelError(
                f"{what}() returned {result!r}, expected {gives}",
                hint="does it end without a `return`?"
                if result is None
                else f"def {what.rpartition(' ')[2]}(...): return an object of it",
            )
        return result

    call.__module__ = function.__module__
    return call


def _by_path(path: Path) -> ModuleType:
    if not path.is_file():
        hint = hf_folder.hint_for(path) or "autopipe plan model.py"
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
    sys.path.insert(0, str(path.parent.resolve()))  # as `python model.py` does
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
