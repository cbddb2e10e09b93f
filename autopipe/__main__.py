"""The entry point of `python -m autopipe` and of `torchrun -m autopipe`."""

from autopipe import cli
from autopipe.util import gc_pause

__all__ = ["main"]


def main() -> None:
    """Run the command line; a command that called `gc_pause.until_exit` skips torch's teardown."""
    gc_pause.in_a_program()
    try:
        cli.main()
    except SystemExit as left:
        if left.code in (None, 0):
            gc_pause.end(0)
        raise


if __name__ == "__main__":
    main()
