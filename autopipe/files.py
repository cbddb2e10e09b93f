"""Files that are whole or not there: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from autopipe.errors import AutopipeError


def write(data: str | bytes, path: Path) -> None:
    """Put `data` at `path`; text as UTF-8.

    Raises:
        AutopipeError: as `writing`.
    """
    with writing(path) as file:
        file.write(data if isinstance(data, bytes) else data.encode())


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that stands at `path` once the block has ended well.

    Raises:
        AutopipeError: the file cannot be written; then nothing is left behind, and what stood
            there still does.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise AutopipeError(
            f"{path} cannot be written: {error.strerror}",
            hint="is the folder there, and are you allowed to write in it?",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Refuse a file that is to be written in the end where there is no folder for it.

    Raises:
        AutopipeError: names the folder.
    """
    folder = path.resolve().parent
    if not folder.is_dir():
        raise AutopipeError(f"{path} cannot be written: there is no folder {folder}")


def check_model(path: Path) -> None:
    """Refuse a file that a model is to be saved in, and cannot.

    Raises:
        AutopipeError: its name ends otherwise, it is a folder, or there is none for it.
    """
    if path.suffix != ".safetensors":
        raise AutopipeError(
            f"{path} cannot be written: a model is saved as safetensors",
            hint=f"name it {path.with_suffix('.safetensors')}",
        )
    if path.is_dir():
        raise AutopipeError(f"{path} cannot be written: it is a folder", hint="name a file in it")
    check_folder(path)
