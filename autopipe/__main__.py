"""The entry point of `python -m autopipe` and of `torchrun -m autopipe`."""

import os
import sys

from autopipe.util.seeding import HASHES, hashes_at_random

__all__ = ["main"]


def main() -> None:
    """Run the command line; a command that called `gc_pause.until_exit` skips torch's teardown."""
    if hashes_at_random() and sys.executable:  # begin again, as every rank does
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, again, {**os.environ, HASHES: "0"})
    try:
        from autopipe import cli
        from autopipe.util import gc_pause
    except KeyboardInterrupt:  # as a command that has begun ends by it
        sys.exit(130)

    gc_pause.in_a_program()
    try:
        cli.main()
    except SystemExit as left:
        if left.code in (None, 0):
            gc_pause.end(0)
        raise


if __name__ == "__main__":
    main()
