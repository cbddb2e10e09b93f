"""The switch for autopipe's internal checks: on in tests, and in a command with `--debug`.

The checks take time and find bugs of autopipe, never errors of a user, so they are off without
`--debug`. An environment variable holds the switch, which started processes inherit.
"""

from __future__ import annotations

import os

VARIABLE = "AUTOPIPE_SELF_CHECKS"
"""Set to 1, it turns the checks on in this process and in those that it starts."""


def turn_on() -> None:
    """Turn the checks on in this process and in those that it starts from now on."""
    os.environ[VARIABLE] = "1"


def on() -> bool:
    """Whether the checks are on."""
    return os.environ.get(VARIABLE) == "1"
