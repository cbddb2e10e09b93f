"""`python -m autopipe`, and what `torchrun -m autopipe` starts."""

from autopipe import cli, garbage

__all__ = ["main"]


def main() -> None:
    """The command line; a command that has said so ends without taking apart what it has built."""
    garbage.in_a_program()
    try:
        cli.main()
    except SystemExit as left:
        if left.code in (None, 0):
            garbage.end(0)
        raise


if __name__ == "__main__":
    main()
