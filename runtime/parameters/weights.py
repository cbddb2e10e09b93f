"""Reads a checkpoint's tensors by the model's own names.

    model.safetensors                one file
    folder of *.safetensors          all of them, or those that its index names
    model.pt, pytorch_model*.bin     a state_dict that torch.save has written, alone or under a key
    folder with .metadata            of torch.distributed.checkpoint

Every rank reads its own tensors, and nothing else of them.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from autopipe.errors import ModelError
from autopipe.ir.graph import Graph, shape_at
from autopipe.util.progress import Say

KINDS = (
    "a safetensors file, a state_dict that torch.save has written, a folder of either or of "
    "torch.distributed.checkpoint, or a run's checkpoint"
)

UNDER = ("state_dict", "model", "model_state_dict", "module", "weights")
"""Keys under which training scripts put a state_dict beside all else."""

PREFIXES = ("", "module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.")
"""What DistributedDataParallel, torch.compile and Lightning put in front of names."""

_DISTRIBUTED = tuple(
    key + prefix for key in ("", "app.model.", *(f"{key}." for key in UNDER)) for prefix in PREFIXES
)
"""What stands in front of names in a distributed checkpoint, whose keys are paths; `app.model` is
that of torch's own tutorial."""


def read(
    path: Path,
    graph: Graph,
    names: Sequence[str],
    optional: Collection[str] = (),
    say: Say | None = None,
) -> dict[str, Tensor]:
    """The tensors of `names`, in the dtypes of the graph.

    A tied parameter may stand under any of its names.

    Args:
        optional: those that may be missing, and are left out then.
        say: takes a line of talk about the names in the file.

    Raises:
        ModelError: the path has no weights, or a tensor is missing or has another shape.
    """
    if path.is_dir() and (path / ".metadata").is_file():
        return _read_distributed(path, graph, names, optional, say)
    tensors, prefixes, keys = dict[str, Tensor](), set[str](), list[str]()
    places, strangers = dict[str, tuple[Path, str]](), list[str]()
    known = every_name(graph)
    for file in _files(path):
        with _Stored(file) as stored:
            keys += stored.keys
            prefix = _prefix(known, stored.keys)
            strangers += strangers_in(known, stored.keys, prefix)
            for name in names:
                for key in _stored_names(graph, name, stored.keys, prefix):
                    tensor, place = stored.tensor(key), (file, key)
                    _check_kind(place, tensor.dtype, graph.states[name].held.dtype)
                    _check_same(
                        name, places.setdefault(name, place), tensors.get(name), place, tensor
                    )
                    tensors.setdefault(name, tensor)
                    prefixes.add(prefix)
    say_names(path, prefixes, strangers, say)
    check_shapes(path, graph, names, {n: t.shape for n, t in tensors.items()}, optional, keys)
    return {name: tensor.to(graph.states[name].held.dtype) for name, tensor in tensors.items()}


def _check_kind(place: tuple[Path, str], stored: torch.dtype, held: torch.dtype) -> None:
    """Refuse numbers that stand for others, by a scale beside them."""
    file, key = place
    if stored == held:
        return
    if _is_of_reals(held) and not (_is_of_reals(stored) and stored.itemsize > 1):
        raise ModelError(
            f"{file}: {key!r} is stored in {_named(stored)}, and the model has it in "
            f"{_named(held)}: quantized weights have scales beside them, which are not read",
            hint="save the model dequantized, as model.dequantize() of transformers makes it",
        )
    if stored.is_complex and not held.is_complex:
        raise ModelError(
            f"{file}: {key!r} is stored in {_named(stored)}, in the model {_named(held)}"
        )


def _is_of_reals(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_same(
    name: str,
    first: tuple[Path, str],
    before: Tensor | None,
    place: tuple[Path, str],
    tensor: Tensor,
) -> None:
    """Refuse a tensor of the model that is stored twice, with unlike values.

    Args:
        first, before: where it was found, and its values; None: it is found for the first time.
    """
    if before is None or torch.equal(before, tensor):
        return
    if first[1] == place[1]:
        raise ModelError(
            f"{first[0]} and {place[0]} both have {place[1]!r}, with other values",
            hint="name one of the files, or move the other one out of the folder",
        )
    raise ModelError(
        f"{place[0]}: {first[1]!r} and {place[1]!r} have other values, and are one tensor of the "
        f"model, {name!r}",
        hint="untie them: of transformers' models by tie_word_embeddings = false in config.json",
    )


def every_name(graph: Graph) -> frozenset[str]:
    """All names of the model's tensors; a tied one has several."""
    return frozenset(n for name, state in graph.states.items() for n in (name, *state.aliases))


def strangers_in(known: Collection[str], keys: Collection[str], prefix: str = "") -> list[str]:
    """The stored names that are none of the model's, which are `known`."""
    return [key for key in keys if not (key.startswith(prefix) and key[len(prefix) :] in known)]


def say_names(
    path: Path, prefixes: Collection[str], strangers: Sequence[str], say: Say | None
) -> None:
    """Say what is left out of the stored names, and of the stored tensors."""
    if say is None:
        return
    for prefix in sorted({*prefixes} - {""}):
        say(f"{path}: its names begin with {prefix!r}, which is left out")
    if strangers:
        others = f" and {len(strangers) - 1} more" if len(strangers) > 1 else ""
        say(f"{path}: the model has no {min(strangers)!r}{others}: not read")


class _Stored:
    """An open file of tensors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors: Mapping[str, Tensor] | None = None
        with path.open("rb") as file:
            begins = file.read(4)
        if begins.startswith((b"PK\x03\x04", b"\x80\x02")):
            self._tensors = _state_dict(path, zipped=begins.startswith(b"PK"))
            return
        try:
            self._file: Any = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            if "not fully covered" in str(error):
                raise ModelError(
                    f"weights {str(path)!r} is a safetensors file that is not as long as it says",
                    hint="was it copied or downloaded whole?",
                ) from error
            raise ModelError(
                f"weights {str(path)!r} is no file of weights: it does not begin as one",
                hint=f"weights are {KINDS}",
            ) from error

    def __enter__(self) -> _Stored:
        if self._tensors is None:
            self._file.__enter__()
            self.keys: Collection[str] = set(self._file.keys())
        else:
            self.keys = self._tensors.keys()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._tensors is None:
            self._file.__exit__(*error)

    def tensor(self, key: str) -> Tensor:
        """A tensor of its own: the file may change afterwards."""
        if self._tensors is not None:
            return self._tensors[key].clone()
        found: Tensor = self._file.get_tensor(key)
        return found


def _files(path: Path) -> list[Path]:
    """The files that weights lie in, if `path` is one of them, their folder or its index."""
    if path.name.endswith(".index.json") and path.is_file():
        return _indexed(path)
    if path.is_file():
        return [path]
    for pattern, whole in (("*.safetensors", "model"), ("pytorch_model*.bin", "pytorch_model")):
        alone = path / f"{whole}.{pattern.rpartition('.')[2]}"
        if (path / "config.json").is_file() and alone.is_file():  # what transformers reads there
            return [alone]
        indexes = sorted(path.glob(f"{pattern}.index.json"))
        if found := _indexed(indexes[0]) if indexes else sorted(path.glob(pattern)):
            return found
    there = "there is no such file or folder" if not path.exists() else "the folder has none"
    raise ModelError(f"weights {str(path)!r}: {there}", hint=f"weights are {KINDS}")


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index}: it has no weight_map, which says what is in which file") from (
            error
        )
    for name in names:
        if not (index.parent / name).is_file():
            raise ModelError(
                f"{index}: it names {name!r}, and there is no such file next to it",
                hint="was the folder copied whole?",
            )
    return [index.parent / name for name in names]


def _state_dict(path: Path, *, zipped: bool) -> Mapping[str, Tensor]:
    """The tensors in a file of torch.save; in a zipped one they stay on the disk until read."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped or None)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"weights {str(path)!r} holds more than tensors, a whole model perhaps",
            hint="torch.save(model.state_dict(), 'model.pt') saves its weights alone",
        ) from error
    except (RuntimeError, EOFError, KeyError) as error:
        raise ModelError(
            f"weights {str(path)!r} is no file of torch.save, or not a whole one",
            hint=f"weights are {KINDS}",
        ) from error
    for found in (saved, *(saved.get(key) for key in UNDER if isinstance(saved, Mapping))):
        if isinstance(found, Mapping):
            tensors = {str(name): t for name, t in found.items() if isinstance(t, Tensor)}
            if tensors:
                return tensors
    has = f"the keys {sorted(map(str, saved))}" if isinstance(saved, Mapping) else type(saved)
    raise ModelError(
        f"weights {str(path)!r} has no tensors by name, but {has}",
        hint=f"a state_dict, alone or under one of {', '.join(UNDER)}",
    )


def _read_distributed(
    path: Path,
    graph: Graph,
    names: Sequence[str],
    optional: Collection[str],
    say: Say | None,
) -> dict[str, Tensor]:
    # A quarter of a second to import, which every other start of a rank can do without.
    from autopipe.runtime.parameters.distributed_folder import DistributedFolder

    stored = DistributedFolder(path)
    prefix = _prefix(every_name(graph), stored.shapes, _DISTRIBUTED)
    found = {name: stored_as(graph, name, stored.shapes, prefix) for name in names}
    keys = {name: key for name, key in found.items() if key is not None}
    shapes = {name: stored.shapes[key] for name, key in keys.items()}
    check_shapes(path, graph, names, shapes, optional, stored.shapes)
    say_names(path, {prefix} if keys else set(), (), say)
    specs = {name: graph.states[name].held for name in keys}
    for name, key in keys.items():
        _check_kind((path, key), stored.dtypes[key], specs[name].dtype)
    tensors = {
        name: torch.empty(shape_at(spec, 1), dtype=spec.dtype, device="cpu")
        for name, spec in specs.items()
    }
    stored.fill({keys[name]: tensor for name, tensor in tensors.items()})
    return tensors


def _prefix(
    known: Collection[str], keys: Collection[str], prefixes: Sequence[str] = PREFIXES
) -> str:
    """What stands before most of the stored names, `keys`, that are the model's, `known`."""

    def found(prefix: str) -> int:
        return sum(key.startswith(prefix) and key[len(prefix) :] in known for key in keys)

    return max(prefixes, key=found)


def stored_as(graph: Graph, name: str, keys: Collection[str], prefix: str = "") -> str | None:
    """Under which of its names a tensor is stored, with a prefix; None: under none."""
    return next(iter(_stored_names(graph, name, keys, prefix)), None)


def _stored_names(graph: Graph, name: str, keys: Collection[str], prefix: str) -> list[str]:
    """All of its names under which a tensor is stored, with a prefix."""
    every = (name, *graph.states[name].aliases)
    return [prefix + key for key in every if prefix + key in keys]


def check_shapes(
    path: Path,
    graph: Graph,
    names: Sequence[str],
    stored: Mapping[str, Sequence[int]],
    optional: Collection[str],
    keys: Collection[str] = (),
) -> None:
    """Refuse weights that lack a tensor of the model, or have it in another shape.

    Args:
        keys: the stored tensors, by their stored names.

    Raises:
        ModelError: names the tensor; both shapes.
    """
    for name in names:
        shape = list(shape_at(graph.states[name].spec, 1))
        if name not in stored:
            if name in optional:
                continue
            nearest = get_close_matches(name, keys, 1, 0.0)
            raise ModelError(
                f"{path}: holds no {name!r}, which the model has as {shape}",
                hint=f"of its {len(keys)} names the nearest is {nearest[0]!r}" if nearest else None,
            )
        if list(stored[name]) != shape:
            raise ModelError(
                f"{path}: {name!r} has the shape {list(stored[name])}, in the model {shape}"
            )
