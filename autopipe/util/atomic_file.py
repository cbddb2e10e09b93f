"""Write a file or a folder under a temporary name and rename it, so that it is whole or absent.

A link stays: the file that it names is written. What is no file (`/dev/null`, a pipe) stays too,
and gets the bytes as they come.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from autopipe.errors import AutopipeError


def write(data: str | bytes, path: Path) -> None:
    """Write `data` to the file at `path`; text is encoded as UTF-8.

    Raises:
        AutopipeError: as `writing`.
    """
    with writing(path) as file:
        file.write(data if isinstance(data, bytes) else data.encode())


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that is renamed to `path` if the block ends without an error.

    Raises:
        AutopipeError: the file cannot be written; no temporary file is left, and an earlier
            file at `path` is unchanged.
    """
    target = _behind(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if _is_no_file(path):
            with open(path, "wb") as file:
                yield file
            return
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        raise AutopipeError(
            f"{path} cannot be written: {error.strerror}",
            hint=_hint(error, "is the folder there, and are you allowed to write in it?"),
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `path` if the block ends without an error.

    Raises:
        AutopipeError: it cannot be written; no temporary folder is left, and an earlier folder at
            `path` is unchanged.
    """
    path = _behind(path)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    old = beside.with_suffix(".old")
    try:
        beside.mkdir()
        yield beside
        if path.exists():
            os.replace(path, old)
        os.replace(beside, path)
    except (OSError, AutopipeError) as told:
        if old.exists() and not path.exists():
            os.replace(old, path)
        # An error in the temporary folder is reported for the folder that was asked for.
        error = told if isinstance(told, OSError) else told.__cause__
        inside = isinstance(told, OSError) or told.message.startswith(str(beside))
        if not (inside and isinstance(error, OSError)):
            raise
        raise AutopipeError(
            f"{path} cannot be written: {error.strerror}",
            hint=_hint(error, "is the folder above it there, and are you allowed to write in it?"),
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _behind(path: Path) -> Path:
    """What a link leads to; one that leads to itself as it is."""
    return Path(os.path.realpath(path))


def _is_no_file(path: Path) -> bool:
    """Whether a path is that of a device, a pipe or a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _hint(error: OSError, otherwise: str) -> str:
    """The next thing to try after an error of the operating system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room on its disk, or name a folder on another one"
    if error.errno == errno.EFBIG:
        return "`ulimit -f` says how large a file may be here; a file system may have its own limit"
    if error.errno == errno.EISDIR:
        return "it is a folder: name a file in it"
    return otherwise


def wait_for(path: Path, seconds: float) -> None:
    """Wait for a file that another process writes.

    Raises:
        AutopipeError: the file has not appeared in time.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise AutopipeError(
                f"{path} has not come within {seconds:g} s, which another process was to write",
                hint="is its folder one that all nodes share?",
            )
        time.sleep(0.1)


def check_folder(path: Path) -> None:
    """Refuse, before long work, an output path whose folder is not there or takes no files.

    Raises:
        AutopipeError: names the folder.
    """
    if _is_no_file(path):
        return
    folder = _behind(path).parent
    _check_no_file(folder, path)
    if not folder.is_dir():
        raise AutopipeError(
            f"{path} cannot be written: there is no folder {folder}",
            hint=f"mkdir -p {shlex.quote(str(folder))}",
        )
    _try(folder, path)


def check_new_folder(path: Path, option: str) -> None:
    """Refuse, before long work, a folder for files if it cannot be made, or takes none.

    Args:
        option: the command's option that names the folder.

    Raises:
        AutopipeError: the path is a file, or the system refuses, in its own words.
    """
    if path.exists() and not path.is_dir():
        raise AutopipeError(
            f"{option} {path}: expected a folder, found a file", hint="name another one"
        )
    above = _behind(path)
    _check_no_file(above, path)
    _try(next(folder for folder in (above, *above.parents) if folder.exists()), path)


def _check_no_file(folder: Path, path: Path) -> None:
    """Refuse a path in which a file stands where a folder is to be."""
    for above in (folder, *folder.parents):
        if above.exists():
            if not above.is_dir():
                raise AutopipeError(
                    f"{path} cannot be written: expected a folder at {above}, found a file",
                    hint="name a path in another folder",
                )
            return


def _try(folder: Path, path: Path) -> None:
    """Make a file in a folder and remove it: the folder's mode does not tell whether root may
    write, or whether the disk is read-only."""
    try:
        descriptor, made = tempfile.mkstemp(dir=folder, prefix=".")
        os.close(descriptor)
        os.unlink(made)
    except OSError as error:
        raise AutopipeError(
            f"{path} cannot be written: no file can be made in {folder}: {error.strerror}",
            hint=_hint(error, "name a folder in which you may write"),
        ) from error


def check_model(path: Path) -> None:
    """Refuse, before training, a path to which a model cannot be saved.

    Raises:
        AutopipeError: the suffix is wrong, or the path is a folder; or as `check_folder`.
    """
    if path.suffix != ".safetensors":
        raise AutopipeError(
            f"{path} cannot be written: a model is saved as safetensors",
            hint=f"name it {path.with_suffix('.safetensors')}",
        )
    if path.is_dir():
        raise AutopipeError(f"{path} cannot be written: it is a folder", hint="name a file in it")
    check_folder(path)
