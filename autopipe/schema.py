"""The published schema of the plan file: `python -m autopipe.schema` writes plan.schema.json."""

from __future__ import annotations

import sys
from pathlib import Path

from autopipe import codec, files
from autopipe.plan import Plan

PATH = Path(__file__).with_name("plan.schema.json")


def text() -> str:
    """What plan.schema.json holds for the plan as its dataclasses are now."""
    return codec.layout(codec.schema(Plan, title="autopipe plan"))


def main() -> None:
    """Write the schema beside this file."""
    files.write(text(), PATH)
    print(PATH, file=sys.stderr)


if __name__ == "__main__":
    main()
