"""`python -m autopipe`, and what `torchrun -m autopipe` starts."""

from autopipe.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
