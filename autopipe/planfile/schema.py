"""The published schema of the plan file: plan.schema.json, beside the package's `__init__`.

`python -m autopipe.planfile.schema` writes it again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autopipe.planfile.contents import Plan
from autopipe.util import atomic_file, codec, json_text

PATH = Path(__file__).parents[1] / "plan.schema.json"


def text() -> str:
    """What plan.schema.json holds for the plan as its dataclasses are now."""
    return json_text.layout(codec.schema(Plan, title="autopipe plan"))


def main() -> None:
    """Write the schema to `PATH`."""
    atomic_file.write(text(), PATH)
    print(PATH, file=sys.stderr)


if __name__ == "__main__":
    main()
