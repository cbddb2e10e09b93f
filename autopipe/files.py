"""Files that are whole or not there: written beside their place, then renamed into it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from autopipe.errors import AutopipeError


def write(data: str | bytes, path: Path) -> None:
    """Put `data` at `path`; text as UTF-8.

    Raises:
        AutopipeError: the file cannot be written; then nothing is left behind, and what stood
            there still does.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
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
