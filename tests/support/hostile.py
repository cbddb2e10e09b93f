"""Files that are made to harm, and a fence around whoever reads them.

    mutated(data, draw)        JSON data with something else in one place
    damaged(text, draw)        the bytes of a file, changed as bytes
    with fenced(folder): ...   an error where the block writes elsewhere, starts a program or hangs

The fence is Python's own (PEP 578): each file that is opened to be written, each file that is
renamed or removed, and each program that is started passes it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NEVER = "never"
"""The file that hostile texts try to make: it is in no folder."""

TEXTS = (
    *(f"$(touch {NEVER})", f"`touch {NEVER}`", f"; touch {NEVER} #", f"' ; touch {NEVER} ; '"),
    *(f'" ; touch {NEVER} ; "', f"\ntouch {NEVER}\n", f"x && touch {NEVER}", f"| touch {NEVER}"),
    *(f"\r\ntouch {NEVER}", f"\u2028touch {NEVER}", "${IFS}", "'\"", "\\", "-rf", "--help"),
    *(
        "{{ 7 * 7 }}",
        "{% raw %}",
        "{0.__class__}",
        "%s%n",
        "\0",
        "\n",
        "",
        "é",
        "\x1b[2J",
        "\udc80",
    ),
    *("!!python/object/apply:os.system [id]", "a: b\nc: d", "- x", "&a [*a, *a]", "<<: *a", "#"),
    *(f'"""\nimport os; os.system("touch {NEVER}")\n"""', "__import__('os')", "]]>", "</script>"),
    *("../../../escaped", "/etc/passwd", "/dev/zero", "~root", "C:\\x", "a" * 10_000, "a/" * 2000),
)
"""What shells, YAML, Python, templates, HTML and file systems read as something else than text."""

NUMBERS = (-1, 0, 1, 2**31, 2**63, 1e308, -1e308, 5e-324, 10**400, 0.5, True, -(2**70))


def mutated(data: Any, draw: random.Random) -> Any:
    """JSON data with something else in one place: gone, twice, or of another value or kind."""
    found = json.loads(json.dumps(data))
    at = found
    while True:
        keys = [*at] if isinstance(at, dict) else [*range(len(at))]
        key = draw.choice(keys)
        if not isinstance(at[key], dict | list) or not at[key] or draw.random() < 0.1:
            break
        at = at[key]
    choice = draw.randrange(8)
    if choice == 0:
        del at[key]
    elif choice == 1 and isinstance(at, list):
        at.append(at[key])
    elif choice == 2 and isinstance(at, dict):
        at[draw.choice(TEXTS)] = at.pop(key)
    elif choice < 5 or isinstance(at[key], str):
        at[key] = draw.choice(TEXTS)
    else:
        at[key] = draw.choice([*NUMBERS, None, [], {}, [at[key]], {"x": at[key]}])
    return found


def damaged(data: bytes, draw: random.Random) -> bytes:
    """The bytes of a file, changed as bytes: cut, flipped, repeated, or another file's."""
    at, choice = draw.randrange(len(data)), draw.randrange(6)
    if choice == 0:
        return data[:at]
    if choice == 1:
        return bytes([*data[:at], data[at] ^ 1 << draw.randrange(8), *data[at + 1 :]])
    if choice == 2:
        end = min(len(data), at + draw.randrange(1, 200))
        return data[:end] + data[at:end] + data[end:]
    if choice == 3:
        return data[:at] + draw.randbytes(draw.randrange(1, 50)) + data[at:]
    if choice == 4:
        return data[:at] + draw.choice(TEXTS).encode(errors="surrogatepass") + data[at:]
    return draw.choice(OTHER)


OTHER = (
    *(b"", b"\0", b"\xff\xfe{", b"[]", b"7", b"null", b"{}", b"NaN", b'{"format": Infinity}'),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"format": ' + b"9" * 5000 + b"}"),
    *(b"\x80\x04cos\nsystem\n(S'touch never'\ntR.", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n"),
)
"""Whole files of other kinds."""


# --- the fence

_MOST_SECONDS = 30
_MOST_BYTES = 3 << 30
"""Of address space beyond what the process has: a file of a few kilobytes asks for no more."""

_allowed: list[Path] = []
"""The folder that may be written, while a fence stands."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod",
            "os.truncate", "shutil.rmtree", "shutil.move")  # fmt: skip


class Escaped(BaseException):
    """What was read has made its reader do what it may not; nobody catches this."""


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event in _STARTS or event.startswith("socket.connect"):
        raise Escaped(f"{event}: {args!r}")
    if event == "open" and isinstance(args[0], str | bytes) and args[2] & _WRITES:
        _check(event, args[0])
    elif event in _CHANGES:
        for path in args:
            if isinstance(path, str | bytes):
                _check(event, path)


def _check(event: str, path: str | bytes) -> None:
    there = os.path.realpath(os.fsdecode(path))
    if there != os.devnull and not there.startswith(f"{_allowed[-1]}{os.sep}"):
        raise Escaped(f"{event}: {there}")


def _hung(number: int, frame: object) -> None:
    raise Escaped(f"nothing came of it in {_MOST_SECONDS} s")


_watching: list[bool] = []


@contextmanager
def fenced(folder: Path) -> Iterator[None]:
    """Within the block only `folder` is written, nothing is started and nothing takes long.

    Raises:
        Escaped: what was done in the block, with the path or the command.
    """
    if not _watching:  # a hook stays as long as the process
        sys.addaudithook(_watch)
        _watching.append(True)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, _hung)
    resource.setrlimit(resource.RLIMIT_AS, (own + _MOST_BYTES, limits[1]))
    signal.alarm(_MOST_SECONDS)
    _allowed.append(folder.resolve())
    try:
        yield
    finally:
        _allowed.pop()
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)
