"""The sizes at which a page's sliders stop."""

from pathlib import Path

import pytest

from autopipe.planfile.contents import Plan
from autopipe.scaling.stops import stops_of

PLAN = Path(__file__).parents[2] / "examples" / "gpt.plan.json"


@pytest.mark.parametrize(
    ("tokens", "stops"),
    [
        (256, (32, 64, 96, 128, 160, 192, 224, 256)),
        (12, (1, 3, 4, 6, 7, 9, 10, 12)),
        (4, (1, 2, 3, 4)),  # bug: 0 tokens were a stop, and some lengths were two
    ],
)
def test_a_row_of_tokens_in_eighths(tokens: int, stops: tuple[int, ...]) -> None:
    assert stops_of(Plan.load(PLAN), tokens, symbolic=True).tokens == stops
