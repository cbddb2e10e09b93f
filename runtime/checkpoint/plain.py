"""States of schedules, batches and optimizers as JSON data, and back; loading runs no code.

    state_dict() --plain--> JSON data --like(state_dict(), .)--> a state_dict of the same types

A tuple becomes a list, and a tuple again if the present state has one in its place. A mapping with
keys that are no strings becomes `{"pairs": [[3, 1], ...]}`. A small tensor becomes
`{"tensor": ["float32", [2], "..."]}` with its bytes in base 64.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autopipe.errors import CheckpointError, DamagedError
from autopipe.runtime.checkpoint.manifest import NAMES
from autopipe.runtime.parameters.export import DTYPES
from autopipe.util.dtypes import name_of

_PAIRS, _TENSOR = "pairs", "tensor"

_MOST = 1 << 20
"""Bytes of a tensor in JSON data at most."""


def plain(value: Any, path: str) -> Any:
    """A state as JSON data; `path` names it in errors.

    Raises:
        CheckpointError: a part of it is neither a number, a word, a list nor a mapping.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.dtype in DTYPES and value.nbytes <= _MOST:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        shape = list(value.shape)
        return {_TENSOR: [name_of(value.dtype), shape, b64encode(data.tobytes()).decode()]}
    if isinstance(value, list | tuple):
        return [plain(item, f"{path}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not {_PAIRS, _TENSOR} & {*value}:
            return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
        return {_PAIRS: [[plain(k, path), plain(v, f"{path}[{k}]")] for k, v in value.items()]}
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold",
        hint="numbers, words, lists and mappings of them are kept; what is made anew at every "
        "start can be left out of state_dict()",
    )


@contextmanager
def fence(what: str) -> Iterator[None]:
    """Within, an error that a state of a wrong form causes counts as damage of the checkpoint.

    Args:
        what: the state in words, for the error.

    Raises:
        DamagedError: the block has failed on the state.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedError(f"{what} was not written by this version: {error!r}") from error


def has_words(data: Any) -> bool:
    """Whether JSON data that `plain` made is a mapping whose keys are strings."""
    return isinstance(data, dict) and set(data) not in ({_PAIRS}, {_TENSOR})


def like(present: Any, data: Any) -> Any:
    """A state from JSON data that `plain` made, with the types of the present state.

    Args:
        present: the state of the same object as it is now, before the load.
    """
    if isinstance(data, dict) and set(data) == {_TENSOR}:
        return _tensor(data[_TENSOR], present)
    if isinstance(data, dict):
        of = present if isinstance(present, Mapping) else {}
        if set(data) == {_PAIRS}:
            made = {_key(k): like(of.get(_key(k)), v) for k, v in data[_PAIRS]}
        else:
            made = {key: like(of.get(key), item) for key, item in data.items()}
        kind = type(present)
        return kind(made) if isinstance(present, dict) and kind is not dict else made
    if isinstance(data, list):
        items = present if isinstance(present, list | tuple) else ()
        made_list = [like(items[i] if i < len(items) else None, d) for i, d in enumerate(data)]
        return tuple(made_list) if isinstance(present, tuple) else made_list
    return data


def _tensor(data: Any, present: Any) -> Tensor:
    """A tensor, on the present tensor's device: an optimizer's rate may be on a GPU."""
    dtype, shape, text = data
    found = torch.frombuffer(bytearray(b64decode(text)), dtype=NAMES[dtype]).reshape(shape)
    return found.to(present.device) if isinstance(present, Tensor) else found


def _key(key: Any) -> Any:
    return tuple(map(_key, key)) if isinstance(key, list) else key
